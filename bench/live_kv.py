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
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from bench.gpu.model import random_model
from bench.gpu.setting import SMALLER
from bench.harness import Figures, Options, by_turns, median, options, progress, report_policies
from bench.policies import POLICIES
from bench.replay import Replayer, Setup
from bench.simulated_vs_real import model, tool_turn
from libra_hpc.protocol.trace import TrajectoryRecord
from tests.example_files import write_keychain_tokenizer

GROUP_SIZE = 4
TOOL_S = 0.5
"""Mean of an exponential distribution, cut at four times the mean."""
WARM_UP_GROUPS = 2
"""Groups of the first play, which starts the processes up and does not count."""
Key = tuple[str, int]
"""(policy, seed)."""


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """The work for a kind of device; ranges are of tokens, but for those of turns."""

    groups: int
    prompt: tuple[int, int]
    turns: tuple[int, int]
    generated: tuple[int, int]
    """Of a turn."""
    answer: tuple[int, int]
    """Of a tool."""
    longest: int


LOADS = {
    "cpu": Load(groups=12, prompt=(400, 800), turns=(5, 12), generated=(8, 40), answer=(60, 200), longest=4096),
    "cuda": Load(groups=12, prompt=(3000, 6000), turns=(5, 12), generated=(32, 160), answer=(500, 1600), longest=32768),
}


def make_work(seed: int, load: Load = LOADS["cpu"], groups: int = 0) -> list[TrajectoryRecord]:
    """Long contexts in many turns; siblings share the prompt."""
    rng = random.Random(f"live-kv:{seed}")
    work = []
    for group in range(groups or load.groups):
        prompt = rng.randint(*load.prompt)
        for sample in range(GROUP_SIZE):
            count = rng.randint(*load.turns)
            turns = []
            for number in range(count):
                last = number + 1 == count
                new, generated = rng.randint(*load.answer) if number else 0, rng.randint(*load.generated)
                tool_s = 0.0 if last else min(4 * TOOL_S, rng.expovariate(1 / TOOL_S))
                turns.append(tool_turn(new, generated, tool_s, last))
            work.append(TrajectoryRecord(f"{seed} {group}", sample, prompt, tuple(turns)))
    return work


def held(work: Sequence[TrajectoryRecord]) -> int:
    """Tokens of all final contexts, with each prompt counted once."""
    prompts = {record.prompt_id: record.prompt_tokens for record in work}
    return sum(record.context - record.prompt_tokens for record in work) + sum(prompts.values())


async def measure(given: Options, model: Path, cache_mb: int, folder: Path) -> dict[Key, Figures]:
    """All runs on two engines of this KV cache; after ``--limit-s`` no further seed begins."""
    found: dict[Key, Figures] = {}
    load, end = LOADS[given.device], time.monotonic() + given.limit_s
    setup = Setup(
        model=model,
        kv_cache_mb=cache_mb,
        max_model_len=load.longest,
        device=given.device,
        max_inflight=given.slots,
        max_num_seqs=min(given.slots, 32),
    )
    async with Replayer(setup, folder) as replayer:
        await replayer.play(make_work(-1, load, WARM_UP_GROUPS), POLICIES["sticky"], WARM_UP_GROUPS)
        for seed, policy in by_turns(given.seeds, given.policies):
            if found and time.monotonic() > end and not any(known == seed for _, known in found):
                break
            played = await replayer.play(make_work(seed, load), POLICIES.get(policy, policy), load.groups)
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


@contextmanager
def model_of(device: str) -> Iterator[Path]:
    """The tiny one on CPUs; of 1.7 B parameters on a GPU."""
    if device == "cpu":
        yield model()
        return
    with random_model(SMALLER[0]) as folder:
        write_keychain_tokenizer(folder)
        yield folder


def main() -> None:
    defaults: dict[str, Any] = {"policies": ["sticky", "cmlfq"], "seeds": [0, 1, 2], "caches": [48, 192]}
    defaults |= {"device": ("cpu", "cuda"), "slots": 48, "limit_s": 1e4}
    given = options("live_kv", __doc__, **defaults)
    found: dict[Key, dict[str, Figures]] = {}
    with tempfile.TemporaryDirectory(prefix="libra-kv-") as name, model_of(given.device) as model:
        for cache in given.caches:
            folder = Path(name) / str(cache)
            folder.mkdir()
            for key, figures in asyncio.run(measure(given, model, cache, folder)).items():
                found.setdefault(key, {})[f"{cache} MiB"] = figures
    load = LOADS[given.device]
    contexts = median([held(make_work(seed, load)) / 2 for seed in given.seeds])
    notes = [
        f"{load.groups * GROUP_SIZE} trajectories on two engines of {given.slots} slots, medians of the seeds; final"
        f" contexts of half of them: {contexts:,.0f} tokens, shared prompts counted once."
    ]
    report_policies(given, "Rollout with KV caches that hold a part of the contexts", found, notes)


if __name__ == "__main__":
    main()
