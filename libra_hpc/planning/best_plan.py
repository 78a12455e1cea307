"""The best plan: layouts that fit, in the order of a bound, played in the simulator under the run's policy.

- Plans that differ in the number of training nodes alone are a family. From its least bound a family is searched
  downhill; a plan whose bound is not below the best is not played.
- All plans play the same trajectories, as far as a `Race` needs to tell them apart.
- More than `PLAYED_GPUS` and `PLAYED_GROUPS`, or long batches -> a part of the fleet is played, with the same part of
  the batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from statistics import fmean

import msgspec
from msgspec.structs import replace

from libra_hpc.errors import UserError
from libra_hpc.files import digest, read_or_none, write_atomic
from libra_hpc.models.devices import STEP_TOKENS
from libra_hpc.models.step_times.lookup import StepLookup, lookup
from libra_hpc.models.step_times.steps import StepTimes
from libra_hpc.policies.control.race import ERRORS, Race, downhill
from libra_hpc.policies.scheduling.registry import make_policy
from libra_hpc.protocol.trace import TrajectoryRecord
from libra_hpc.simulator.play import Play, round_batches
from libra_hpc.simulator.settings import EngineSpec, SimulationSettings
from libra_hpc.simulator.simulate import Simulation
from libra_hpc.traces.run_work import mean_context

from .layout_space import LayoutSpace
from .request import PlanRequest, PlanResult, RunPlan

MOST = 12
"""Batches of a play that count. Half: layouts whose seconds differ by 5 % are not told apart; double: a plan of 48 GPUs
takes half a minute."""
PLAYED_GPUS, PLAYED_GROUPS = 48, 64
"""Beyond both a part stands for the whole: its engines have the same load.  Half the groups: a part is 9 % too fast."""
PLAYED_TURNS = 20_000
"""Turns of a batch; of a larger one, a part is played."""
BOUND_BATCHES = 4
"""Batches that the bound is of: the longest trajectory of one alone scatters."""
STRIDES = 16
"""Steps from one end of a family to the other."""

_result = msgspec.json.Decoder(PlanResult)
Progress = Callable[[int], None]
"""(plays so far) -> None."""


def best_plans(
    asked: PlanRequest,
    steps: StepLookup = lookup,
    *,
    nodes: Sequence[int] | None = None,
    trainers: Sequence[int] | None = None,
    progress: Progress = lambda plays: None,
    cache: Path | None = None,
    again: bool = False,
) -> PlanResult:
    """The plans played, best first, with ``nodes[pool]`` nodes of each pool (default: all).

    Only pools in ``trainers`` may train (default: all). ``cache``: a folder of answers, to the last digit, to equal
    questions of this library and policy file; with the shipped ``steps`` alone. ``again``: it is searched again.

    Raises `UserError` for too few nodes and when nothing fits, with the nearest limit.
    """
    have = list(nodes) if nodes is not None else [pool.nodes for pool in asked.pools]
    if sum(have) < 2:
        raise UserError(f"nodes = {sum(have)}: each stage needs a node of its own; valid: at least 2 nodes.")
    if cache is None or steps is not lookup:
        return _searched(asked, LayoutSpace(asked, steps), have, trainers, progress)
    policy = Path(asked.policy.rpartition(":")[0])
    # Equal where there is one pool.
    trainers = [*(trainers or range(len(have)))]
    file = cache / "plans" / f"{digest((asked, have, trainers), [policy])}.json"
    known = None if again else read_or_none(file, _result)
    if known is not None:
        return replace(known, kept=True)
    made = _searched(asked, LayoutSpace(asked), have, trainers, progress)
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(file, msgspec.json.encode(made))
    return made


def _searched(
    asked: PlanRequest, space: LayoutSpace, have: Sequence[int], trainers: Sequence[int] | None, progress: Progress
) -> PlanResult:
    plans = [plan for pool in trainers or range(len(have)) for plan in space.plans(have, pool)]
    if not plans:
        raise space.impossible(have)
    search = _Search(asked, space, progress)
    ordered = search.best(plans)
    return PlanResult(
        plans=tuple(ordered),
        excluded=tuple(space.excluded(ordered[0])),
        straggler=search.rollout_s(ordered[0])[1],
        sources=tuple(dict.fromkeys(kind.steps.source for kind in space.kinds)),
    )


class _Search:
    def __init__(self, asked: PlanRequest, space: LayoutSpace, progress: Progress) -> None:
        self._asked, self._space, self._progress = asked, space, progress
        self._groups, limits = asked.settings.batch_groups, asked.settings
        some = asked.work.batch(BOUND_BATCHES * self._groups, 0)
        self._share = min(1.0, PLAYED_TURNS * BOUND_BATCHES / sum(len(record.turns) for record in some))
        self._bound = Bound(some, asked.trajectories, min(limits.max_inflight, limits.max_num_seqs))
        self._race = Race[int, Play](math.ceil(MOST / round_batches(limits.eta)))
        self._shares: dict[int, float] = {}
        """`Play.rollout_share` of those played, by the place of a plan among all."""

    def best(self, plans: Sequence[RunPlan]) -> list[RunPlan]:
        """Return the plans played, fastest first."""
        # Groups of the largest batch that is played.
        self._most = round(self._groups * max(map(self._part, plans)))
        order = [self.bound_s(plan) for plan in plans]
        numbers = sorted(range(len(plans)), key=lambda at: (_family(plans[at]), plans[at].nodes))
        families = [list(members) for _, members in groupby(numbers, key=lambda at: _family(plans[at]))]
        for family in sorted(families, key=lambda family: min(order[at] for at in family)):
            self._enter(plans, family, order)
        best = self._race.decide()
        ranked = sorted(self._shares, key=lambda at: (at != best, self._race.seconds(at)))
        return [self._timed(plans[at], at) for at in ranked]

    def _enter(self, plans: Sequence[RunPlan], family: Sequence[int], order: Sequence[float]) -> None:
        """Play plans of a family from its least bound on, as long as they become faster."""
        race = self._race

        def seconds(place: int) -> float:
            at = family[place]
            if at not in self._shares:
                if self._shares and order[at] >= race.seconds(race.best):
                    return math.inf
                play = self._play(plans[at])
                race.enter(at, play)
                self._shares[at] = play.rollout_share
                self._progress(len(self._shares))
            return race.seconds(at)

        start = min(range(len(family)), key=lambda place: order[family[place]])
        seconds(start)
        downhill(len(family), start, seconds, max(1, len(family) // STRIDES))

    def bound_s(self, plan: RunPlan) -> float:
        """Seconds that a batch of the plan is not below."""
        eta, train_s = self._asked.settings.eta, plan.train.time.total + plan.update.diff_s
        work_s, alone_s = self.rollout_s(plan)
        rollout_s = max(work_s, alone_s / (eta + 1))
        if plan.in_turn is not None:
            # Complete batches are trained with one pair.
            return train_s + rollout_s + plan.in_turn.switch_s / (eta + 1)
        if eta:
            return max(train_s, rollout_s)
        return rollout_s + train_s * (self._space.portion(plan) / self._groups or 1.0)

    def rollout_s(self, plan: RunPlan) -> tuple[float, float]:
        """`Bound.rollout_s` of its engines."""
        return self._bound.rollout_s([(self._space.steps_of(s.pool, s.tp), s.replicas) for s in plan.engines])

    def _timed(self, plan: RunPlan, at: int) -> RunPlan:
        """``plan`` with the seconds of its play, as if it had all rounds of the best one."""
        seconds = self._race.seconds(at)
        return replace(
            plan,
            seconds=seconds,
            error_s=ERRORS * self._race.error(at),
            rollout_s=seconds * self._shares[at],
            tokens_s=self._asked.batch.tokens / seconds,
            played=self._race.rounds(at) * round_batches(self._asked.settings.eta),
        )

    def _play(self, plan: RunPlan) -> Play:
        engines, settings = scene(self._asked, self._space, plan, self._part(plan))

        def coming(part: int, batches: int) -> list[TrajectoryRecord]:
            return self._asked.work.batch(self._most * batches, part)[
                : settings.batch_groups * self._asked.work.group * batches
            ]

        return Play(coming, engines, self._asked.policy, settings)

    def _part(self, plan: RunPlan) -> float:
        """Share of the fleet that is played."""
        least = min(s.replicas for s in plan.engines)
        part = max(PLAYED_GPUS / sum(s.devices for s in plan.engines), PLAYED_GROUPS / self._groups)
        return max(min(1.0, part, self._share), 1.0 / self._groups, 1.0 / least)


def scene(
    asked: PlanRequest, space: LayoutSpace, plan: RunPlan, part: float = 1.0
) -> tuple[list[EngineSpec], SimulationSettings]:
    """What is played of a plan: so large a part of its engines and of each batch."""
    engines = [
        EngineSpec(f"{one.pool}-tp{one.tp}-{number}", one.tp, space.steps_of(one.pool, one.tp))
        for one in plan.engines
        for number in range(max(1, round(one.replicas * part)))
    ]
    settings = replace(
        asked.settings,
        batch_groups=max(1, round(asked.settings.batch_groups * part)),
        train_s=plan.train.time.total,
        seats=math.ceil(asked.settings.seats * part),
        portion_groups=math.ceil(space.portion(plan) * part),
        update=plan.update,
        switch_s=plan.in_turn.switch_s if plan.in_turn else None,
    )
    return engines, settings


def step_ends(asked: PlanRequest, plan: RunPlan) -> list[float]:
    """Seconds from the first admission to the end of each of the first training steps, as played."""
    engines, settings = scene(asked, LayoutSpace(asked), plan)
    work = asked.work.batch((settings.eta + 2) * settings.batch_groups, 0)
    return [step.end_at for step in Simulation(work, engines, make_policy(asked.policy), settings).run().steps]


def _family(plan: RunPlan) -> tuple[object, ...]:
    """What plans of a family have in common."""
    return plan.pool, str(plan.in_turn), [s.tp for s in plan.engines]


class Bound:
    """Seconds that no fleet is below: its work over full throughput, and the longest trajectory alone.

    Of batches like those of ``size`` trajectories each in ``work``, whose groups compute a prompt once.

    ``slots``: sequences that an engine decodes.
    """

    def __init__(self, work: Sequence[TrajectoryRecord], size: int, slots: int) -> None:
        self._slots, self._batches = slots, len(work) // size
        self._generated = sum(one.generated for one in work)
        prompts = {one.prompt_id: one.prompt_tokens for one in work}
        self._new = sum(prompts.values()) + sum(turn.new_tokens for one in work for turn in one.turns)
        self._context = mean_context(work)
        parts = [_alone(one) for one in work]
        self._alone = [parts[at : at + size] for at in range(0, len(work), size)]
        self._known: dict[str, tuple[float, float]] = {}

    def rollout_s(self, fleet: Sequence[tuple[StepTimes, int]]) -> tuple[float, float]:
        """Seconds of a batch's work, and of the longest trajectory alone, on so many engines of each kind."""
        rates = [(self._of(steps), count) for steps, count in fleet]
        return 1.0 / sum(count / work_s for (work_s, _), count in rates), min(alone_s for (_, alone_s), _ in rates)

    def _of(self, steps: StepTimes) -> tuple[float, float]:
        """Seconds of all work on one engine, and of the longest trajectory."""
        key = f"{steps.source} TP{steps.tp}"
        if key not in self._known:
            full = max(1, min(self._slots, int(steps.kv_capacity / self._context)))
            token_s = min(steps.step_s(n, int(n * self._context)) / n for n in {full, max(1, full // 2)})
            new_s = steps.step_s(0, 0, STEP_TOKENS, 0) / STEP_TOKENS
            longest = fmean(
                max(
                    generated * steps.step_s(1, context) + new * new_s + tool_s
                    for generated, context, new, tool_s in batch
                )
                for batch in self._alone
            )
            self._known[key] = (self._generated * token_s + self._new * new_s) / self._batches, longest
        return self._known[key]


def _alone(one: TrajectoryRecord) -> tuple[int, int, int, float]:
    """Generated tokens, mean context, other tokens and seconds of tools of a trajectory with nothing beside it."""
    new = one.prompt_tokens + sum(turn.new_tokens for turn in one.turns)
    return one.generated, (one.prompt_tokens + one.context) // 2, new, sum(turn.tool_s for turn in one.turns)
