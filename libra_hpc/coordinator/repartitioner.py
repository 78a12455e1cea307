"""Carries out a repartition: all ranks of a running job restart in another rank layout, in the same allocation.

- The planner decides one, at most every `EVERY_S` -> checked against the configuration that runs.
- An operator orders one (`orders`) -> checked likewise, at any time; the planner's interval begins again.
- A node is lost, starting or moving -> the order waits, because a restart needs every node.
- Training has saved -> new configuration, then the event, then the record of the end, in this order.
- The run's owner finds that record -> it starts all ranks again; they go on from the checkpoint.
- Killed before the configuration is written -> the run resumes as it was, and the next attempt refuses the order.
- Killed later -> it goes on in the new layout, and its rank 0 writes the missing event.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

from libra_hpc.config.load import load_resolved
from libra_hpc.config.run import RunConfig
from libra_hpc.errors import UserError
from libra_hpc.facts.rundir import read_lines
from libra_hpc.mesh.agent_context import AgentContext
from libra_hpc.mesh.rank_layout import RankLayout
from libra_hpc.policies.control.layout_choice import EVERY_S
from libra_hpc.preflight.rank_roles import SameLayout, describe, repartitioned
from libra_hpc.protocol.plan import PlanDecision

from .orders import REFUSED, Orders

EVENT = "repartitioned"


class _Ordered(NamedTuple):
    by: Literal["planner", "operator"]
    changes: Mapping[str, Any]
    config: RunConfig
    predicted_s: float | None = None
    order: str = ""


class Repartitioner:
    """What rank 0 does for a repartition: `propose` or `poll`, then `carry_out` once training has stopped.

    ``event(kind, **fields)`` writes to the event log; ``answer`` does so before it returns.
    """

    def __init__(self, context: AgentContext, event: Callable[..., None], answer: Callable[..., None]) -> None:
        self._run, self._attempt, self._layout, self._event = context.run, context.attempt, context.layout, event
        answers = [line for line in read_lines(context.run.events) if line.get("kind") in (EVENT, REFUSED)]
        self._orders = Orders(context.run, answer, {str(line.get("order")) for line in answers})
        carried_out = [line for line in answers if line["kind"] == EVENT]
        self._ordered: _Ordered | None = None
        self._waits_for = ""
        self.not_before = (
            max((line["t"] for line in carried_out), default=float("-inf")) + EVERY_S / context.config.speedup
        )
        """Epoch seconds before which the planner proposes none."""
        self.last = in_words(carried_out[-1]) if carried_out else ""
        self._answer_left_over(context.resume_point.step)

    @property
    def ordered(self) -> bool:
        return self._ordered is not None

    @property
    def message(self) -> str:
        """What an operator should see now; mostly nothing."""
        if self._ordered is not None:
            return f"saving, to start again in another layout, as the {self._ordered.by} asks"
        return f"an order for another layout waits: {self._waits_for}" if self._waits_for else ""

    def propose(self, decision: PlanDecision) -> bool:
        """Prepare the planner's decision; False, with an event that has the reason, when it cannot be carried out."""
        if self._ordered is not None:
            return False
        try:
            config = self._with_changes(decision.changes)
        except UserError as error:
            self._event(REFUSED, by="planner", reason=str(error), changes=decision.changes)
            return False
        self._ordered = _Ordered(
            "planner", decision.changes, config, decision.candidates[0].batch_s if decision.candidates else None
        )
        return True

    def poll(self, blocked_by: str) -> bool:
        """Read an operator's order; True when it is to be carried out now.

        ``blocked_by``: why none can be carried out at the moment, else empty.
        """
        self._waits_for = ""
        order = None if self._ordered else self._orders.waiting()
        if order is None:
            return False
        try:
            if order.attempt != self._attempt:
                raise UserError(f"it is an order for attempt {order.attempt}, and this is attempt {self._attempt}.")
            config = self._with_changes(order.values)
        except UserError as error:
            self._orders.refuse(order, str(error))
            return False
        if blocked_by:
            self._waits_for = blocked_by
            return False
        self._event("repartition_ordered", order=order.id, by="operator", changes=order.values)
        self._ordered = _Ordered("operator", order.values, config, order=order.id)
        return True

    def carry_out(self, step: int) -> None:
        """The checkpoint of ``step`` is saved: leave what the next start of the ranks needs, and log it."""
        assert self._ordered is not None
        self._run.write_config(self._ordered.config.as_data())
        self._log_done(step, self._ordered)

    def give_up(self, reason: str) -> None:
        order = self._orders.waiting()
        if order is not None:
            self._orders.refuse(order, reason)

    def _answer_left_over(self, step: int) -> None:
        """Answer an order that the rank 0 before left behind."""
        order = self._orders.waiting()
        if order is None:
            return
        try:
            self._with_changes(order.values)
        except SameLayout as same:
            self._log_done(step, _Ordered("operator", order.values, same.config, order=order.id))
        except UserError as error:
            self._orders.refuse(order, str(error))
        else:
            if order.attempt != self._attempt:
                self._orders.refuse(
                    order,
                    f"attempt {order.attempt} ended before it could be carried out; order it again, or resume with -o.",
                )

    def _with_changes(self, values: Mapping[str, Any]) -> RunConfig:
        """The configuration on disk, which must be the one that runs, in another layout.

        Not the agent's own: that has the times of a dry run scaled (`in_wall_time`), and this one is written back.
        """
        config = load_resolved(self._run.config)
        if RankLayout.of(config) != self._layout:
            raise UserError(f"{self._run.config.name} has another layout than the ranks that run.")
        return repartitioned(config, values)

    def _log_done(self, step: int, done: _Ordered) -> None:
        fields = {
            "step": step,
            "by": done.by,
            "layout": describe(done.config),
            "changes": done.changes,
            "predicted_s": done.predicted_s,
        }
        self.last = in_words(fields)
        if done.order:
            self._orders.answer(done.order, EVENT, **fields)
        else:
            self._event(EVENT, **fields)


def in_words(event: Mapping[str, Any]) -> str:
    return f"after step {event['step']} by the {event.get('by', 'planner')}: {event['layout']}"
