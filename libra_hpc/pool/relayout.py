"""A repartition carried out: the ranks of a running job are laid out anew, without giving up its nodes or its place.

Roles of hybrid nodes change while everything runs; core nodes, training parallelism and the engines of a node do not.  For these the run stops at a step
border as it does before a time limit, with a checkpoint, and instead of the run's verdict rank 0 leaves the new configuration and the file `RunDir.again`.
The launcher (the batch script, or `libra_hpc.slurm.ranks`) finds it and starts all ranks again, in the same allocation and the same attempt; they go on
from the checkpoint, as those of a resumed run do.

The order is: checkpoint, configuration, file.  Killed before the second, the run resumes as it was; killed before the third, it resumes in the new layout.

`EVERY_S`: at most one in an hour, whatever it promises.  It costs minutes and, worse, what was measured: the engines' costs, the factors of the cost
models and the test for drift begin anew, and the next verdict should rest on more than their first figures.
"""

from __future__ import annotations

from typing import Any

from libra_hpc.config.check import problems
from libra_hpc.config.load import validate, with_values
from libra_hpc.config.run import RunConfig
from libra_hpc.errors import UserError
from libra_hpc.planner.snapshot import PlanDecision
from libra_hpc.telemetry.rundir import RunDir, read_lines

EVERY_S = 3600.0
EVENT = "laid_out"


class Relayout:
    """What rank 0 knows of it; `order` when the planner proposes one, `carry_out` once training has stopped.

    ``speedup``: seconds of the run per second of the wall clock.
    """

    def __init__(self, run: RunDir, attempt: int, speedup: float) -> None:
        self._run, self._attempt = run, attempt
        last = max((event["t"] for event in read_lines(run.events) if event["kind"] == EVENT), default=float("-inf"))
        self.not_before = last + EVERY_S / speedup
        """Epoch seconds."""
        self._ordered: tuple[PlanDecision, RunConfig] | None = None

    @property
    def ordered(self) -> bool:
        """Whether one is under way."""
        return self._ordered is not None

    def order(self, decision: PlanDecision) -> str:
        """Prepare to carry out a decision's changes; returns why not, or an empty string."""
        try:
            config = with_values(validate(self._run.read_json(self._run.config)), decision.changes)
            for problem in problems(config):
                raise problem
        except UserError as error:
            return str(error)
        self._ordered = decision, config
        return ""

    def carry_out(self) -> dict[str, Any]:
        """The checkpoint is saved: leave what the next start of the ranks needs.  Returns what the event log should say."""
        assert self._ordered is not None
        decision, config = self._ordered
        self._run.write_json(self._run.config, config.model_dump())
        self._run.again(self._attempt).touch()
        return {"layout": decision.layout, "changes": decision.changes, "predicted_s": decision.candidates[0].batch_s if decision.candidates else None}
