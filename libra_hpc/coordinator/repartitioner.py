"""Carries out a repartition: all ranks of a running job restart in another rank layout, in the same allocation.

- The planner decides one, at most every `EVERY_S` -> it is checked as a run file is.
- Training has saved -> new configuration, then the event, then the record of the end, in this order.
- The run's owner finds that record -> it starts all ranks again; they go on from the checkpoint.
- Killed before the configuration is written -> the run resumes as it was; later -> in the new layout.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from libra_hpc.config.load import load_resolved, with_values
from libra_hpc.config.run import RunConfig
from libra_hpc.errors import UserError
from libra_hpc.facts.rundir import read_lines
from libra_hpc.mesh.agent_context import AgentContext
from libra_hpc.policies.control.layout_choice import EVERY_S
from libra_hpc.preflight.checks import check_layout
from libra_hpc.preflight.gpu_memory import check_memory
from libra_hpc.protocol.plan import PlanDecision

EVENT = "repartitioned"


class Repartitioner:
    """What rank 0 does for a repartition: `propose`, then `carry_out` once training has stopped.

    ``event(kind, **fields)`` writes to the event log.
    """

    def __init__(self, context: AgentContext, event: Callable[..., None]) -> None:
        self._run, self._event = context.run, event
        carried_out = [line for line in read_lines(context.run.events) if line.get("kind") == EVENT]
        self._proposed: tuple[PlanDecision, RunConfig] | None = None
        self.not_before = (
            max((line["t"] for line in carried_out), default=float("-inf")) + EVERY_S / context.config.speedup
        )
        """Epoch seconds before which the planner proposes none."""
        self.last = in_words(carried_out[-1]) if carried_out else ""

    @property
    def ordered(self) -> bool:
        return self._proposed is not None

    def propose(self, decision: PlanDecision) -> bool:
        """Prepare the planner's decision; False, with an event that has the reason, when it cannot be carried out."""
        try:
            # Not the agent's own configuration: that has the times of a dry run scaled, and this one is written back.
            config = with_values(load_resolved(self._run.config), decision.changes)
            if (shape := check_layout(config)) is not None:
                check_memory(config, shape)
        except UserError as error:
            self._event("repartition_refused", reason=str(error), changes=decision.changes)
            return False
        self._proposed = decision, config
        return True

    def carry_out(self, step: int) -> None:
        """The checkpoint of ``step`` is saved: leave what the next start of the ranks needs, and log it."""
        assert self._proposed is not None
        decision, config = self._proposed
        self._run.write_config(config.as_data())
        fields = {
            "step": step,
            "layout": decision.layout,
            "changes": decision.changes,
            "predicted_s": decision.candidates[0].batch_s if decision.candidates else None,
        }
        self.last = in_words(fields)
        self._event(EVENT, **fields)


def in_words(event: Mapping[str, Any]) -> str:
    return f"after step {event['step']}: {event['layout']}"
