"""What `bench.ablation` switches off: each mechanism of scheduler and planner, and what takes its place.

A replacement is (owner, name, value): a method of a class, or a name of a module.  Compiled classes take none, so
`bench.ablation` runs its simulations in processes that import the sources.  Nothing here derives from such a class,
so that the module can be imported anywhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from math import inf
from typing import Any
from unittest.mock import patch

from msgspec.structs import replace

from libra_hpc.policies.control import stage_times
from libra_hpc.policies.control.decide import Planner
from libra_hpc.policies.control.hysteresis import Hysteresis
from libra_hpc.policies.control.in_flight import InFlightEstimator
from libra_hpc.policies.control.moves import Moves
from libra_hpc.policies.control.node_scaling import NodeScaling
from libra_hpc.policies.control.stage_estimator import StageEstimator
from libra_hpc.policies.control.trend import Trend
from libra_hpc.policies.costs.rollout_by_nodes import RolloutByNodes
from libra_hpc.policies.scheduling.board import Board
from libra_hpc.policies.scheduling.cmlfq import causal_mlfq as cmlfq
from libra_hpc.policies.scheduling.cmlfq import groups, remaining_work, signal_effect, survival
from libra_hpc.policies.scheduling.cmlfq.blend import Blend
from libra_hpc.policies.scheduling.cmlfq.causal_mlfq import CausalMlfq
from libra_hpc.policies.scheduling.cmlfq.groups import PromptGroup, TaskStats
from libra_hpc.policies.scheduling.cmlfq.remaining_work import Cursor, RemainingWorkEstimator
from libra_hpc.policies.scheduling.cmlfq.signal_effect import TRIALS, Gate
from libra_hpc.policies.scheduling.cmlfq.survival import CELLS, Survival
from libra_hpc.policies.scheduling.costs import ClassFit, EngineFit
from libra_hpc.policies.scheduling.protocol import Decision, TurnView
from libra_hpc.policies.scheduling.residency import EngineCache
from libra_hpc.protocol.env import Signal

Replacement = tuple[Any, str, Any]
FOREVER = 1e12

_PRIOR = Survival()
_init_stats = TaskStats.__init__
_pass = RemainingWorkEstimator._pass
_learn_total = RemainingWorkEstimator._learn_total
_advance = RemainingWorkEstimator.advance
_learn_gate = Gate.learn
_key = CausalMlfq.key
_route = CausalMlfq.route
_observe_prompts = InFlightEstimator.observe
_blocked = Moves._blocked


def _rebuild_with(**values: Any) -> Replacement:
    """The survival table with these columns, whatever ended."""
    rebuild = Survival._rebuild

    def rebuilt(self: Survival) -> None:
        rebuild(self)
        for name, value in values.items():
            setattr(self, name, value)

    return (Survival, "_rebuild", rebuilt)


class _Unused:
    """A survival table without ends."""

    ends = 0

    def passed(self, first: int, last: int) -> None:
        """Nothing."""

    def ended(self, cell: int, version: int) -> None:
        """Nothing."""


def _init_one_table(self: TaskStats) -> None:
    """Totals alone, not totals over the scale of their prompt."""
    _init_stats(self)
    self.tables = (self.tables[0], _Unused())  # type: ignore[assignment]


def _pass_uncounted(self: RemainingWorkEstimator, cursor: Cursor, cell: int) -> None:
    table = cursor.task.tables[0]
    risk = table._risk[:]
    _pass(self, cursor, cell)
    table._risk = risk


def _learn_whole_total(self: RemainingWorkEstimator, cursor: Cursor, total: float, version: int) -> None:
    cursor.cell = 0
    _learn_total(self, cursor, total, version)


def _advance_roomless(
    self: RemainingWorkEstimator, cursor: Cursor, signals: tuple[Signal, ...], attained: int, room: float = inf
) -> float:
    return _advance(self, cursor, signals, attained)


def _advance_toolless(
    self: RemainingWorkEstimator, cursor: Cursor, signals: tuple[Signal, ...], attained: int, room: float = inf
) -> float:
    left = _advance(self, cursor, signals, attained, room)
    cursor.future = 0.0
    return left


def _open_gate(self: Gate, with_signals: float, without_signals: float) -> None:
    _learn_gate(self, with_signals, without_signals)
    self.open = self.trials >= TRIALS


def _key_of_sibling(self: CausalMlfq, turn: TurnView, now: float) -> float:
    return _key(self, replace(turn, sample=1), now)


def _key_in_order(self: CausalMlfq, turn: TurnView, now: float) -> float:
    _key(self, turn, now)
    tracked = self._tracked[turn.trajectory]
    tracked.claim.key, tracked.priority = turn.ready_at, int(turn.ready_at * cmlfq.PRIORITIES_PER_S)
    return turn.ready_at


def _route_at_once(self: CausalMlfq, turn: TurnView, board: Board, now: float) -> Decision:
    return _route(self, replace(turn, ready_at=-inf), board, now)


def _nothing(*_: Any) -> None:
    return None


def _yes(*_: Any) -> bool:
    return True


_PRIOR_ONLY = _rebuild_with(**{name: getattr(_PRIOR, name) for name in ("rest", "log_rest", "log_total", "below")})
"""The Pareto tail of the prior."""
SCHEDULER: dict[str, tuple[Replacement, ...]] = {
    "survival table": (_PRIOR_ONLY,),
    "running ones in it": (
        (RemainingWorkEstimator, "_pass", _pass_uncounted),
        (RemainingWorkEstimator, "_learn_total", _learn_whole_total),
    ),
    "inverse weights": (_rebuild_with(weight=[1.0] * CELLS),),
    "share known": (_rebuild_with(known=[1.0] * CELLS),),
    "regressions": ((Blend, "_solve", _nothing),),
    "gate": ((Gate, "learn", _open_gate),),
    "tool results": ((Gate, "learn", _nothing),),
    "signal effects": ((remaining_work, "_effect", lambda *_: 0.0),),
    "credibility, tools": ((signal_effect, "CREDIBILITY_K", 0.0),),
    "credibility, prompts": ((groups, "K_PROMPT", (1e-9, 1e-9)),),
    "choice of k": ((groups, "K_PROMPT", (2.0, 2.0)),),
    "prompt statistics": ((PromptGroup, "rescale", _nothing),),
    "running siblings": ((remaining_work, "RUNNING_WEIGHT", 0.0),),
    "table of scaled totals": ((TaskStats, "__init__", _init_one_table),),
    "forgetting": tuple((module, "HALF_LIFE", FOREVER) for module in (survival, groups, signal_effect)),
    "limit of the context": ((RemainingWorkEstimator, "advance", _advance_roomless),),
    "tokens of tools": ((RemainingWorkEstimator, "advance", _advance_toolless),),
    "all estimates": (
        _PRIOR_ONLY,
        (Blend, "_solve", _nothing),
        (Gate, "learn", _nothing),
        (PromptGroup, "rescale", _nothing),
    ),
    "migration in a turn": ((CausalMlfq, "rebalance", lambda *_: []),),
    "beside a sibling": ((CausalMlfq, "_sibling_load", _nothing),),
    "residents": ((EngineCache, "has_room", _yes), (EngineCache, "fits", _yes)),
    "moves in tool gaps": ((cmlfq, "MOVE_MARGIN", FOREVER),),
    "margin of moves": ((cmlfq, "MOVE_MARGIN", 1.0),),
    "waits for its cache": ((CausalMlfq, "route", _route_at_once),),
    "first siblings first": ((CausalMlfq, "key", _key_of_sibling),),
    "order of the queue": ((CausalMlfq, "key", _key_in_order),),
    "engine priorities": ((cmlfq, "PRIORITIES_PER_S", 0),),
    "measured step costs": ((ClassFit, "solve", lambda self, prior: prior),),
    "pace of each engine": ((EngineFit, "compare", _nothing),),
}
"""Parts of the policy `cmlfq` and of the board that it reads; caps on turns in flight are fixed in the simulator."""


def _observe_untested(self: InFlightEstimator, snapshot: Any) -> None:
    _observe_prompts(self, snapshot)


def _unless_queues(self: Moves, *facts: Any) -> str:
    reason = _blocked(self, *facts)
    return "" if reason.startswith("the queues") else reason


def _allows(self: Hysteresis, direction: str, settled: bool, now: float) -> bool:
    return True


PLANNER: dict[str, tuple[Replacement, ...]] = {
    "forecast": ((stage_times, "trend", lambda points: Trend()),),
    "in-flight work": ((StageEstimator, "_from_in_flight", _nothing),),
    "test of prompts": ((InFlightEstimator, "observe", _observe_untested),),
    "second look": ((Hysteresis, "allows", _allows),),
    "failed moves": ((Hysteresis, "failed", _nothing),),
    "measured switch cost": (
        (Hysteresis, "switch_cost", lambda self, direction, snapshot: self._settings.switch_cost_s),
    ),
    "moves per hour": ((Hysteresis, "moves_left", 1_000),),
    "lessons of moves": ((NodeScaling, "learn", _nothing),),
    "model calibration": ((RolloutByNodes, "learn", _nothing),),
    "queues": ((Moves, "_blocked", _unless_queues),),
    "repartition": ((Planner, "_repartition_due", lambda *_: False),),
}
"""Parts of `libra_hpc.policies.control`."""


@contextmanager
def without(mechanism: str) -> Iterator[None]:
    """Everything but this mechanism; the empty name switches nothing off."""
    with ExitStack() as stack:
        for owner, name, value in {**SCHEDULER, **PLANNER}.get(mechanism, ()):
            # Replacing a name that is gone would measure nothing.
            stack.enter_context(patch.object(owner, name, value))
        yield
