"""The contestants of `bench.fleets`, and the search for the best one by successive halving.

A contestant is a fleet, a policy with its parameters, a rule of admission and, in a steady row, the roles of the nodes.
All of a row run on the same work.  On one choosing seed, a steady row with its first `SCREEN` batches alone:

1. `sticky` with a share on every fleet; of a steady row, beside the best numbers of training nodes, and in turn.
2. Those that stay with every rule, each at its first parameters; with and without a share.
3. The best with all parameters of their rules.
4. The best with every second value of every admission, then with the values beside the best one.
5. The finalists on all choosing seeds and all batches, by median.

Splits and turns of a steady row have the same number of places in each stage.  A simulation ends as lost when it takes
`LOST` times as long as the best one before its stage.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor
from typing import NamedTuple

from bench.controlled_simulation import ControlledSimulation
from bench.fleets_rows import (
    DEGREES,
    Fleet,
    engines_of,
    fleets_of,
    less_nodes,
    longest_context,
    quantile_thresholds,
    setting_of,
    window,
    work,
)
from bench.fleets_training import Roles, nodes_of, settings_of, train_seconds, training_of
from bench.policies import POLICIES
from bench.policies.admission import Admission, Admitted, KvShare, LiveCap
from bench.policies.episode_cap import EpisodeCap
from bench.policies.libra import CmlfqCost, LaMlfq, Libra
from bench.policies.tp_sticky import TpSticky
from libra_hpc.errors import OperationError, UserError
from libra_hpc.policies.scheduling.protocol import Policy
from libra_hpc.policies.scheduling.registry import make_policy
from libra_hpc.simulator.simulate import simulate

OURS = "cmlfq"
PLAIN = ("sticky", "least_loaded")
BUCKETED: dict[str, type[Libra] | type[CmlfqCost] | type[LaMlfq]] = {
    "libra": Libra,
    "cmlfq_cost": CmlfqCost,
    "la_mlfq": LaMlfq,
}
STAYS = ("round_robin", "least_live", "cache_aware")
RULES = (*PLAIN, *STAYS, "tp_sticky", *BUCKETED)
CAPS = (8, 16, 32, 100)
"""Of a bucket of the shorter degrees: live trajectories per engine."""
THRESHOLDS = ((), (1_000, 4_000, 16_000))
"""Bounds of the buckets, tokens; empty: quantiles of the lengths that were seen while choosing."""
SHARES = tuple(f"share 0.{tenths}" for tenths in range(1, 10))
LIVE = tuple(f"live {most}" for most in (4, 8, 14, 20, 26, 36, 50, 72, 96, 144))
"""Live trajectories per engine: `LiveCap`."""
EPISODES = ("cap 1.02", "cap 1.1")
"""`EpisodeCap` with that growth."""
ADMISSIONS = ("", *EPISODES, *SHARES[1::2], *LIVE[1::2])
FIRST_SHARE = "share 0.5"
SCREEN = 4
"""Batches, and eta more."""
LOST = 1.6


class Contestant(NamedTuple):
    fleet: Fleet
    rule: str
    parameters: tuple[float | tuple[int, ...], ...] = ()
    admission: str = ""
    roles: Roles = Roles()

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

    @property
    def plain(self) -> Contestant:
        """Without parameters."""
        return self._replace(parameters=())


class Effort(NamedTuple):
    """How many contestants each stage of the search passes on."""

    choosing: tuple[int, ...]
    reporting: tuple[int, ...]
    pairs: int = 6
    tuned: int = 4
    finalists: int = 6
    screen: int = SCREEN


class _LostError(Exception):
    pass


Job = tuple[str, Contestant, int, float, int]
"""(row, contestant, seed, seconds after which it has lost, batches; 0: all)."""


def seconds(job: Job) -> float:
    """Seconds of one batch, or per batch in steady state; infinite if it lost or cannot run."""
    name, contestant, seed, limit, batches = job
    row, longest = setting_of(name), longest_context(name, (seed,))
    before, found = work(name, seed)
    batches = batches or row.batches
    found = found[: row.trajectories * max(1, batches)]
    engines = engines_of(row, contestant.fleet)
    policy, admission = _policy(contestant), _admission(name, contestant)
    if admission is not None:
        policy = Admitted(policy, admission)

    def watch(simulation: ControlledSimulation, now: float) -> None:
        if now > limit * (batches + 1):
            raise _LostError

    try:
        training, portion = None, 0
        if batches:
            training = training_of(name, seed, contestant.roles)
            portion = train_seconds(name, seed, contestant.roles).portion
        settings = settings_of(row, longest, contestant.fleet, contestant.roles, portion)
        for batch in before:
            simulate(batch, engines, policy, settings)
        result = ControlledSimulation(
            found, engines, policy, settings, training=training, controller=watch, controller_s=30.0
        ).run()
    except (UserError, OperationError, _LostError):
        return math.inf
    if not batches:
        return result.makespan_s
    first, last = window(batches, row.eta)
    took = (result.steps[last].batch_at - result.steps[first].batch_at) / (last - first)
    # Trainers that are still ahead of rollout will hold it up.
    busy = statistics.fmean(step.end_at - step.start_at for step in result.steps[first:last])
    return max(took, busy)


def _policy(contestant: Contestant) -> Policy:
    if contestant.rule in BUCKETED:
        thresholds, cap = contestant.parameters
        assert isinstance(thresholds, tuple)
        assert isinstance(cap, int)
        return BUCKETED[contestant.rule](thresholds, cap)
    if contestant.rule == TpSticky.name:
        return TpSticky(live=not contestant.parameters)
    return make_policy(POLICIES[contestant.rule])


def _admission(name: str, contestant: Contestant) -> Admission | None:
    if not contestant.admission:
        return None
    kind, value = contestant.admission.split()
    if kind == "share":
        return KvShare(float(value))
    if kind == "live":
        return LiveCap(int(value))
    # The mean context of the work itself: a better first guess than prime-rl has.
    found = work(name, 0)[1]
    return EpisodeCap(statistics.fmean(one.context for one in found), growth=float(value))


def parameters_of(rule: str, name: str, seed: int, fleet: Fleet) -> list[tuple[float | tuple[int, ...], ...]]:
    """The grid of a rule; the first is what a careful user would start with."""
    if rule == TpSticky.name:
        return [(), (0.0,)]
    if rule not in BUCKETED:
        return [()]
    known = quantile_thresholds(name, seed)
    grid: list[tuple[float | tuple[int, ...], ...]] = [(cuts or known, cap) for cuts in THRESHOLDS for cap in CAPS]
    start = CAPS.index(16)
    # With one TP degree there is one bucket, whatever its bounds, and its cap holds nobody back.
    return grid[start : start + 1] if one_degree(fleet) else [grid[start], *grid[:start], *grid[start + 1 :]]


def one_degree(fleet: Fleet) -> bool:
    return len({part.tp for part in fleet}) == 1


def beside(admission: str) -> list[str]:
    """The values next to that of an admission."""
    scale = next((values for values in (SHARES, LIVE) if admission in values), ())
    return [other for other in scale if abs(scale.index(other) - scale.index(admission)) == 1]


class Search:
    """Runs contestants of one row; ``say`` gets a line per stage."""

    def __init__(self, pool: Executor, name: str, effort: Effort, say: Callable[[str], None]) -> None:
        self._pool, self._name, self._effort, self._say = pool, name, effort, say
        self.row = setting_of(name)
        self.count = 0
        """Simulations so far."""
        self._screen = min(effort.screen + self.row.eta, self.row.batches)
        self._done: dict[tuple[Contestant, int, int], float] = {}

    def run(
        self, contestants: Iterable[Contestant], seeds: Sequence[int], limited: bool = True, batches: int = 0
    ) -> list[Contestant]:
        """Run what has not run yet; returns the contestants by median over ``seeds``, best first."""
        wanted, batches = list(dict.fromkeys(contestants)), batches or self.row.batches
        best = min(self._done.values(), default=math.inf)
        limit = LOST * best if limited else math.inf
        jobs = [
            (self._name, c, seed, limit, batches)
            for seed in seeds
            for c in wanted
            if (c, seed, batches) not in self._done
        ]
        for job, found in zip(jobs, self._pool.map(seconds, jobs), strict=True):
            self._done[job[1], job[2], batches] = found
            self.count += 1
        return sorted(wanted, key=lambda c: statistics.median(self._done[c, seed, batches] for seed in seeds))

    def of(self, contestant: Contestant, seed: int) -> float:
        """Its seconds with all batches."""
        return self._done[contestant, seed, self.row.batches]

    def median(self, contestant: Contestant, seeds: Sequence[int]) -> float:
        return statistics.median(self.of(contestant, seed) for seed in seeds)

    def screen(self, contestants: Iterable[Contestant]) -> list[Contestant]:
        """Those that have not lost on the first choosing seed, best first.

        Of those that take as long, to the last bit, on the same fleet, the first alone: they decide alike.
        """
        seed, batches = self._effort.choosing[0], self._screen
        found: dict[tuple[Fleet, float], Contestant] = {}
        for one in self.run(contestants, (seed,), batches=batches):
            found.setdefault((one.fleet, self._done[one, seed, batches]), one)
        return [one for (_, taken), one in found.items() if taken < math.inf]

    def opponents(self, longest: int, rules: Sequence[str] = RULES) -> list[Contestant]:
        """The best contestants by the choosing seeds, best first."""
        effort, bases = self._effort, self._bases(longest)
        start = [
            base._replace(rule=rule, parameters=self._grid(base, rule)[0])
            for base in bases
            for rule in rules
            if rule != Libra.name or not one_degree(base.fleet)
        ]
        ranked = self.screen([*bases, *start])
        # Where KV is short those without admission lose, where it suffices those with a share.
        again = [c._replace(admission=FIRST_SHARE if not c.admission else "") for c in ranked[: (len(ranked) + 1) // 2]]
        lost = [c._replace(admission=FIRST_SHARE) for c in start if not c.admission and c not in ranked]
        ranked = self.screen([*ranked, *again, *lost])
        self._tell("all pairs", ranked)
        pairs = self._places([c.plain for c in ranked], effort.pairs)
        tuned = [c._replace(parameters=values) for c in pairs for values in self._grid(c, c.rule)]
        ranked = self.screen([*ranked, *tuned])
        self._tell("tuned", ranked)
        best = self._places([c._replace(admission="") for c in ranked], effort.tuned)
        ranked = self.screen([*ranked, *(c._replace(admission=admission) for c in best for admission in ADMISSIONS)])
        best = self._places(ranked, effort.tuned)
        ranked = self.screen([*ranked, *(c._replace(admission=other) for c in best for other in beside(c.admission))])
        self._tell("admission", ranked)
        ranked = self.run(self._places(ranked, effort.finalists), effort.choosing, limited=False)
        self._say(f"finalists: {self.count} simulations, best {ranked[0].words}")
        return ranked

    def _bases(self, longest: int) -> list[Contestant]:
        """Fleets and roles that the search goes on with, each with `sticky` and a share."""
        row = self.row

        def on(roles: Iterable[Roles], degrees: Sequence[int]) -> list[Contestant]:
            """Homogeneous fleets of these degrees; mixes where there are none."""
            found = [(fleet, one) for one in roles for fleet in fleets_of(less_nodes(row, one.train), longest)]
            return [
                Contestant(fleet, "sticky", (), FIRST_SHARE, one)
                for fleet, one in found
                if (fleet[0].tp in degrees if one_degree(fleet) else not degrees)
            ]

        if not row.batches:
            # These are never far from the best: they set the limit for the others.
            ranked = self.screen([Contestant(fleet, "sticky", (), FIRST_SHARE) for fleet in fleets_of(row, longest)])
            return [c._replace(admission="") for c in ranked]
        turns = [Roles(keep_kv=keep) for keep in ((False, True) if row.eta else (False,))]
        ranked = self.screen(on([*(Roles(n) for n in range(1, nodes_of(row))), *turns], (4, 8)))
        roles = list(dict.fromkeys(c.roles for c in ranked))
        chosen = [*[one for one in roles if one.train][:2], *[one for one in roles if not one.train][:1]]
        ranked = self.screen([*ranked, *on(chosen, DEGREES)])
        ranked = self.screen([*ranked, *on([c.roles for c in self._places(ranked, 2)], ())])
        self._tell("fleets and roles", ranked)
        return self._places(ranked, self._effort.pairs)

    def _places(self, ranked: Iterable[Contestant], count: int) -> list[Contestant]:
        """The first ``count`` different ones; of a steady row, half of them in turn and half not."""
        found = list(dict.fromkeys(ranked))
        if not self.row.batches:
            return found[:count]
        half = (count + 1) // 2
        splits, turns = [c for c in found if c.roles.train][:half], [c for c in found if not c.roles.train][:half]
        return [c for c in found if c in splits or c in turns]

    def _grid(self, one: Contestant, rule: str) -> list[tuple[float | tuple[int, ...], ...]]:
        return parameters_of(rule, self._name, self._effort.choosing[0], one.fleet)

    def _tell(self, stage: str, ranked: Sequence[Contestant]) -> None:
        best = ranked[0]
        taken = self._done[best, self._effort.choosing[0], self._screen]
        self._say(f"{stage}: {self.count} simulations, best {taken:,.0f} s, {best.words}")
