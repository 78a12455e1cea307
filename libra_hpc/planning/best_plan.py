"""The best plan: layouts that fit, in the order of a bound, played in the simulator under the run's policy.

- Plans that differ in the number of training nodes alone are a family. From its least bound a family is searched
  downhill; a plan whose bound is not below the best is not played, and a play that becomes `STOP` times as long as the
  best is stopped.
- The best ones get a second, longer play.
- More than `PLAYED_GPUS`, or large batches -> a part of the fleet is played, with the same part of the batch.
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
from libra_hpc.policies.scheduling.registry import make_policy
from libra_hpc.protocol.trace import TrajectoryRecord
from libra_hpc.simulator.play import Played, batches_of, play
from libra_hpc.simulator.settings import EngineSpec, SimulationSettings
from libra_hpc.simulator.simulate import Simulation
from libra_hpc.traces.run_work import mean_context

from .layout_space import LayoutSpace
from .request import PlanRequest, PlanResult, RunPlan

STOP = 1.1
"""Times the best seconds so far: so much worse on a few batches is worse on many."""
FINAL_ROUNDS, FINALISTS, CLOSE = 2, 3, 1.05
"""Times that all open batches are renewed in the second play (once in the first), and of how many plans at most: those
within this ratio of the best one."""
PLAYED_GPUS = 256
"""Beyond them a part stands for the whole: its engines have the same load, and there are enough to choose from."""
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
) -> PlanResult:
    """The plans played, best first, with ``nodes[pool]`` nodes of each pool (default: all).

    Only pools in ``trainers`` may train (default: all). ``cache``: a folder of answers, to the last digit, to equal
    questions of this library and policy file; with the shipped ``steps`` alone.

    Raises `UserError` for too few nodes and when nothing fits, with the nearest limit.
    """
    have = list(nodes) if nodes is not None else [pool.nodes for pool in asked.pools]
    if sum(have) < 2:
        raise UserError(f"nodes = {sum(have)}: each stage needs a node of its own; valid: at least 2 nodes.")
    if cache is None or steps is not lookup:
        return _searched(asked, LayoutSpace(asked, steps), have, trainers, progress)
    policy = Path(asked.policy.rpartition(":")[0])
    file = cache / "plans" / f"{digest((asked, have, trainers), [policy])}.json"
    known = read_or_none(file, _result)
    if known is None:
        known = _searched(asked, LayoutSpace(asked), have, trainers, progress)
        with suppress(OSError):
            file.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(file, msgspec.json.encode(known))
    return known


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
        straggler=search.alone_s(ordered[0]),
        sources=tuple(dict.fromkeys(kind.steps.source for kind in space.kinds)),
    )


class _Search:
    def __init__(self, asked: PlanRequest, space: LayoutSpace, progress: Progress) -> None:
        self._asked, self._space, self._progress = asked, space, progress
        self._groups, limits = asked.settings.batch_groups, asked.settings
        some = self._batches(BOUND_BATCHES, 0)
        self._share = min(1.0, PLAYED_TURNS * BOUND_BATCHES / sum(len(record.turns) for record in some))
        self._bound = Bound(some, asked.trajectories, min(limits.max_inflight, limits.max_num_seqs))
        self._plays = 0

    def best(self, plans: Sequence[RunPlan]) -> list[RunPlan]:
        """Return the plans played, the most often played first, then the fastest."""
        order = {id(plan): self.bound_s(plan) for plan in plans}
        families = [
            sorted(members, key=lambda plan: plan.nodes)
            for _, members in groupby(sorted(plans, key=_family), key=_family)
        ]
        families.sort(key=lambda family: min(order[id(plan)] for plan in family))
        found: list[RunPlan] = []
        for family in families:
            self._downhill(family, order, found)
        found.sort(key=_rank)
        last = [plan for plan in found[:FINALISTS] if plan.seconds <= CLOSE * found[0].seconds]
        found[: len(last)] = [self._timed(plan, FINAL_ROUNDS, math.inf) for plan in last]
        return sorted(found, key=_rank)

    def _downhill(self, family: Sequence[RunPlan], order: dict[int, float], found: list[RunPlan]) -> None:
        """Play plans of a family from its least bound on, as long as they become faster; not stopped -> ``found``."""
        best = min((plan.seconds for plan in found), default=math.inf)
        taken: dict[int, float] = {}

        def seconds(at: int) -> float:
            nonlocal best
            if at not in taken:
                taken[at] = math.inf
                if order[id(family[at])] < best:
                    timed = self._timed(family[at], 1, STOP * best)
                    taken[at] = timed.seconds
                    if timed.seconds < math.inf:
                        found.append(timed)
                        best = min(best, timed.seconds)
            return taken[at]

        at = min(range(len(family)), key=lambda index: order[id(family[index])])
        stride = max(1, len(family) // STRIDES)
        seconds(at)
        while stride:
            near = [n for n in (at - stride, at + stride) if 0 <= n < len(family)]
            better = min(near, key=seconds, default=at)
            if seconds(better) < seconds(at):
                at = better
            else:
                stride //= 2

    def bound_s(self, plan: RunPlan) -> float:
        """Seconds that a batch of the plan is not below."""
        eta, train_s = self._asked.settings.eta, plan.train.time.total + plan.update.diff_s
        work_s, alone_s = self._bound.rollout_s(
            [(self._space.steps_of(s.pool, s.tp), s.replicas) for s in plan.engines]
        )
        rollout_s = max(work_s, alone_s / (eta + 1))
        if plan.in_turn is not None:
            return train_s + rollout_s + plan.in_turn.switch_s
        if eta:
            return max(train_s, rollout_s)
        return rollout_s + train_s * (self._space.portion(plan) / self._groups or 1.0)

    def alone_s(self, plan: RunPlan) -> float:
        """Seconds of the longest trajectory alone."""
        kinds = [(self._space.steps_of(s.pool, s.tp), s.replicas) for s in plan.engines]
        return self._bound.rollout_s(kinds)[1]

    def _timed(self, plan: RunPlan, rounds: int, most_s: float) -> RunPlan:
        """``plan`` with the seconds of a play; infinite ones where it was stopped."""
        self._plays += 1
        self._progress(self._plays)
        found, batches = self._played(plan, rounds, most_s), rounds * (self._asked.settings.eta + 1)
        tokens_s = self._asked.batch.tokens / found.batch_s
        times = {"rollout_s": found.rollout_s, "hidden_s": found.hidden_s, "seconds": found.batch_s}
        return replace(plan, **times, tokens_s=tokens_s, played=batches)

    def _played(self, plan: RunPlan, rounds: int, most_s: float) -> Played:
        part = self._part(plan)
        engines, settings = scene(self._asked, self._space, plan, part)
        batches = batches_of(rounds, settings) * settings.batch_groups / self._groups
        work = self._batches(batches, rounds)
        return play(work, engines, self._asked.policy, settings, most_s=most_s)

    def _part(self, plan: RunPlan) -> float:
        """Share of the fleet that is played."""
        gpus = sum(s.devices for s in plan.engines)
        least = min(s.replicas for s in plan.engines)
        return max(min(1.0, PLAYED_GPUS / gpus, self._share), 1.0 / self._groups, 1.0 / least)

    def _batches(self, batches: float, seed: int) -> list[TrajectoryRecord]:
        return self._asked.work.batch(round(batches * self._groups), seed)


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
    way = plan.in_turn
    return plan.pool, way is not None, way is not None and way.core_rolls, [s.tp for s in plan.engines]


def _rank(plan: RunPlan) -> tuple[float, ...]:
    return -plan.played, plan.seconds, plan.train.time.total


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
