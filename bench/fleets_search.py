"""The contestants of `bench.fleets`, and the search for the best one by successive halving.

A contestant is a fleet, a policy, a limit of admission and, in a steady row, the roles of the nodes. All of a row run
on the same work. On one choosing seed, a steady row with its first `SCREEN` batches alone:

1. `sticky` with a share on every fleet; of a steady row, first for the best numbers of training nodes, and in turn.
2. Those that stay with every rule, with and without a share.
3. The best with every second value of every limit, then with the values beside the best one.
4. The finalists on all choosing seeds and all batches, by median.

Splits and turns of a steady row have the same number of places in each stage. A simulation ends as lost when it takes
`LOST` times as long as the best one before its stage.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor
from typing import NamedTuple

from bench.controlled_simulation import ControlledSimulation
from bench.fleets_rows import DEGREES, ROWS, Fleet, engines_of, fleets_of, less_nodes, quantile_thresholds, window, work
from bench.fleets_training import Roles, nodes_of, settings_of, train_seconds, training_of
from bench.policies import POLICIES
from bench.policies.admission import Admitted
from bench.policies.libra import CmlfqCost, LaMlfq
from libra_hpc.errors import OperationError, UserError
from libra_hpc.policies.scheduling.protocol import Policy
from libra_hpc.policies.scheduling.registry import make_policy
from libra_hpc.simulator.simulate import simulate

CHOOSING = (1_000, 1_001, 1_002)
"""Seeds for choosing; those for reporting start at 0."""
OURS = "cmlfq"
BUCKETED: dict[str, type[CmlfqCost] | type[LaMlfq]] = {"cmlfq_cost": CmlfqCost, "la_mlfq": LaMlfq}
"""Their buckets are quantiles of the lengths that were seen while choosing."""
QUEUE_LENGTH = 16
"""Of a bucket of the shorter degrees: live trajectories per engine."""
RULES = ("sticky", "least_loaded", "round_robin", "least_live", "cache_aware", *BUCKETED)
SHARES = tuple(f"share 0.{tenths}" for tenths in range(1, 10))
LIVE = tuple(f"live {most}" for most in (4, 8, 14, 20, 26, 36, 50, 72, 96, 144))
"""Live trajectories per engine."""
ADMISSIONS = ("", *SHARES[1::2], *LIVE[1::2])
FIRST_SHARE = "share 0.5"
SCREEN = 4
"""Batches, and eta more."""
LOST = 1.6


class Contestant(NamedTuple):
    fleet: Fleet
    rule: str
    admission: str = ""
    roles: Roles = Roles()

    @property
    def words(self) -> str:
        """Policy and admission."""
        return f"{self.rule}, {self.admission}" if self.admission else self.rule


class Effort(NamedTuple):
    """How many contestants each stage of the search passes on."""

    choosing: tuple[int, ...]
    reporting: tuple[int, ...]
    pairs: int = 4
    finalists: int = 6
    screen: int = SCREEN


class _LostError(Exception):
    pass


Job = tuple[str, Contestant, int, float, int]
"""(row, contestant, seed, seconds after which it has lost, batches; 0: all)."""


def seconds(job: Job) -> float:
    """Seconds of one batch, or per batch in steady state; infinite if it lost or cannot run."""
    name, contestant, seed, limit, batches = job
    row, (before, found) = ROWS[name], work(name, seed)
    batches = batches or row.batches
    found = found[: row.trajectories * max(1, batches)]
    engines, policy = engines_of(row, contestant.fleet), policy_of(name, contestant)

    def watch(simulation: ControlledSimulation, now: float) -> None:
        if now > limit * (batches + 1):
            raise _LostError

    try:
        training, portion = None, 0
        if batches:
            training = training_of(name, seed, contestant.roles)
            portion = train_seconds(name, seed, contestant.roles).portion
        settings = settings_of(row, contestant.fleet, contestant.roles, portion)
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


def policy_of(name: str, contestant: Contestant) -> Policy:
    """The contestant's rule, with its limit of admission."""
    policy: Policy
    if contestant.rule in BUCKETED:
        policy = BUCKETED[contestant.rule](quantile_thresholds(name, CHOOSING[0]), QUEUE_LENGTH)
    else:
        policy = make_policy(POLICIES[contestant.rule])
    if not contestant.admission:
        return policy
    kind, value = contestant.admission.split()
    return Admitted(policy, share=float(value)) if kind == "share" else Admitted(policy, most=int(value))


def beside(admission: str) -> list[str]:
    """The values next to that of an admission."""
    scale = next((values for values in (SHARES, LIVE) if admission in values), ())
    return [other for other in scale if abs(scale.index(other) - scale.index(admission)) == 1]


class Search:
    """Runs contestants of one row; ``say`` gets a line per stage."""

    def __init__(self, pool: Executor, name: str, effort: Effort, say: Callable[[str], None]) -> None:
        self._pool, self._name, self._effort, self._say = pool, name, effort, say
        self.row = ROWS[name]
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

    def screen(self, stage: str, contestants: Iterable[Contestant]) -> list[Contestant]:
        """Those that have not lost on the first choosing seed, best first.

        Of those that take as long, to the last bit, on the same fleet, the first alone: they decide alike.
        """
        seed, batches = self._effort.choosing[0], self._screen
        found: dict[tuple[Fleet, float], Contestant] = {}
        for one in self.run(contestants, (seed,), batches=batches):
            found.setdefault((one.fleet, self._done[one, seed, batches]), one)
        ranked = [one for (_, taken), one in found.items() if taken < math.inf]
        taken = self._done[ranked[0], seed, batches]
        self._say(f"{stage}: {self.count} simulations, best {taken:,.0f} s, {ranked[0].words}")
        return ranked

    def opponents(self) -> list[Contestant]:
        """The best contestants by the choosing seeds, best first."""
        effort, bases = self._effort, self._bases()
        pairs = [c._replace(rule=rule, admission=one) for c in bases for rule in RULES for one in ("", FIRST_SHARE)]
        ranked = self.screen("all pairs", pairs)
        best = self._places([c._replace(admission="") for c in ranked], effort.pairs)
        ranked = self.screen("limits", [*ranked, *(c._replace(admission=one) for c in best for one in ADMISSIONS)])
        near = [c._replace(admission=one) for c in self._places(ranked, effort.pairs) for one in beside(c.admission)]
        ranked = self.screen("limits beside", [*ranked, *near])
        return self.run(self._places(ranked, effort.finalists), effort.choosing, limited=False)

    def _bases(self) -> list[Contestant]:
        """Fleets and roles that the search goes on with, each with `sticky` and a share."""
        row = self.row

        def on(roles: Iterable[Roles], degrees: Iterable[int]) -> list[Contestant]:
            """Every fleet of these degrees alone."""
            fleets = [(fleet, one) for one in roles for fleet in fleets_of(less_nodes(row, one.train))]
            chosen = [pair for pair in fleets if {part.tp for part in pair[0]} <= set(degrees)]
            return [Contestant(fleet, "sticky", FIRST_SHARE, one) for fleet, one in chosen]

        if not row.batches:
            return self.screen("fleets", on([Roles()], DEGREES))
        turns = [Roles(keep_kv=keep) for keep in ((False, True) if row.eta else (False,))]
        ranked = self.screen("roles", on([*(Roles(n) for n in range(1, nodes_of(row))), *turns], (4, 8)))
        roles = list(dict.fromkeys(c.roles for c in ranked))
        chosen = [*[one for one in roles if one.train][:2], *[one for one in roles if not one.train][:1]]
        return self._places(self.screen("fleets", on(chosen, DEGREES)), self._effort.pairs)

    def _places(self, ranked: Iterable[Contestant], count: int) -> list[Contestant]:
        """The first ``count`` different ones; of a steady row, half of them in turn and half not."""
        found = list(dict.fromkeys(ranked))
        if not self.row.batches:
            return found[:count]
        half = (count + 1) // 2
        splits, turns = [c for c in found if c.roles.train][:half], [c for c in found if not c.roles.train][:half]
        return [c for c in found if c in splits or c in turns]
