"""`RunConfig`: the whole run file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from .job import ComponentsSection, ComputeSection, DeadlinesSection, EnvSection, RunSection, SlurmSection, TrackSection
from .learn import (
    AlgorithmSection,
    ChatSection,
    CheckpointSection,
    LoraSection,
    ModelSection,
    OptimizerSection,
    TaskSection,
    TrainSection,
)
from .rollout import BorrowSection, PlannerSection, RolloutSection
from .section import Section
from .simulated import SimulatedSection

GIVEN = "given"


class RunConfig(Section, frozen=True):
    """Every table of the run file, resolved."""

    run: RunSection = RunSection()
    slurm: SlurmSection = SlurmSection()
    compute: ComputeSection = ComputeSection()
    components: ComponentsSection = ComponentsSection()
    model: ModelSection = ModelSection()
    task: TaskSection = TaskSection()
    chat: ChatSection = ChatSection()
    env: EnvSection = EnvSection()
    algorithm: AlgorithmSection = AlgorithmSection()
    lora: LoraSection = LoraSection()
    optimizer: OptimizerSection = OptimizerSection()
    train: TrainSection = TrainSection()
    rollout: RolloutSection = RolloutSection()
    planner: PlannerSection = PlannerSection()
    borrow: BorrowSection = BorrowSection()
    checkpoint: CheckpointSection = CheckpointSection()
    deadlines: DeadlinesSection = DeadlinesSection()
    track: TrackSection = TrackSection()
    simulated: SimulatedSection = SimulatedSection()
    given: frozenset[str] = frozenset()
    """Dotted keys that a file or an option gave; no key itself."""

    def as_data(self) -> dict[str, Any]:
        """Plain data, as `RunDir.config` has it; `libra_hpc.config.load.validate` reads it."""
        data = msgspec.to_builtins(self)
        del data[GIVEN]
        return data

    def changed(self, **sections: Mapping[str, Any]) -> RunConfig:
        """With other values of some keys, by section; they are not checked again."""
        update = {name: msgspec.structs.replace(getattr(self, name), **values) for name, values in sections.items()}
        return msgspec.structs.replace(self, **update)

    @property
    def speedup(self) -> float:
        """Seconds that pass in a second of the wall clock: more than 1 in a dry run, 1 in a real run."""
        return self.simulated.speedup if self.run.engine == "simulated" else 1.0

    @property
    def steps_ahead(self) -> bool:
        """Whether engines form a step while the GPU computes the one before; beside a server's users they never do.

        vLLM's CPU platform cannot: its steps run in the thread that forms them, and it has no events to wait for.
        """
        return self.rollout.async_steps and (self.slurm.device == "cuda" or self.run.engine == "simulated")

    @property
    def engine_words(self) -> str:
        """How engines run, in a sentence."""
        rollout = self.rollout
        return (
            f"engines run {rollout.slots:,} of {rollout.most_inflight:,} turns,"
            f" {'steps' if self.steps_ahead else 'no step'} ahead;"
            f" an update {'keeps' if rollout.kv_after_update == 'keep' else 'drops'} KV caches"
        )

    @property
    def retained_batches(self) -> int:
        """Committed batches that are retained for replay: more than the steps between two snapshots."""
        return self.train.snapshot_every + 2

    @property
    def updates(self) -> int:
        """Optimizer updates of the whole run."""
        return self.run.steps * min(self.algorithm.minibatches, self.algorithm.prompts_per_step)

    @property
    def streamed(self) -> bool:
        """Whether groups are trained as they are complete, and not when the batch is."""
        return self.algorithm.eta == 0 and not self.unstreamed

    @property
    def unstreamed(self) -> str:
        """Why a synchronous run trains whole batches, in a sentence; empty: it does not."""
        count = self.algorithm.minibatches
        if self.algorithm.eta or count == 1:
            return ""
        return f"training waits for whole batches: algorithm.minibatches = {count} has updates within a batch"

    @property
    def max_open_groups(self) -> int:
        """Most admitted and untrained prompts: by the staleness bound, or by ``rollout.max_trajectories``."""
        if self.rollout.max_trajectories:
            return max(1, self.rollout.max_trajectories // self.algorithm.group_size)
        return (self.algorithm.eta + 1) * self.algorithm.prompts_per_step

    def rollout_nodes(self, component: str) -> range:
        """Positions of a component's nodes among the hybrid and rollout nodes; empty for those that never roll out.

        Train nodes that roll out are as the first one: lists of engines are refused with them.
        """
        parts, hybrid = self.components, self.components.hybrid.nodes
        nodes = {
            "train": range(int(parts.train.roll_out)),
            "hybrid": range(hybrid),
            "rollout": range(hybrid, hybrid + parts.rollout.nodes),
        }
        return nodes.get(component, range(0))

    @property
    def rollout_places(self) -> range:
        """The positions of all of them."""
        return range(max(place for name in ("train", "hybrid", "rollout") for place in self.rollout_nodes(name)) + 1)


run_config = msgspec.json.Decoder(RunConfig)
