"""Seconds of rollout that no fleet and no policy can beat in the simulator: bounds of `bench.fleets`."""

from __future__ import annotations

from collections.abc import Sequence

from bench.fleets_rows import Setting, usable, window
from libra_hpc.models.step_times.lookup import lookup
from libra_hpc.models.step_times.steps import StepTimes
from libra_hpc.protocol.trace import TrajectoryRecord
from libra_hpc.simulator.settings import SimulationSettings


def bounds(row: Setting, found: Sequence[TrajectoryRecord], longest: int) -> dict[str, float]:
    """Seconds (per batch) of rollout that no fleet and no policy can beat in this engine model.

    ``chain``: the longest trajectory alone on the fastest engine.  In steady state the mean of the measured batches'
    longest, over the eta + 1 batches that are open at any time.  ``work``: every token at its least cost in GPU
    seconds, with full batches, over all GPUs.
    """
    able = usable(row, longest)
    kinds = [[lookup(d, row.model, tp) for tp in able[pool]] for pool, (d, _) in enumerate(row.pools)]
    seqs = SimulationSettings().max_num_seqs
    size = row.trajectories
    chains = [
        max(min(_alone(one, steps) for each in kinds for steps in each) for one in found[first : first + size])
        for first in range(0, len(found), size)
    ]
    chain = max(chains)
    if row.batches:
        first, last = window(row.batches, row.eta)
        # Of the batches that end after the first one, these also start after it.
        chain = sum(chains[first + row.eta + 1 : last + 1]) / (row.eta + 1) / (last - first)
    rate = [_cheapest(each, found, seqs) for each in kinds]
    speed = sum(gpus / cost for (_, gpus), cost in zip(row.pools, rate, strict=True))
    return {"chain": chain, "work": 1.0 / speed / max(1, row.batches)}


def _alone(one: TrajectoryRecord, steps: StepTimes) -> float:
    context, seconds = one.prompt_tokens, _prefill(steps, one.prompt_tokens)
    for turn in one.turns:
        seconds += _prefill(steps, turn.new_tokens) if turn.new_tokens else 0.0
        context += turn.new_tokens
        seconds += turn.gen_tokens * steps.step_s(1, context + turn.gen_tokens // 2) + turn.tool_s
        context += turn.gen_tokens
    return seconds


def _prefill(steps: StepTimes, tokens: int) -> float:
    most = SimulationSettings().max_num_batched_tokens
    return tokens / most * steps.step_s(0, 0, most, 0)


def _cheapest(kind: Sequence[StepTimes], found: Sequence[TrajectoryRecord], seqs: int) -> float:
    """GPU seconds of all work at the cheapest degree for each trajectory: a prompt once per group, no waiting."""
    costs = [
        (
            s.tp * s.step_s(seqs, 0) / seqs,
            s.tp * (s.step_s(1, s.kv_capacity) - s.step_s(1, 0)) / s.kv_capacity,
            s.tp * s.step_s(1, s.kv_capacity) / s.kv_capacity,
            s.tp * _prefill(s, 1),
        )
        for s in kind
    ]
    total, seen = 0.0, set[str]()
    for one in found:
        fresh = sum(turn.new_tokens for turn in one.turns) + (one.prompt_tokens if one.prompt_id not in seen else 0)
        seen.add(one.prompt_id)
        context, pairs = one.prompt_tokens, 0
        for turn in one.turns:
            context += turn.new_tokens
            pairs += turn.gen_tokens * (context + turn.gen_tokens // 2)
            context += turn.gen_tokens
        # A token shares its step with at most ``seqs`` others, and with no more than the cache holds.
        total += min(
            max(one.generated * base + pairs * slope, pairs * crowded) + fresh * prefill
            for base, slope, crowded, prefill in costs
        )
    return total
