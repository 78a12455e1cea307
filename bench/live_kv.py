"""Policies on real engines whose KV cache holds a quarter of the final contexts, and on engines that hold all.

    python -m bench.live_kv [--policies cmlfq,sticky] [--seeds 0,1,2] [--caches 48,192] [--json]

* Two real vLLM engines with the production leader and environment host replay equal work (`bench.replay`); nothing
  is trained.  All trajectories are open at once, and each turn ends with a tool of about `TOOL_S` seconds.
* A policy of the quickstart's size prefills faster than a step takes.  This one has random weights, 6 layers of 256,
  so that a prefill of a context takes as long as some dozens of steps, as it does with a model of 14B on a GPU.
* The order of the policies is reversed with every other seed.
* Recomputed tokens are those of `status`: computed before, and computed again in a later turn.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import msgspec

from bench.harness import median, report
from bench.live_policies import order, progress
from bench.policies import POLICIES
from bench.replay import Replayer, Setup
from bench.simulated_vs_real import model
from libra_hpc.protocol.trace import TrajectoryRecord, TurnRecord

GROUPS, GROUP_SIZE = 12, 4
PROMPT = (400, 800)
"""Range of tokens."""
TURNS = (5, 12)
GENERATED = (8, 40)
"""Range of tokens of a turn."""
ANSWER = (60, 200)
"""Range of tokens of a tool's answer."""
TOOL_S = 0.5
"""Mean of an exponential distribution, cut at four times the mean."""
WARM_UP_GROUPS = 2
"""Groups of the first play, which starts the processes up and does not count."""


class Row(msgspec.Struct, frozen=True):
    """One run."""

    cache_mb: int
    kv_tokens: int
    """KV cache of one engine."""
    policy: str
    seed: int
    makespan_s: float
    prefilled: int
    recomputed: int
    evicted: int
    """Of ``recomputed``: tokens that the KV cache had lost."""
    preempted: int
    prefill_share: float
    """Share of the engines' step time in steps with prefill."""
    load: float


def make_work(seed: int, groups: int = GROUPS) -> list[TrajectoryRecord]:
    """Long contexts in many turns; siblings share the prompt."""
    rng = random.Random(f"live-kv:{seed}")
    work = []
    for group in range(groups):
        prompt = rng.randint(*PROMPT)
        for sample in range(GROUP_SIZE):
            count = rng.randint(*TURNS)
            turns = []
            for number in range(count):
                last = number + 1 == count
                turns.append(
                    TurnRecord(
                        new_tokens=rng.randint(*ANSWER) if number else 0,
                        gen_tokens=rng.randint(*GENERATED),
                        tool=None if last else "tool",
                        outcome=None if last else "ok",
                        tool_s=0.0 if last else min(4 * TOOL_S, rng.expovariate(1 / TOOL_S)),
                    )
                )
            work.append(TrajectoryRecord(f"{seed} {group}", sample, prompt, tuple(turns)))
    return work


def held(work: Sequence[TrajectoryRecord]) -> int:
    """Tokens of all final contexts, with each prompt counted once."""
    prompts = {record.prompt_id: record.prompt_tokens for record in work}
    return sum(record.context - record.prompt_tokens for record in work) + sum(prompts.values())


async def measure(cache_mb: int, policies: Sequence[str], seeds: Sequence[int], folder: Path) -> list[Row]:
    """All runs on two engines of this KV cache."""
    setup = Setup(model=model(), kv_cache_mb=cache_mb, max_model_len=4096)
    replayer = Replayer(setup, folder)
    rows: list[Row] = []
    await replayer.start()
    try:
        await replayer.play(make_work(-1, WARM_UP_GROUPS), POLICIES[policies[0]], WARM_UP_GROUPS)
        for turn, seed in enumerate(seeds):
            work = make_work(seed)
            for policy in order(list(policies), turn):
                played = await replayer.play(work, POLICIES[policy], GROUPS)
                seconds = sum(step.seconds for step in played.steps)
                row = Row(
                    cache_mb=cache_mb,
                    kv_tokens=played.header.kv_tokens,
                    policy=policy,
                    seed=seed,
                    makespan_s=played.makespan_s,
                    prefilled=int(played.total("prefill_tokens")),
                    recomputed=played.recomputed,
                    evicted=played.evicted,
                    preempted=int(played.total("preemptions")),
                    prefill_share=sum(step.seconds for step in played.steps if step.prefill) / seconds,
                    load=played.load,
                )
                rows.append(row)
                progress(
                    f"{cache_mb} MiB, seed {seed}, {policy}: {row.makespan_s:.1f} s, {row.recomputed:,} tokens"
                    f" recomputed, load {row.load:.1f}"
                )
    finally:
        await replayer.stop()
    return rows


def table(rows: Sequence[Row], policies: Sequence[str]) -> list[list[Any]]:
    """Medians over the seeds; ratio of each other policy to the first: median and range."""
    out: list[list[Any]] = []
    for cache in dict.fromkeys(row.cache_mb for row in rows):
        of = {(row.policy, row.seed): row for row in rows if row.cache_mb == cache}
        for policy in policies:
            mine = [row for row in of.values() if row.policy == policy]
            times = [row.makespan_s / of[policies[0], row.seed].makespan_s for row in mine]
            out.append(
                [
                    f"{mine[0].kv_tokens:,}",
                    policy,
                    median([row.makespan_s for row in mine]),
                    f"{min(row.makespan_s for row in mine):.1f}..{max(row.makespan_s for row in mine):.1f}",
                    f"{median(times):.2f} ({min(times):.2f}..{max(times):.2f})",
                    f"{median([row.prefilled for row in mine]):,.0f}",
                    f"{median([row.recomputed for row in mine]):,.0f}",
                    f"{median([row.preempted for row in mine]):.0f}",
                ]
            )
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--policies", default="cmlfq,sticky", help=f"the others are compared with the first; of {', '.join(POLICIES)}"
    )
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--caches", default="48,192", help="KV cache of an engine, MiB")
    parser.add_argument("--json", action="store_true", help="print every run's figures instead of the table")
    options = parser.parse_args()
    policies, seeds = options.policies.split(","), [int(seed) for seed in options.seeds.split(",")]
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="libra-kv-") as name:
        for cache in map(int, options.caches.split(",")):
            folder = Path(name) / str(cache)
            folder.mkdir()
            rows += asyncio.run(measure(cache, policies, seeds, folder))
    if options.json:
        print(json.dumps(msgspec.to_builtins(rows), indent=1))
        return
    contexts = [held(make_work(seed)) / 2 for seed in seeds]
    shares = [
        f"{cache} MiB {policy} {median([row.prefill_share for row in rows if (row.cache_mb, row.policy) == key]):.0%}"
        for key in dict.fromkeys((row.cache_mb, row.policy) for row in rows)
        for cache, policy in [key]
    ]
    notes = [
        f"{GROUPS * GROUP_SIZE} trajectories on two engines, medians of {len(seeds)} seeds; final contexts of"
        f" half of them: {median(contexts):,.0f} tokens, shared prompts counted once.",
        f"Share of step time in steps with prefill: {', '.join(shares)}.",
        "Load averages at the starts of the runs: " + ", ".join(f"{row.load:.1f}" for row in rows) + ".",
    ]
    columns = ["KV tokens", "policy", "makespan s", "range", f"/ {policies[0]}", "prefilled", "recomputed", "preempted"]
    title = "Rollout with KV caches that hold a part of the contexts"
    report(
        "live_kv", title=title, columns=columns, rows=table(rows, policies), notes=notes, raw=msgspec.to_builtins(rows)
    )


if __name__ == "__main__":
    main()
