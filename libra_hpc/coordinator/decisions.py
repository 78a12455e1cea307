"""The planner's decisions as events, and afterwards what a move brought.

- A decision -> ``decision``, with inputs, candidates and reason.
- A hold whose reason differs from the last one's in figures only -> counted; ``held`` has the count when that ends.
- A batch after a move was measured -> ``move_judged``, with the predicted and the realised gain; not where the work
  changed, too.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import msgspec

from libra_hpc.facts.status import DecisionStatus
from libra_hpc.protocol.plan import PlanDecision

FIGURE = re.compile(r"\d+(\.\d+)?")


class DecisionLog:
    """Writes through ``event(kind, **fields)``; `last` is what the status shows."""

    def __init__(self, event: Callable[..., None]) -> None:
        self.last: DecisionStatus | None = None
        self._event = event
        self._moved: PlanDecision | None = None
        """A move that is not measured yet."""
        self._repeats = 0

    def add(self, decision: PlanDecision, now: float) -> None:
        self._judge(decision, now)
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

    def _judge(self, decision: PlanDecision, now: float) -> None:
        """Compare the first measurement after a move with the prediction."""
        moved, numbers = self._moved, decision.numbers
        if moved is not None and "train_nodes" in numbers:
            before, count = moved.numbers, len(moved.nodes)
            away = numbers["train_nodes"] - before["train_nodes"]
            if away:
                self._moved = None
            if away == (count if moved.action == "to_train" else -count) and "drift" not in decision.triggers:
                self._event(
                    "move_judged",
                    at=now,
                    to=moved.action.removeprefix("to_"),
                    rank=moved.node,
                    nodes=count,
                    predicted_gain_s=predicted_gain(moved),
                    realised_gain_s=before["batch_s"] - numbers["batch_s"],
                )
        if decision.action in ("to_train", "to_rollout"):
            self._moved = decision


def predicted_gain(decision: PlanDecision) -> float | None:
    """Seconds per global batch that a move is predicted to save; None for a hold."""
    numbers = decision.numbers
    return None if decision.action == "hold" or "after_s" not in numbers else numbers["batch_s"] - numbers["after_s"]


def _without_figures(reason: str) -> str:
    return FIGURE.sub("#", reason)
