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

from libra_hpc.policies.control.decide import Planner
from libra_hpc.policies.control.hysteresis import Hysteresis
from libra_hpc.policies.control.in_flight import InFlightEstimator
from libra_hpc.policies.control.moves import Moves
from libra_hpc.policies.control.node_scaling import NodeScaling
from libra_hpc.policies.control.rollout_by_nodes import RolloutByNodes
from libra_hpc.policies.control.stage_estimator import StageEstimator
from libra_hpc.policies.scheduling.cmlfq import causal_mlfq as cmlfq
from libra_hpc.policies.scheduling.cmlfq import remaining_work
from libra_hpc.policies.scheduling.cmlfq.causal_mlfq import CausalMlfq
from libra_hpc.policies.scheduling.cmlfq.remaining_work import Cursor, RemainingWorkEstimator
from libra_hpc.policies.scheduling.costs import ClassFit, EngineFit
from libra_hpc.policies.scheduling.protocol import TurnView
from libra_hpc.policies.scheduling.residency import EngineCache
from libra_hpc.protocol.env import Signal

Replacement = tuple[Any, str, Any]
FOREVER = 1e12

_advance = RemainingWorkEstimator.advance
_key = CausalMlfq.key
_observe_prompts = InFlightEstimator.observe
_blocked = Moves._blocked


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


def _key_of_sibling(self: CausalMlfq, turn: TurnView, now: float) -> float:
    return _key(self, replace(turn, sample=1), now)


def _key_in_order(self: CausalMlfq, turn: TurnView, now: float) -> float:
    _key(self, turn, now)
    tracked = self._tracked[turn.trajectory]
    tracked.claim.key, tracked.priority = turn.ready_at, int(turn.ready_at * cmlfq.PRIORITIES_PER_S)
    return turn.ready_at


def _nothing(*_: Any) -> None:
    return None


def _yes(*_: Any) -> bool:
    return True


_MEANS = ((remaining_work, "PRIOR_K", FOREVER),)
_SIBLINGS = ((remaining_work, "SIBLINGS_K", FOREVER),)
_OUTCOMES = ((remaining_work, "OUTCOME_K", FOREVER),)
SCHEDULER: dict[str, tuple[Replacement, ...]] = {
    "learned means": _MEANS,
    "siblings": _SIBLINGS,
    "tool outcomes": _OUTCOMES,
    "all estimates": (*_MEANS, *_SIBLINGS, *_OUTCOMES),
    "forgetting": ((remaining_work, "HALF_LIFE", FOREVER),),
    "limit of the context": ((RemainingWorkEstimator, "advance", _advance_roomless),),
    "tokens of tools": ((RemainingWorkEstimator, "advance", _advance_toolless),),
    "migration in a turn": ((CausalMlfq, "rebalance", lambda *_: []),),
    "beside a sibling": ((CausalMlfq, "_offer_sibling", _nothing),),
    "residents": ((EngineCache, "has_room", _yes), (EngineCache, "fits", _yes)),
    "moves in tool gaps": ((cmlfq, "MOVE_MARGIN", FOREVER),),
    "margin of moves": ((cmlfq, "MOVE_MARGIN", 1.0),),
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
    "in-flight work": ((StageEstimator, "_from_in_flight", _nothing),),
    "test of prompts": ((InFlightEstimator, "observe", _observe_untested),),
    "second look": ((Hysteresis, "allows", _allows),),
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
