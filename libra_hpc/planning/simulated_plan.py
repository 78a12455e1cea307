"""The plan as simulated: cost models propose some twenty candidates, the simulator runs the best with the real policy.

- Candidates: the training nodes of the best plans; beside each, every homogeneous fleet, and the mix of TP degrees
  that is best if the scheduler sorts trajectories by length.
- Those within `WORTH` of the best by the cost models are simulated: one batch of the same trajectories for all. The
  best `FINALISTS` are simulated on two further batches.
- A simulated batch may have a longer tail than usual: its seconds are scaled, for all plans alike, by what the cost
  models say of the usual lengths over its own. Of a trace: of `USUAL` batches, in the mean, because the mean of the
  last trajectories of batches is more than what the mean of all long ones says.
- eta > 0: times what the cost models say of overlapping batches over a single one, of the plan, or of the homogeneous
  fleet beside a mix: of mixes they assume that lengths are known.
- A mix is chosen when it is `MIX_GAIN` faster than the best homogeneous fleet.

So the scheduler's skill at sorting is measured, not assumed.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from functools import cache as once
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar

import msgspec

from libra_hpc.models.devices import Device
from libra_hpc.models.shapes import ModelShape
from libra_hpc.models.step_times.lookup import StepLookup, lookup
from libra_hpc.policies.costs.lengths import observe, sketch
from libra_hpc.policies.scheduling.registry import make_policy
from libra_hpc.policies.search.best_plan import PlanSearch
from libra_hpc.policies.search.rollout_layout import RolloutLayout
from libra_hpc.policies.search.run_plan import PlanResult, RunPlan
from libra_hpc.protocol.trace import TrajectoryRecord
from libra_hpc.simulator.settings import EngineSpec, SimulationSettings
from libra_hpc.simulator.simulate import simulate

from .remembered import RememberedSeconds
from .request import PlanRequest

SPLITS = 4
"""Numbers of training nodes whose fleets are candidates."""
WORTH = 1.25
"""Times the best plan's seconds by the cost models; their error is 10 %, for mixes more."""
MIX_GAIN = 0.05
"""Share by which a mix must be faster: it serves other lengths than the simulated ones worse."""
FINALISTS, SEEDS = 3, 3
USUAL = 8
"""Batches whose mean is usual; fewer where one alone is large. At half, it scatters by 10 %."""
FIRST = 12
"""Most plans that are simulated."""
TURNS = 120_000
"""Turns to simulate, in all: three seconds, interpreted twelve. Large batches take one seed and `FINALISTS` plans."""
LARGEST = 100_000
"""Turns of a batch beyond which nothing is simulated: three plans would take more than a minute if interpreted."""

Progress = Callable[[int, int], None]
"""(batches simulated, batches to simulate) -> None."""


class RankedPlan(Protocol):
    """What the choice among plans looks at."""

    @property
    def model_s(self) -> float:
        """Seconds of a batch by the cost models."""
        ...

    @property
    def seconds(self) -> float:
        """Seconds of a batch."""
        ...

    @property
    def simulated(self) -> int:
        """Batches."""
        ...

    @property
    def mixed(self) -> bool: ...


C = TypeVar("C", bound=RankedPlan)
S = TypeVar("S")
"""What a simulation of a plan has found."""


def simulated_plans(
    asked: PlanRequest,
    search: PlanSearch,
    result: PlanResult,
    *,
    steps: StepLookup = lookup,
    progress: Progress = lambda done, whole: None,
    cache: Path | None = None,
) -> PlanResult:
    """``result`` of ``search`` with simulated plans instead, best first; unchanged where batches are too large.

    ``cache``: a folder that remembers them, with the shipped ``steps`` alone.
    """
    first = asked.work.batch(asked.batch.trajectories, asked.options.group, 0)
    turns = sum(len(one.turns) for one in first)
    if turns > LARGEST:
        return result
    most, seeds = effort(turns)
    found = candidates(asked, search, result)
    chosen = promising([plan for plan in found if plan.runs], most)
    settings = SimulationSettings(
        max_inflight=asked.max_inflight,
        max_num_seqs=asked.options.max_num_seqs,
        max_model_len=asked.options.max_model_len,
        async_steps=any(pool.device.async_steps for pool in asked.pools),
    )

    lengths, plain = asked.batch.lengths, next((p for p in chosen if not p.mixed), chosen[0]).rollout
    alone = search.of_one_batch(lengths)
    remembered = RememberedSeconds(asked, cache)

    @once
    def batch(seed: int) -> tuple[list[TrajectoryRecord], float]:
        """A batch, and seconds of the plain fleet that knows its lengths."""
        made = asked.work.batch(asked.batch.trajectories, asked.options.group, seed) if seed else first
        own = search.of_one_batch(sketch(observe(made), asked.batch.trajectories))
        return made, own.layout_seconds(plain)

    @once
    def usual_s() -> float:
        if asked.batch.eta or not asked.work.recorded:
            return alone.layout_seconds(plain)
        return statistics.fmean(batch(seed)[1] for seed in range(max(seeds, min(USUAL, TURNS // turns))))

    def overlapping(plan: RunPlan) -> float:
        """Seconds of overlapping batches over those of a single one."""
        same = (plan.pool, plan.nodes, plan.in_turn)
        like = next((p for p in chosen if not p.mixed and (p.pool, p.nodes, p.in_turn) == same), plan)
        layout = like.rollout if plan.mixed else plan.rollout
        return layout.seconds / alone.layout_seconds(layout)

    def play(plan: RunPlan, seed: int) -> tuple[float, float]:
        portion = search.portion(plan)
        key = plan.rollout, portion, plan.train.time.total if portion else 0.0, seed
        return remembered.of(key, partial(simulated, plan, seed))

    def simulated(plan: RunPlan, seed: int) -> tuple[float, float]:
        made, own_s = batch(seed)
        engines = engines_of(plan.rollout, [p.device for p in asked.pools], asked.shape, steps)
        usual, train_s, portion = usual_s() / own_s * overlapping(plan), plan.train.time.total, search.portion(plan)
        if not portion:
            return simulate(made, engines, make_policy(asked.policy), settings).makespan_s * usual, 0.0
        own = msgspec.structs.replace(
            settings, batch_groups=len(made) // asked.options.group, portion_groups=portion, train_s=train_s / usual
        )
        (step,) = simulate(made, engines, make_policy(asked.policy), own).steps
        return step.batch_at * usual, train_s - (step.end_at - step.batch_at) * usual

    plans = halving(chosen, play, search.with_rollout_seconds, seeds=seeds, progress=progress)
    study = halving([plan for plan in found if not plan.runs][:FINALISTS], play, search.with_rollout_seconds, seeds=1)
    return msgspec.structs.replace(result, plans=tuple(plans), study=study[0] if study else None)


def candidates(asked: PlanRequest, search: PlanSearch, result: PlanResult) -> list[RunPlan]:
    """Homogeneous fleets and a mix beside the training nodes of the best plans, and plans in turn, distinct, best
    first."""
    have, by_length = [pool.nodes for pool in asked.pools], search.with_lengths_sorted()
    found: dict[tuple[object, ...], RunPlan] = {}
    splits = [plan for plan in result.plans if not plan.in_turn][:SPLITS]
    for plan in (*splits, *(one for pool in {p.pool for p in splits} for one in search.in_turn(have, pool))):
        mix = None if plan.in_turn else by_length.build(have, plan.pool, plan.nodes)
        for one in (plan, *search.homogeneous(plan), *([] if mix is None else [mix])):
            engines = tuple(sorted((s.pool, s.tp, s.replicas) for s in one.rollout.segments))
            found.setdefault((one.pool, one.nodes, one.in_turn, engines), one)
    return sorted(found.values(), key=lambda p: p.model_s)


def effort(turns: int) -> tuple[int, int]:
    """(plans, seeds) to simulate with batches of so many turns."""
    again = FINALISTS * (SEEDS - 1)
    seeds = SEEDS if TURNS // turns >= FINALISTS + again else 1
    return max(FINALISTS, min(FIRST, TURNS // turns - (again if seeds > 1 else 0))), seeds


def promising(plans: Sequence[C], most: int) -> list[C]:
    """At most so many of ``plans``, which are in the order of the cost models, that are worth it.

    The best mix and the best homogeneous fleet are among them. The latter sets the limit, because the cost models
    assume of a mix that the scheduler knows all lengths.
    """
    firsts = [next((p for p in plans if p.mixed == mixed), None) for mixed in (False, True)]
    ordered = [p for p in (*firsts, *(p for p in plans if p not in firsts)) if p is not None]
    return [p for p in ordered if p.model_s <= WORTH * ordered[0].model_s][:most]


def engines_of(
    layout: RolloutLayout, devices: Sequence[Device], shape: ModelShape, steps: StepLookup
) -> list[EngineSpec]:
    """The engines of a layout; ``devices`` by pool."""
    return [
        EngineSpec(f"{s.pool}-tp{s.tp}-{number}", s.tp, steps(devices[s.pool], shape, s.tp))
        for s in layout.segments
        for number in range(s.replicas)
    ]


def halving(
    plans: Sequence[C],
    play: Callable[[C, int], S],
    with_seconds: Callable[[C, Sequence[S]], C],
    *,
    seeds: int,
    progress: Progress = lambda done, whole: None,
) -> list[C]:
    """``plans`` with what ``play(plan, seed)`` returns for each seed, ranked; the finalists on every seed."""
    seconds: dict[int, list[S]] = {}

    def played(index: int) -> C:
        return with_seconds(plans[index], seconds[index])

    running = list(range(len(plans)))
    whole = len(plans) + min(FINALISTS, len(plans)) * (seeds - 1)
    for seed in range(seeds):
        for index in running:
            progress(sum(map(len, seconds.values())), whole)
            seconds.setdefault(index, []).append(play(plans[index], seed))
        running = sorted(running, key=lambda index: played(index).seconds)[:FINALISTS]
    return ranked([played(index) for index in seconds])


def ranked(plans: Sequence[C]) -> list[C]:
    """Most often simulated first, then fastest; a mix stands behind a homogeneous fleet that is hardly slower."""
    ordered = sorted(plans, key=lambda p: (-p.simulated, p.seconds))
    plain = next((p for p in ordered if not p.mixed), None)
    if plain is None or plain.simulated < ordered[0].simulated or not ordered[0].mixed:
        return ordered
    if ordered[0].seconds <= (1.0 - MIX_GAIN) * plain.seconds:
        return ordered
    return [plain, *(p for p in ordered if p is not plain)]
