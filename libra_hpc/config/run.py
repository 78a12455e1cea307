"""`RunConfig`: the whole run file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from .compute import ComputeSection
from .job import ComponentsSection, DeadlinesSection, NotifySection, RunSection, SlurmSection, TrackSection
from .learn import (
    AlgorithmSection,
    ChatSection,
    CheckpointSection,
    ModelSection,
    OptimizerSection,
    TaskSection,
    TrainSection,
)
from .rollout import BorrowSection, PlannerSection, RolloutSection
from .section import Section
from .simulated import SimulatedSection


class RunConfig(Section):
    """Every table of the run file, resolved."""

    run: RunSection = RunSection()
    slurm: SlurmSection = SlurmSection()
    compute: ComputeSection = ComputeSection()
    components: ComponentsSection = ComponentsSection()
    model: ModelSection = ModelSection()
    task: TaskSection = TaskSection()
    chat: ChatSection = ChatSection()
    algorithm: AlgorithmSection = AlgorithmSection()
    optimizer: OptimizerSection = OptimizerSection()
    train: TrainSection = TrainSection()
    rollout: RolloutSection = RolloutSection()
    planner: PlannerSection = PlannerSection()
    borrow: BorrowSection = BorrowSection()
    checkpoint: CheckpointSection = CheckpointSection()
    deadlines: DeadlinesSection = DeadlinesSection()
    notify: NotifySection = NotifySection()
    track: TrackSection = TrackSection()
    simulated: SimulatedSection = SimulatedSection()

    def changed(self, **sections: Mapping[str, Any]) -> RunConfig:
        """With other values of some keys, by section; they are not checked again."""
        update = {name: getattr(self, name).model_copy(update=dict(values)) for name, values in sections.items()}
        return self.model_copy(update=update)

    @property
    def speedup(self) -> float:
        """Seconds that pass in a second of the wall clock: more than 1 in a dry run, 1 in a real run."""
        return self.simulated.speedup if self.run.engine == "simulated" else 1.0

    def modelled(self, key: Literal["device", "devices", "model"]) -> str:
        """The key of ``[planner]``; in a dry run that of ``[simulated]`` first, because it is what runs.

        Empty: neither has it, and the value is that of the components or of ``[model]``.
        """
        simulated = self.simulated if self.run.engine == "simulated" else None
        return getattr(simulated, key, "") or getattr(self.planner, key)

    @property
    def streamed(self) -> bool:
        """Whether groups are trained as they are complete: rollout waits for training, and nothing needs the batch.

        Updates within a batch need the groups of each, and a reference policy has the place of the gradients.
        """
        algorithm = self.algorithm
        return algorithm.eta == 0 and algorithm.minibatches == 1 and not algorithm.has_reference

    @property
    def max_open_groups(self) -> int:
        """Most admitted and untrained prompts: by the staleness bound, or by ``rollout.max_trajectories``."""
        if self.rollout.max_trajectories:
            return max(1, self.rollout.max_trajectories // self.algorithm.group_size)
        return (self.algorithm.eta + 1) * self.algorithm.prompts_per_step
