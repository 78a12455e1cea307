"""`cmlfq` and `sticky` on real engines whose KV cache holds a quarter of the final contexts, and on ones that hold all.

    python -m bench.live_kv [--seeds 0,1,2] [--caches 48,192]

* Two real vLLM engines with the production leader and environment host replay equal work (`bench.replay`); nothing
  is trained.  All trajectories are open at once, and each turn ends with a tool of about `TOOL_S` seconds.
* A policy of the quickstart's size prefills faster than a step takes.  This one has random weights, 6 layers of 256,
  so that a prefill of a context takes as long as some dozens of steps, as it does with a model of 14B on a GPU.
* The order of the policies is reversed with every other seed, so that drift of the machine's speed cancels.
* Recomputed tokens are those of `status`: computed before, and computed again in a later turn.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
from pathlib import Path
from typing import Any

from bench.harness import options, progress, report, spread
from bench.replay import GROUP_SIZE, Replayer, Setup, model, tool_turn
from libra_hpc.protocol.trace import TrajectoryRecord

POLICIES = ("cmlfq", "sticky")
GROUPS = 12
PROMPT, TURNS, GENERATED, ANSWER = (400, 800), (5, 12), (8, 40), (60, 200)
"""Ranges: tokens of a prompt, turns, tokens of a turn, and of a tool's answer."""
TOOL_S = 0.5
"""Mean of an exponential distribution, cut at four times the mean."""
WARM_UP_GROUPS = 2
"""Groups of the first play, which starts the processes up and does not count."""
COLUMNS = ("KV cache, seed", "cmlfq, s", "sticky, s", "sticky / cmlfq", "recomputed", "by sticky", "load")


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
                new, generated = rng.randint(*ANSWER) if number else 0, rng.randint(*GENERATED)
                tool_s = 0.0 if last else min(4 * TOOL_S, rng.expovariate(1 / TOOL_S))
                turns.append(tool_turn(new, generated, tool_s, last))
            work.append(TrajectoryRecord(f"{seed} {group}", sample, prompt, tuple(turns)))
    return work


async def measure(cache_mb: int, seeds: list[int], folder: Path) -> list[list[Any]]:
    """A row for each seed on two engines of this KV cache."""
    rows = []
    async with Replayer(Setup(model=model(), kv_cache_mb=cache_mb), folder) as replayer:
        await replayer.play(make_work(-1, WARM_UP_GROUPS), "sticky", WARM_UP_GROUPS)
        for number, seed in enumerate(seeds):
            found = {}
            for policy in POLICIES[:: -1 if number % 2 else 1]:
                found[policy] = await replayer.play(make_work(seed), policy, GROUPS)
                progress(f"{cache_mb} MiB, seed {seed}, {policy}: {found[policy].makespan_s:.1f} s")
            ours, theirs = (found[policy] for policy in POLICIES)
            times = (ours.makespan_s, theirs.makespan_s, theirs.makespan_s / ours.makespan_s)
            rows.append([f"{cache_mb} MiB, {seed}", *times, ours.recomputed, theirs.recomputed, ours.load])
    return rows


def main() -> None:
    given = options("live_kv", __doc__, seeds=[0, 1, 2], caches=[48, 192])
    rows, notes = [], []
    for cache in given.caches:
        with tempfile.TemporaryDirectory(prefix="libra-kv-") as name:
            found = asyncio.run(measure(cache, given.seeds, Path(name)))
        rows += found
        notes.append(f"{cache} MiB: sticky / cmlfq {spread([row[3] for row in found])}")
    title = "Rollout with KV caches that hold a part of the contexts"
    report(given, title, columns=COLUMNS, rows=rows, notes=notes, raw=rows)


if __name__ == "__main__":
    main()
