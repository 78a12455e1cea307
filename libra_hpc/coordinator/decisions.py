"""The planner's decisions as events, and afterwards what a move brought.

- A decision -> ``decision``, with inputs, candidates and reason.
- A hold whose reason differs from the last one's in figures only -> counted; ``held`` has the count when that ends.
- A move was measured -> ``move_judged``, with the predicted and the realised gain.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import msgspec

from libra_hpc.facts.status import DecisionStatus
from libra_hpc.policies.control.decide import Planner
from libra_hpc.protocol.plan import PlanDecision

FIGURE = re.compile(r"\d+(\.\d+)?")


class DecisionLog:
    """Writes through ``event(kind, **fields)``; `last` is what the status shows."""

    def __init__(self, planner: Planner, event: Callable[..., None]) -> None:
        self.last: DecisionStatus | None = None
        self._planner, self._event = planner, event
        self._logged_outcomes = 0
        self._repeats = 0

    def add(self, decision: PlanDecision, now: float) -> None:
        self._log_outcomes()
        before = self.last
        same = (
            before is not None
            and decision.action == "hold" == before.action
            and _without_figures(decision.reason) == _without_figures(before.reason)
        )
        if not same:
            self.close()
            self._event(
                "decision",
                action=decision.action,
                node=decision.node,
                nodes=list(decision.nodes),
                reason=decision.reason,
                triggers=list(decision.triggers),
                numbers=decision.numbers,
                candidates=msgspec.to_builtins(decision.candidates),
                layout=decision.layout,
                predicted_gain_s=predicted_gain(decision),
            )
        self._repeats = self._repeats + 1 if same else 0
        self.last = DecisionStatus(**msgspec.structs.asdict(decision), at=now, looks=self._repeats + 1)

    def close(self) -> None:
        if self.last is not None and self._repeats:
            self._event("held", looks=self._repeats, reason=self.last.reason)
        self._repeats = 0

    def _log_outcomes(self) -> None:
        for outcome in self._planner.outcomes[self._logged_outcomes :]:
            fields: dict[str, Any] = {
                "at": outcome.at,
                "to": outcome.direction.removeprefix("to_"),
                "rank": outcome.node,
                "nodes": outcome.count,
            }
            self._event("move_judged", **fields, predicted_gain_s=outcome.predicted, realised_gain_s=outcome.realised)
        self._logged_outcomes = len(self._planner.outcomes)


def predicted_gain(decision: PlanDecision) -> float | None:
    """Seconds per global batch that a move is predicted to save; None for a hold."""
    numbers = decision.numbers
    return None if decision.action == "hold" or "after_s" not in numbers else numbers["batch_s"] - numbers["after_s"]


def _without_figures(reason: str) -> str:
    return FIGURE.sub("#", reason)
