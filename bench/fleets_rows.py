"""Rows of `bench.fleets`: the work, the GPUs, the fleets that a user could build from them, and the bounds.

A fleet is a list of `Part`: so many engines of one TP degree on one kind of GPU.  Only degrees whose KV cache holds the
longest context count, because vLLM would not start otherwise.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from bench.scheduling import work_of
from libra_hpc.models.shapes import model_shape
from libra_hpc.models.step_times.lookup import lookup
from libra_hpc.models.step_times.steps import StepTimes
from libra_hpc.policies.costs.lengths import observe, sketch
from libra_hpc.policies.costs.rollout_time import ReplicaCost, RolloutOptions
from libra_hpc.policies.costs.training_time import BatchWork
from libra_hpc.policies.search.even_rollout_layout import homogeneous_layouts
from libra_hpc.policies.search.rollout_layout import ReplicaClass, RolloutSearch
from libra_hpc.protocol.trace import TrajectoryRecord, TurnRecord
from libra_hpc.simulator.settings import EngineSpec, SimulationSettings
from libra_hpc.traces.generate import Dials, generate
from libra_hpc.traces.profiles import PROFILES, R2E, Lognormal

DEGREES = (1, 2, 4, 8)
NODE = 8
"""GPUs of a node: a node has engines of one degree, as in a run file."""
MAX_CONTEXT = 131_072
GROUP = 8
TRAIN_S, SYNC_S = 30.0, 2.0
"""Seconds of a training step, on nodes of its own, and of a weight update; short, so that rollout is the bottleneck."""
MIXES = ({1: 1, 2: 1, 4: 2}, {2: 1, 4: 1}, {2: 1, 8: 1}, {4: 1, 8: 1}, {1: 1, 2: 1, 4: 1, 8: 1})
"""Common mixes: shares of the GPUs by TP degree; the first is the published pattern 4xTP1,2xTP2,2xTP4."""
LONG = replace(
    R2E,
    name="long",
    generated=6_000,
    sigma=0.7,
    turns=40,
    prompt=Lognormal(20_000, 0.5, 60_000),
    tools=tuple(replace(t, payload=replace(t.payload, median=1.6 * t.payload.median)) for t in R2E.tools),
)
"""Coding on large repositories: contexts of 32k to 128k tokens, more than the KV caches hold."""


class Part(NamedTuple):
    pool: int
    """Index of the kind of GPU."""
    tp: int
    engines: int


Fleet = tuple[Part, ...]


class Setting(NamedTuple):
    """One row; ``batches`` = 0: one batch of all trajectories."""

    preset: str = "r2e"
    model: str = "qwen3-14b"
    pools: tuple[tuple[str, int], ...] = (("a800", 24),)
    """(device, GPUs)."""
    trajectories: int = 256
    """Of one batch."""
    batches: int = 0
    eta: int = 0
    dials: tuple[tuple[str, Any], ...] = ()
    slow: int = 0
    """GPUs at half the speed, which nobody knows."""
    change: str = ""
    """``giant`` | ``mislead``."""


EPOCH = ", third epoch"
"""Rows of `bench.scheduling` whose prompts have been seen twice before: for `bench.ablation`."""
TWO_NODES = (("a800", 16),)
ROWS: dict[str, Setting] = {
    "r2e": Setting(dials=(("outcome", 1.0),)),
    "r2e, siblings": Setting(dials=(("outcome", 0.0),)),
    "r2e, nothing": Setting(dials=(("outcome", 0.0), ("sibling", 0.0))),
    "r2e, 8B": Setting(model="qwen3-8b"),
    "r2e, 32B": Setting(model="qwen3-32b"),
    "search": Setting(preset="search"),
    "math": Setting(preset="math"),
    "documents": Setting(preset="documents"),
    "long": Setting(preset="long", trajectories=512),
    "long, 8B": Setting(preset="long", model="qwen3-8b", trajectories=512),
    "long, 32B": Setting(preset="long", model="qwen3-32b"),
    "slow node": Setting(pools=(("a800", 48),), trajectories=512, slow=8),
    "two kinds": Setting(pools=(("a800", 16), ("h200", 16)), trajectories=384),
    "giant": Setting(change="giant"),
    "misleading": Setting(dials=(("outcome", 1.0),), change="mislead"),
    "steady, eta 0": Setting(pools=TWO_NODES, trajectories=128, batches=5),
    "steady, eta 1": Setting(pools=TWO_NODES, trajectories=128, batches=6, eta=1),
    "steady, eta 2": Setting(pools=TWO_NODES, trajectories=128, batches=7, eta=2),
    "steady long, 1": Setting(preset="long", pools=TWO_NODES, trajectories=128, batches=6, eta=1),
    "drift, eta 1": Setting(pools=TWO_NODES, trajectories=128, batches=6, eta=1, dials=(("drift", 4.0),)),
}


def setting_of(name: str) -> Setting:
    """A row by name, a third epoch of `bench.scheduling`, or so many trajectories of a recorded trace by its path."""
    return ROWS.get(name, Setting(preset=name))


@lru_cache(maxsize=6)
def work(name: str, seed: int) -> tuple[list[list[TrajectoryRecord]], list[TrajectoryRecord]]:
    """(batches from which the policies learned before, the work); there are none before in most rows."""
    row = setting_of(name)
    count = row.trajectories * max(1, row.batches)
    if name.endswith(EPOCH):
        epochs = work_of(name, seed, count)
        *before, found = [epochs[first : first + count] for first in range(0, len(epochs), count)]
        return before, found
    if name not in ROWS:
        # Draws more than it needs: contexts that no run would allow are left out.
        recorded = [one for one in work_of(name, seed, 4 * count) if one.context <= MAX_CONTEXT]
        return [], recorded[:count]
    preset = LONG if row.preset == LONG.name else PROFILES[row.preset]
    before = []
    if row.change == "mislead":
        before = [generate(preset, Dials(trajectories=count, seed=seed + 1_000, **dict(row.dials)))]
    made = generate(preset, Dials(trajectories=count, seed=seed, max_context=MAX_CONTEXT, **dict(row.dials)))
    if row.change == "mislead":
        made = [replace(one, turns=tuple(_opposite(turn) for turn in one.turns)) for one in made]
    if row.change == "giant":
        made[-1] = replace(made[-1], turns=(TurnRecord(0, MAX_CONTEXT - made[-1].prompt_tokens - 1),))
    return before, made


def _opposite(turn: TurnRecord) -> TurnRecord:
    outcome = {"ok": "error", "error": "ok"}.get(turn.outcome or "", turn.outcome)
    code = None if turn.exit_code is None else int(not turn.exit_code)
    return replace(turn, outcome=outcome, exit_code=code, passed=turn.failed, failed=turn.passed)


def settings_of(row: Setting, longest: int) -> SimulationSettings:
    if not row.batches:
        return SimulationSettings(max_model_len=longest)
    groups = row.trajectories // GROUP
    return SimulationSettings(max_model_len=longest, batch_groups=groups, eta=row.eta, train_s=TRAIN_S, sync_s=SYNC_S)


def longest_context(name: str, found: Sequence[TrajectoryRecord]) -> int:
    """Where trajectories end: known in generated work, else the longest recorded one."""
    return MAX_CONTEXT if name in ROWS or name.endswith(EPOCH) else max(one.context for one in found)


# --- fleets


class _Slow:
    """Step times of an engine that takes twice as long."""

    def __init__(self, steps: StepTimes) -> None:
        self.tp, self.kv_capacity, self.source = steps.tp, steps.kv_capacity, steps.source
        self._step_s = steps.step_s

    def step_s(self, decodes: int, kv_tokens: int, prefill: int = 0, context: int = 0) -> float:
        return 2.0 * self._step_s(decodes, kv_tokens, prefill, context)


def usable(row: Setting, longest: int) -> list[list[int]]:
    """By pool: degrees whose KV cache holds the longest context."""
    return [[tp for tp in DEGREES if lookup(d, row.model, tp).kv_capacity > longest] for d, _ in row.pools]


def fleets_of(row: Setting, longest: int) -> list[Fleet]:
    """Every homogeneous fleet; with one kind of GPU the common mixes too, with two every pair of degrees."""
    able = usable(row, longest)
    same = [tuple(Part(pool, tp, row.pools[pool][1] // tp) for pool, tp in enumerate(tps)) for tps in product(*able)]
    if len(row.pools) > 1:
        return same
    nodes = row.pools[0][1] // NODE
    mixed = []
    for shares in MIXES:
        if not set(shares) <= set(able[0]):
            continue
        whole, left = sum(shares.values()), nodes
        counts = {}
        for tp, share in shares.items():
            counts[tp] = min(left, max(1, round(nodes * share / whole)))
            left -= counts[tp]
        counts[max(counts)] += left
        fleet = tuple(Part(0, tp, n * NODE // tp) for tp, n in counts.items() if n)
        if len(fleet) > 1 and fleet not in mixed:
            mixed.append(fleet)
    return same + mixed


class Proposal(Struct, frozen=True):
    """A fleet with the seconds that the planner expects of it."""

    fleet: Fleet
    model_s: float
    """Of a batch, by the cost models."""
    seconds: float
    """Of a batch, simulated by the planner."""
    mixed: bool
    simulated: int = 0


def proposals(row: Setting, observed: Sequence[TrajectoryRecord], longest: int) -> list[Proposal]:
    """Fleets that the planner looks at for the lengths of ``observed``: homogeneous ones, and the mix that would be
    best if lengths were known; engines of a node have one degree."""
    lengths = sketch(observe(observed), row.trajectories)
    options = RolloutOptions(
        max_num_seqs=SimulationSettings().max_num_seqs, max_model_len=longest, group=GROUP, cache_aware=True, updates=1
    )
    devices, bins = [gpus for _, gpus in row.pools], len(lengths.bins)
    lag = TRAIN_S + SYNC_S if row.batches else 0.0

    def classes(eta: int) -> list[ReplicaClass]:
        batch = BatchWork(trajectories=row.trajectories, lengths=lengths, eta=eta, minibatches=1, forwards=0)
        return [
            ReplicaClass(pool, ReplicaCost(lookup(device, row.model, tp), batch, options), NODE // tp)
            for pool, (device, _) in enumerate(row.pools)
            for tp in DEGREES
            if model_shape(row.model).divides(tp)
        ]

    costs = classes(row.eta)
    mix = RolloutSearch(costs, bins).best(devices, lag=lag)
    assert mix is not None
    found: dict[Fleet, Proposal] = {}
    for layout in (*homogeneous_layouts(costs, devices, bins, lag), mix):
        counts: dict[tuple[int, int], int] = {}
        for segment in layout.segments:
            key = (segment.pool, segment.tp)
            counts[key] = counts.get(key, 0) + segment.replicas
        fleet = tuple(Part(pool, tp, count) for (pool, tp), count in sorted(counts.items()))
        seconds = layout.seconds + (lag if row.batches and not row.eta else 0.0)
        mixed = len({part.pool for part in fleet}) < len(fleet)
        found.setdefault(fleet, Proposal(fleet, seconds, seconds, mixed))
    return sorted(found.values(), key=lambda p: p.model_s)


def engines_of(row: Setting, fleet: Fleet) -> list[EngineSpec]:
    """The engines, from the largest to the smallest; slow nodes are in the middle."""
    first = row.pools[0][1] // (2 * NODE) * NODE
    engines, gpu = [], 0
    for pool, tp, count in sorted(fleet, key=lambda part: (part.pool, -part.tp)):
        steps: StepTimes = lookup(row.pools[pool][0], row.model, tp)
        for number in range(count):
            is_slow = row.slow and gpu < first + row.slow and gpu + tp > first
            name = f"{row.pools[pool][0]}-tp{tp}-{number}"
            engines.append(EngineSpec(name, tp, _Slow(steps) if is_slow else steps))
            gpu += tp
    return engines


def fleet_name(row: Setting, fleet: Fleet) -> str:
    kinds = len(row.pools) > 1
    return "+".join(f"{p.engines}xTP{p.tp}" + (f" {row.pools[p.pool][0]}" if kinds else "") for p in fleet)


# --- bounds


def bounds(row: Setting, found: Sequence[TrajectoryRecord], longest: int) -> dict[str, float]:
    """Seconds (per batch) that no fleet and no policy can beat in this engine model.

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
    last = row.batches - 1 - row.eta
    # Of the batches that end after the first one, these also start after it.
    chain = sum(chains[row.eta + 1 : last + 1]) / (row.eta + 1) / last if row.batches else max(chains)
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


def quantile_thresholds(found: Sequence[TrajectoryRecord]) -> tuple[int, int, int]:
    """Buckets by the lengths themselves: half, nine tenths and 97 % of the trajectories."""
    cuts = statistics.quantiles([one.generated for one in found], n=100)
    return int(cuts[49]), int(cuts[89]), int(cuts[96])


def trace_name(name: str) -> str:
    return Path(name).name.split(".")[0]
