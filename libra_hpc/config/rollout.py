"""Sections about rollout and planning."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from .base import Section

Count = Annotated[int, Field(ge=1)]


def _one_or_each(value: Any) -> str:
    return "each" if isinstance(value, list) else "one"


PerNode = Annotated[Annotated[Count, Tag("one")] | Annotated[list[Count], Tag("each")], Discriminator(_one_or_each)]
"""One number for every node that can run engines, or a list with one for each of them in rank order: the hybrid nodes first, then the rollout nodes."""
PER_NODE = "an integer >= 1, or a list of them with one for each hybrid and rollout node"


def of_node(value: int | list[int], node: int) -> int:
    """The entry of a `PerNode` value for the ``node``-th (from 0) of the hybrid and rollout nodes."""
    return value[node] if isinstance(value, list) else value


class RolloutSection(Section):
    """``[rollout]``: vLLM replicas and the scheduler that feeds them."""

    tp: PerNode = Field(1, description=PER_NODE)
    """Tensor parallelism of a node's engines.  A list gives TP classes of different speed: ``tp = [1, 1, 4]``."""
    engines_per_node: PerNode = Field(1, description=PER_NODE)
    """Engines of a node; a list as for ``tp``."""
    policy: str = "cmlfq"
    """Scheduling policy, a name of `libra_hpc.sched.registry`."""
    temperature: float = Field(1.0, gt=0)
    max_model_len: int = Field(4096, ge=16)
    """Longest context of a trajectory in tokens; a longer episode ends by length."""
    max_num_seqs: int = Field(64, ge=1)
    """Most sequences an engine runs at once."""
    max_inflight: int = Field(96, ge=1)
    """Most turns the leader keeps at one engine; somewhat more than ``max_num_seqs``, so that a finished turn's place is taken without a round trip."""
    kv_cache_mb: int = Field(0, ge=0)
    """KV cache per device in MiB; 0: what vLLM takes by default (90 % of the device)."""
    block_size: int = Field(32, ge=8)
    """KV block in tokens: the grain of prefix reuse."""
    threads: int = Field(1, ge=1)
    """CPU threads per engine process."""
    record_steps: bool = False
    """Note every engine step in the run's log folder: `libra-hpc calibrate --run` fits step times to them."""
    warm_start: str = ""
    """A run directory or `trajectories.jsonl` whose trajectories the scheduling policy learns from before the first turn; earlier attempts of the run itself
    always count."""
    max_trajectories: int = Field(0, ge=0)
    """Most trajectories open at once; 0: (eta + 1) * prompts_per_step * group_size."""

    def on_node(self, node: int) -> tuple[int, int]:
        """(TP, engines) of the ``node``-th (from 0) of the hybrid and rollout nodes."""
        return of_node(self.tp, node), of_node(self.engines_per_node, node)


class PlannerSection(Section):
    """``[planner]``: what the split is planned with before the job is queued, and when the hybrid nodes change role."""

    device: str = ""
    """GPU to plan for; empty: each component's ``gpu_type``."""
    devices: str = ""
    """TOML file with further devices, in the form of `libra_hpc/hardware/devices.toml`."""
    model: str = ""
    """Known model whose shape to plan with; empty: ``model.path``."""
    trace: str = ""
    """A run directory or trajectories whose lengths to plan for; empty: an assumed log-normal distribution."""
    enabled: bool = True
    hybrid_start: Literal["rollout", "train"] = "rollout"
    """Role of the hybrid nodes when the job starts."""
    interval_s: float = Field(5.0, gt=0)
    """Seconds between two looks at the plan."""
    horizon_s: float = Field(300.0, gt=0)
    """Seconds over which a move must pay."""
    margin: float = Field(1.5, ge=1)
    """A move's predicted gain over the horizon must exceed its cost by this factor."""
    min_gain: float = Field(0.05, ge=0)
    """... and be at least this share of the present step time."""
    min_dwell_s: float = Field(20.0, ge=0)
    """A node that moved stays at least this long."""
    switch_cost_s: float = Field(15.0, gt=0)
    """Prior of a move's cost in seconds of the moving node; replaced by measured moves."""
    moves_per_hour: int = Field(12, ge=1)
    """Most node moves in any hour, whatever they promise."""
    period_s: float = Field(600.0, gt=0)
    """The plan is looked at this often even when nothing asks for it."""
    repartition: Literal["advise", "carry_out"] = "carry_out"
    """What is done with a better layout of the core nodes: logged, or the ranks are started again in it, inside the job."""
    repartition_cost_s: float = Field(300.0, gt=0)
    """What laying out the core nodes anew costs: a checkpoint, a new start of all ranks, and the weights to every engine."""
