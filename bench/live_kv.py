"""Policies on real engines whose KV cache holds a quarter of the final contexts, and on engines that hold all.

    python -m bench.live_kv [--policies sticky,cmlfq] [--seeds 0,1,2] [--caches 48,192]

* Two real vLLM engines with the production leader and environment host replay equal work (`bench.replay`); nothing
  is trained.  All trajectories are open at once, and each turn ends with a tool of about `TOOL_S` seconds.
* A policy of the quickstart's size prefills faster than a step takes.  This one has random weights, 6 layers of 256,
  so that a prefill of a context takes as long as some dozens of steps, as it does with a model of 14B on a GPU.
* The order of the policies is reversed with every other seed.
* Recomputed tokens are those of `status`: computed before, and computed again in a later turn.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.harness import Figures, by_turns, median, options, progress, report_policies
from bench.policies import POLICIES
from bench.replay import Replayer, Setup
from bench.simulated_vs_real import model, tool_turn
from libra_hpc.protocol.trace import TrajectoryRecord

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
Key = tuple[str, int]
"""(policy, seed)."""


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


def held(work: Sequence[TrajectoryRecord]) -> int:
    """Tokens of all final contexts, with each prompt counted once."""
    prompts = {record.prompt_id: record.prompt_tokens for record in work}
    return sum(record.context - record.prompt_tokens for record in work) + sum(prompts.values())


async def measure(cache_mb: int, policies: Sequence[str], seeds: Sequence[int], folder: Path) -> dict[Key, Figures]:
    """All runs on two engines of this KV cache."""
    found: dict[Key, Figures] = {}
    async with Replayer(Setup(model=model(), kv_cache_mb=cache_mb, max_model_len=4096), folder) as replayer:
        await replayer.play(make_work(-1, WARM_UP_GROUPS), POLICIES[policies[0]], WARM_UP_GROUPS)
        for seed, policy in by_turns(seeds, policies):
            played = await replayer.play(make_work(seed), POLICIES[policy], GROUPS)
            prefill_s = sum(step.seconds for step in played.steps if step.prefill)
            found[policy, seed] = {
                "makespan, s": played.makespan_s,
                "prefilled": played.total("prefill_tokens"),
                "recomputed": played.recomputed,
                "of it evicted": played.evicted,
                "preempted": played.total("preemptions"),
                "steps with prefill, share of step time": prefill_s / sum(step.seconds for step in played.steps),
                "load average at the start": played.load,
            }
            words = f"{played.makespan_s:.1f} s, {played.recomputed:,} tokens recomputed, load {played.load:.1f}"
            progress(f"{cache_mb} MiB, seed {seed}, {policy}: {words}")
    return found


def main() -> None:
    defaults: dict[str, Any] = {"policies": ["sticky", "cmlfq"], "seeds": [0, 1, 2], "caches": [48, 192]}
    given = options("live_kv", __doc__, **defaults)
    found: dict[Key, dict[str, Figures]] = {}
    with tempfile.TemporaryDirectory(prefix="libra-kv-") as name:
        for cache in given.caches:
            folder = Path(name) / str(cache)
            folder.mkdir()
            for key, figures in asyncio.run(measure(cache, given.policies, given.seeds, folder)).items():
                found.setdefault(key, {})[f"{cache} MiB"] = figures
    contexts = median([held(make_work(seed)) / 2 for seed in given.seeds])
    notes = [
        f"{GROUPS * GROUP_SIZE} trajectories on two engines, medians of {len(given.seeds)} seeds; final contexts of"
        f" half of them: {contexts:,.0f} tokens, shared prompts counted once."
    ]
    report_policies(given, "Rollout with KV caches that hold a part of the contexts", found, notes)


if __name__ == "__main__":
    main()
