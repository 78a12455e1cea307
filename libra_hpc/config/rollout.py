"""Sections of the run file about rollout and planning."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from .section import CodePath, FilePath, Mebibytes, ModelName, Seconds, Section, Tokens, Valid

Count = Annotated[int, Meta(ge=1, le=1024)]
PerNode = Annotated[
    Count | list[Count], Valid("an integer from 1 to 1024, or a list of them with one for each hybrid and rollout node")
]
"""One number for all nodes with engines, or a list in rank order: hybrid nodes first, then rollout nodes."""


SLOTS = 256
"""Sequences of an engine where nobody chose: vLLM's default for offline work on an A100. Half: up to 16 % slower
(docs/log); double: only where caches hold them all."""


def of_node(value: int | list[int], node: int) -> int:
    """The entry of a `PerNode` value for the ``node``-th (from 0) of the hybrid and rollout nodes."""
    return value[node] if isinstance(value, list) else value


class RolloutSection(Section, frozen=True):
    """``[rollout]``: the engines (vLLM replicas) and the scheduler that feeds them."""

    tp: PerNode = 1
    """Tensor parallelism of a node's engines. A list mixes engines of different speed: ``tp = [1, 1, 4]``."""
    engines_per_node: PerNode = 1
    """Engines of a node; a list as for ``tp``."""
    policy: CodePath = "cmlfq"
    """Scheduling policy that chooses the engine of every turn: cmlfq, least_loaded, sticky, or
    ``path/to/file.py:ClassName``; `libra-hpc simulate` compares them."""
    temperature: Annotated[float, Meta(ge=0.01, le=100)] = 1.0
    """Sampling temperature."""
    max_model_len: Annotated[Tokens, Meta(ge=16)] = 4096
    """Longest context of a trajectory. A longer episode ends by length."""
    max_num_seqs: Annotated[int, Meta(ge=0, le=65536)] = 0
    """Most sequences an engine runs at once; 0: 256."""
    max_inflight: Annotated[int, Meta(ge=0, le=65536)] = 0
    """Most turns of one engine at once; 0: half as many again as sequences, which replaces a finished turn without a
    round trip."""
    kv_cache_mb: Annotated[Mebibytes, Meta(ge=0, le=2**20)] = 0
    """KV cache per device; 0: 90 % of a GPU, less what else is there; on CPUs what ``mem`` leaves, if ``max_num_seqs``
    sequences can fill it."""
    kv_dtype: Literal["auto", "fp8"] = "auto"
    """Type of the KV caches. ``auto``: that of the weights. ``fp8``: a byte per element, so they hold twice the tokens
    of bfloat16 and a decode reads half as much; ``logprob_gap`` grows (docs/scheduler.md)."""
    async_steps: bool = True
    """Whether an engine forms a step while the GPU computes the one before, so that the GPU does not wait for the host.
    A prompt then joins a step later. Never on CPUs or beside a server's users."""
    kv_after_update: Literal["recompute", "keep"] = "recompute"
    """KV caches when an engine gets new weights. ``recompute``: all are dropped, and running turns computed again.
    ``keep``: running turns go on with theirs, and a prompt admitted later reuses none of older weights."""
    block_size: Annotated[Tokens, Meta(ge=8)] = 32
    """Length of a KV block, the unit of prefix reuse."""
    threads: Annotated[int, Meta(ge=1, le=1024)] = 1
    """CPU threads per engine process."""
    record_steps: bool = False
    """Record every engine step in the run's log folder. `libra-hpc calibrate engine --run` fits step times to these
    records."""
    max_trajectories: Annotated[int, Meta(ge=0)] = 0
    """Most trajectories open at once; 0: (eta + 1) * prompts_per_step * group_size."""

    @property
    def slots(self) -> int:
        """Most sequences of an engine at once."""
        return self.max_num_seqs or SLOTS

    @property
    def most_inflight(self) -> int:
        """Most turns of an engine at once."""
        return self.max_inflight or self.slots * 3 // 2

    def on_node(self, node: int) -> tuple[int, int]:
        """(TP, engines) of the ``node``-th (from 0) of the hybrid and rollout nodes."""
        return of_node(self.tp, node), of_node(self.engines_per_node, node)


class PlannerSection(Section, frozen=True):
    """``[planner]``: what the split is planned with before the job is queued, and when the hybrid nodes change role."""

    device: str = ""
    """GPU to plan for, and of dry runs, a name of the device table; empty: each component's ``gpu_type``."""
    devices: FilePath = ""
    """TOML file with further devices, in the form of `libra_hpc/models/devices.toml`."""
    model: ModelName = ""
    """Known model such as ``qwen3-14b`` whose shape to plan with, and of dry runs, or a Hugging Face folder, of which
    only ``config.json`` is read; empty: ``model.path``."""
    train_speed: FilePath = ""
    """Measured training speed to plan with: a file of `libra-hpc calibrate train` or an earlier run's directory. Empty:
    the speed that the cost model assumes."""
    enabled: bool = True
    """Whether the planner decides while the job runs; ``false``: no node changes its role."""
    hybrid_start: Literal["rollout", "train"] = "rollout"
    """Role of the hybrid nodes when the job starts."""
    interval_s: Annotated[Seconds, Meta(gt=0)] = 5.0
    """Time between two evaluations of the plan."""
    horizon_s: Annotated[Seconds, Meta(gt=0)] = 300.0
    """Time within which a move must pay."""
    margin: Annotated[float, Meta(ge=1)] = 1.5
    """Factor by which a move's predicted gain over the horizon must exceed its cost."""
    min_gain: Annotated[float, Meta(ge=0)] = 0.05
    """Smallest gain of a move, as a share of the present step time."""
    min_dwell_s: Annotated[Seconds, Meta(ge=0)] = 20.0
    """Shortest stay of a node in the role it moved to."""
    switch_cost_s: Annotated[Seconds, Meta(gt=0)] = 15.0
    """Assumed cost of a move, in time of the moving node, until moves were measured."""
    moves_per_hour: Annotated[int, Meta(ge=1)] = 12
    """Most node moves in any hour, whatever they promise."""
    period_s: Annotated[Seconds, Meta(gt=0)] = 600.0
    """Longest time between two evaluations, even when no measurement changed."""
    time_sharing: Literal["auto", "off"] = "off"
    """Whether hybrid nodes may serve both stages of every step. ``auto``: where the measured switches cost less
    than it saves."""
    repartition: Literal["advise", "carry_out"] = "carry_out"
    """What happens with a better layout of the core nodes. ``advise``: it is logged. ``carry_out``: the ranks restart
    in it, inside the job."""
    fewer_nodes: Literal["auto", "never"] = "auto"
    """Whether a run goes on without lost nodes, if a layout fits the others, and queues jobs for new ones."""
    fewer_after_s: Annotated[Seconds, Meta(gt=0)] = 120.0
    """Time until the status counts a silent node as lost. One of the core whose processes outlive SIGKILL by it is left
    out of the restart."""
    repartition_cost_s: Annotated[Seconds, Meta(gt=0)] = 300.0
    """Assumed cost of a repartition: a checkpoint, a restart of all ranks, and the weights to every engine."""


class SpotSection(Section, frozen=True):
    """``[borrow.spot]``: jobs of one node each that the run queues for itself while it runs, to roll out on them
    (docs/borrow.md)."""

    nodes: Annotated[int, Meta(ge=0, le=1_000)] = 0
    """Most nodes; 0: none is queued."""
    partition: str = ""
    """Slurm partition of the jobs, for instance one whose jobs are preempted; empty: that of ``components.rollout``."""
    qos: str = ""
    """Quality of service of the jobs; empty: that of ``components.rollout``, ``none``: no option."""
    time_limit: str = "01:00:00"
    """Slurm time limit of each job, after which another one is queued."""


class BorrowSection(Section, frozen=True):
    """``[borrow]``: engines that join the running job."""

    lenders: Annotated[
        Literal["any"] | list[str], Valid("'any', or a list of names of lenders such as ['gpu-017-*']")
    ] = []
    """Servers whose owners lend their GPUs, and from which the run may borrow (docs/borrow.md): ``any``, or names, in
    which ``*`` stands for any text. While the planner is enabled, only those that pay."""
    most_gpus: Annotated[int, Meta(ge=0, le=2**20)] = 0
    """Most GPUs of lenders at once; 0: no limit."""
    least_gain_s: Annotated[Seconds, Meta(ge=0)] = 0.0
    """Time that each borrowed GPU must save over the remaining steps, beside the start of its engines."""
    spot: SpotSection = SpotSection()
