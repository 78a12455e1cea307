"""The contestants of `bench.fleets`, and the search for the best one by successive halving.

A contestant is a fleet, a policy with its parameters and a rule of admission.  All of a row run on the same work.

1. Every fleet with every rule at its first parameters on one choosing seed; the better half, and those that
   have lost, also with a share of 0.7.
2. The best pairs of fleet and rule with all their parameters; the same seed.
3. The best of those with every admission; the same seed.
4. The best of those on all choosing seeds: the finalists by median.

A simulation ends as lost when it takes `LOST` times as long as the best one before its stage.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor
from typing import NamedTuple

from bench.controlled_simulation import ControlledSimulation
from bench.fleets_rows import Fleet, engines_of, longest_context, quantile_thresholds, setting_of, settings_of, work
from bench.policies.admission import Admission, Admitted, KvShare
from bench.policies.cmlfq_cost import CmlfqCost
from bench.policies.episode_cap import EpisodeCap
from bench.policies.la_mlfq import LaMlfq
from bench.policies.tp_sticky import TpSticky
from libra_hpc.errors import OperationError, UserError
from libra_hpc.policies.scheduling.protocol import Policy
from libra_hpc.policies.scheduling.registry import make_policy
from libra_hpc.policies.scheduling.rules.libra import Libra
from libra_hpc.simulator.simulate import simulate

OURS = "cmlfq"
PLAIN = ("sticky", "least_loaded")
BUCKETED: dict[str, type[Libra] | type[CmlfqCost] | type[LaMlfq]] = {
    "libra": Libra,
    "cmlfq_cost": CmlfqCost,
    "la_mlfq": LaMlfq,
}
RULES = (*PLAIN, "tp_sticky", *BUCKETED)
CAPS = (8, 16, 32, 100)
"""Live trajectories per engine."""
THRESHOLDS = ((), (1_000, 4_000, 16_000))
"""Bounds of the buckets, tokens; empty: quantiles of the lengths that were seen while choosing."""
SHARES = (0.5, 0.6, 0.7, 0.8, 0.9)
FIRST_SHARE = "share 0.7"
ADMISSIONS = ("", *(f"share {share}" for share in SHARES), "cap 1.02", "cap 1.1")
"""``cap``: `EpisodeCap` with that growth."""
LOST = 1.6


class Contestant(NamedTuple):
    fleet: Fleet
    rule: str
    parameters: tuple[float | tuple[int, ...], ...] = ()
    admission: str = ""

    @property
    def words(self) -> str:
        """Policy and admission."""
        text = self.rule
        if self.rule in BUCKETED and self.parameters:
            thresholds, cap = self.parameters
            assert isinstance(thresholds, tuple)
            text += f" {'/'.join(f'{t / 1000:.2g}k' for t in thresholds)} {cap}"
        elif self.parameters:
            text += " by turns"
        return f"{text}, {self.admission}" if self.admission else text


class Effort(NamedTuple):
    """How many contestants each stage of the search passes on."""

    choosing: tuple[int, ...]
    reporting: tuple[int, ...]
    pairs: int = 6
    tuned: int = 4
    finalists: int = 4
    reported: int = 3
    """Contestants of which the best on the reporting seeds, in hindsight, is the opponent."""


class _LostError(Exception):
    pass


Job = tuple[str, Contestant, int, float]
"""(row, contestant, seed, seconds after which it has lost)."""


def seconds(job: Job) -> float:
    """Seconds of one batch, or per batch in steady state; infinite if it lost or cannot run."""
    name, contestant, seed, limit = job
    row = setting_of(name)
    before, found = work(name, seed)
    settings = settings_of(row, longest_context(name, found))
    engines = engines_of(row, contestant.fleet)
    policy, admission = _policy(contestant), _admission(name, contestant)
    if admission is not None:
        policy = Admitted(policy, admission)

    def watch(simulation: ControlledSimulation, now: float) -> None:
        if now > limit * (row.batches + 1):
            raise _LostError

    try:
        for batch in before:
            simulate(batch, engines, policy, settings)
        result = ControlledSimulation(found, engines, policy, settings, controller=watch, controller_s=30.0).run()
    except (UserError, OperationError, _LostError):
        return math.inf
    if not row.batches:
        return result.makespan_s
    # From the first batch to the last one that was complete while new groups could still start.
    last = row.batches - 1 - row.eta
    return (result.steps[last].batch_at - result.steps[0].batch_at) / last


def _policy(contestant: Contestant) -> Policy:
    if contestant.rule in BUCKETED:
        thresholds, cap = contestant.parameters
        assert isinstance(thresholds, tuple)
        assert isinstance(cap, int)
        return BUCKETED[contestant.rule](thresholds, cap)
    if contestant.rule == TpSticky.name:
        return TpSticky(live=not contestant.parameters)
    return make_policy(contestant.rule)


def _admission(name: str, contestant: Contestant) -> Admission | None:
    if not contestant.admission:
        return None
    kind, value = contestant.admission.split()
    if kind == "share":
        return KvShare(float(value))
    # The mean context of the work itself: a better first guess than prime-rl has.
    found = work(name, 0)[1]
    return EpisodeCap(statistics.fmean(one.context for one in found), growth=float(value))


def parameters_of(rule: str, name: str, seed: int, fleet: Fleet) -> list[tuple[float | tuple[int, ...], ...]]:
    """The grid of a rule; the first is what a careful user would start with."""
    if rule == TpSticky.name:
        return [(), (0.0,)]
    if rule not in BUCKETED:
        return [()]
    known = quantile_thresholds(work(name, seed)[1])
    # With one TP degree there is one bucket, whatever the thresholds.
    same = len({part.tp for part in fleet}) == 1 and rule != "cmlfq_cost"
    thresholds = [cuts or known for cuts in (THRESHOLDS[:1] if same else THRESHOLDS)]
    grid: list[tuple[float | tuple[int, ...], ...]] = [(cuts, cap) for cuts in thresholds for cap in CAPS]
    start = CAPS.index(16)
    return [grid[start], *grid[:start], *grid[start + 1 :]]


class Search:
    """Runs contestants of one row; ``say`` gets a line per stage."""

    def __init__(self, pool: Executor, name: str, effort: Effort, say: Callable[[str], None]) -> None:
        self._pool, self._name, self._effort, self._say = pool, name, effort, say
        self.count = 0
        """Simulations so far."""
        self._done: dict[tuple[Contestant, int], float] = {}
        self._best: dict[int, float] = {}

    def run(self, contestants: Iterable[Contestant], seeds: Sequence[int], limited: bool = True) -> list[Contestant]:
        """Run what has not run yet; returns the contestants by median over ``seeds``, best first."""
        wanted = list(dict.fromkeys(contestants))
        best = min(self._best.values(), default=math.inf)
        limit = LOST * best if limited else math.inf
        jobs = [(self._name, c, seed, limit) for seed in seeds for c in wanted if (c, seed) not in self._done]
        for job, found in zip(jobs, self._pool.map(seconds, jobs), strict=True):
            self._done[job[1], job[2]] = found
            self.count += 1
            self._best[job[2]] = min(found, self._best.get(job[2], math.inf))
        return sorted(wanted, key=lambda c: self.median(c, seeds))

    def of(self, contestant: Contestant, seed: int) -> float:
        return self._done[contestant, seed]

    def median(self, contestant: Contestant, seeds: Sequence[int]) -> float:
        return statistics.median(self._done[contestant, seed] for seed in seeds)

    def opponents(self, fleets: Sequence[Fleet], rules: Sequence[str] = RULES) -> list[Contestant]:
        """The best contestants by the choosing seeds, best first."""
        effort, seeds = self._effort, self._effort.choosing
        one = seeds[:1]
        # These are never far from the best: they set the limit for the others.
        self.run([Contestant(fleet, "sticky", (), FIRST_SHARE) for fleet in fleets], one)
        start = [
            Contestant(fleet, rule, parameters_of(rule, self._name, seeds[0], fleet)[0])
            for fleet in fleets
            for rule in rules
        ]
        ranked = self.run(start, one)
        ended = self._distinct(ranked, one)
        # Where KV is short, those that have lost may win with admission.
        lost = [c for c in ranked if self.median(c, one) == math.inf]
        again = [c._replace(admission=FIRST_SHARE) for c in (*ended[: (len(ended) + 1) // 2], *lost)]
        ranked = self.run([*ended, *again], one)
        self._tell("all pairs", ranked, one)
        pairs = [(c.fleet, c.rule, c.admission) for c in self._distinct(ranked, one)[: effort.pairs]]
        ranked = self.run(
            [
                Contestant(fleet, rule, parameters, admission)
                for fleet, rule, admission in pairs
                for parameters in parameters_of(rule, self._name, seeds[0], fleet)
            ],
            one,
        )
        self._tell("tuned", ranked, one)
        best = list(dict.fromkeys(c[:3] for c in self._distinct(ranked, one)))[: effort.tuned]
        ranked = self.run([Contestant(*c, admission) for c in best for admission in ADMISSIONS], one)
        self._tell("admission", ranked, one)
        ranked = self.run(self._distinct(ranked, one)[: effort.finalists], seeds)
        self._tell("all choosing seeds", ranked, seeds)
        return ranked

    def _distinct(self, ranked: Sequence[Contestant], seeds: Sequence[int]) -> list[Contestant]:
        """Without those that took as long, to the last bit, as a better one on the same fleet: they decide alike."""
        found: dict[tuple[Fleet, float], Contestant] = {}
        for contestant in ranked:
            found.setdefault((contestant.fleet, self.median(contestant, seeds)), contestant)
        return [contestant for contestant in found.values() if self.median(contestant, seeds) < math.inf]

    def _tell(self, stage: str, ranked: Sequence[Contestant], seeds: Sequence[int]) -> None:
        best = ranked[0]
        self._say(f"{stage}: {self.count} simulations, best {self.median(best, seeds):,.0f} s, {best.words}")
