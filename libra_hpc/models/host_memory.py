"""Host memory of one node, term by term, in bytes; files in /dev/shm count as memory of the job.

- Weight image of a node, in /dev/shm; on core nodes also its copy, from which a checkpoint's policy is written.
- Weight offers, also there: those kept for nodes behind this one, and one that arrives. They are as large as what
  changed, and as the image where whole tensors are sent.
- Weight staging: pinned memory from which every engine of a node copies a version to its GPUs, all parameters at once.
- Snapshots: the optimizer's state of a core node in /dev/shm, and the next one while it is written; with several core
  nodes the same of the node before it. None of the four can go earlier: a node may die before the last copy of the
  next snapshot is whole, and then the one before needs the parts of all others and the copy of its part.
- Optimizer: with ``optimizer.host`` the state of a core node, and its copy where steps have several minibatches.
- Checkpoint copy: the optimizer's state of a core node, which a thread writes, also as a snapshot.
- Reference policy, bases of adapters: weights that each training world holds once, divided over its nodes.
- Environments: what the run file gives them. Engines on CPUs: weights, caches, `CPU_LOGITS`; trainers there: `memory`.

Standbys of training and of vLLM keep nothing else in host memory.
"""

from __future__ import annotations

import msgspec

from libra_hpc.config.node_groups import Degrees, stages
from libra_hpc.config.run import RunConfig

from .devices import MIB
from .memory import MASTER_BYTES, STATE_BYTES, Limit, MemoryTerms, trained_params
from .shapes import ModelShape

KEPT_OFFERS, KEPT_WHOLE = 1, 2
"""Most sizes of the image that kept offers have (`libra_hpc.weights.offers`): older ones go beyond one size, but two
versions stay. The second counts for float32 weights, all of whose offers are whole."""
SNAPSHOTS = 2
"""Parts of a node at once: of the complete snapshot, and of the one being written (`libra_hpc.train_leader.saves`)."""
WEIGHTS = ("weight image", "weight offers")
"""Terms that every node has in /dev/shm."""
PROCESS_BYTES = 4e9
"""Least memory of a node's agent, engine processes and libraries: below it a node certainly fails."""
CPU_PROCESS_BYTES = 0.2e9, 0.7e9
"""The same where engines compute on CPUs: of the agent and its children, and of each engine (docs/log)."""

CPU_LOGITS, CPU_HEADS = 5, 2
"""Float32 copies of the logits of a step with all its sequences, and further copies of the output layer, that vLLM has
on CPUs (docs/log)."""


class NodeWork(msgspec.Struct, frozen=True):
    """What a node does with its memory."""

    rolls: bool = False
    trains: bool = False
    engines: int = 1
    """Engines of a node that rolls out."""
    slots: int = 0
    """Sequences of one at once."""
    snapshots: bool = False
    """Whether the core keeps them."""
    core_nodes: int = 0
    """Nodes that share the training state, for one of them; 0: not of the core."""
    states: int = 0
    """The optimizer's state, so many times, where it is in host memory."""
    reference: float = 0.0
    """Bytes of a reference policy, of which it holds its part."""
    elastic_nodes: int = 1
    """Nodes of its world, where it trains outside the core."""
    environment_bytes: float = 0.0
    caches: float | None = None
    """Bytes of KV caches where engines compute on CPUs; None: on GPUs."""


def node_work(config: RunConfig, name: str, reference: ModelShape | None) -> NodeWork:
    """What a node of a component does with its memory; ``reference``: the policy that it has."""
    task, environments, parts, rolls = config.task, 0.0, config.components, config.rollout_nodes(name)
    copied = config.algorithm.minibatches > 1 and parts.hybrid.nodes > 0
    # The address space is a limit, far above what most tools take: it counts where the user chose another.
    if name == [*stages(config)][-1] and task.tool_memory_mb != type(task)().tool_memory_mb:
        environments = float(task.hosts * task.tool_processes * task.tool_memory_mb * MIB)
    return NodeWork(
        reference=float(reference.weight_bytes) if reference else 0.0,
        elastic_nodes=parts.hybrid.nodes_per_replica,
        rolls=len(rolls) > 0,
        trains=name != "rollout",
        engines=max((config.rollout.on_node(node)[1] for node in rolls), default=1),
        slots=config.rollout.slots,
        snapshots=name == "train" and config.train.snapshot_every > 0,
        core_nodes=parts.train.nodes if name == "train" else 0,
        states=config.optimizer.host * (1 + copied),
        environment_bytes=environments,
    )


class HostUse(msgspec.Struct, frozen=True):
    """What a run keeps on its nodes, besides files of the model."""

    core: NodeWork = NodeWork(trains=True)
    """Work of a node of the core, however many there are."""
    rolls: NodeWork = NodeWork(rolls=True)
    """Work of a node with engines."""
    optional: bool = True
    """Whether the core may go without snapshots, where they do not fit."""


class NodeMemory(MemoryTerms, frozen=True):
    """Host memory of one node, in bytes."""

    weight_image: float
    weight_offers: float
    weight_staging: float
    snapshots: float
    optimizer: float
    checkpoint_copy: float
    reference_policy: float
    adapter_bases: float
    environments: float
    engine_weights: float
    engine_workspace: float
    KV_cache: float
    processes: float

    @property
    def shared(self) -> dict[str, float]:
        """The terms in /dev/shm."""
        return {name: size for name, size in self.terms().items() if name in (*WEIGHTS, "snapshots")}


class HostRoom(msgspec.Struct, frozen=True):
    """Bytes that a node has for the job; None: not known."""

    memory: float | None = None
    shm: float | None = None
    """Bytes of /dev/shm."""

    def limit(self, need: NodeMemory) -> Limit | None:
        """What is missing and the largest term; None when it fits, or when no size is known."""
        for what, has, terms in (("host memory", self.memory, need.terms()), ("/dev/shm", self.shm, need.shared)):
            if has is not None and (whole := sum(terms.values())) > has:
                name, size = max(terms.items(), key=lambda term: term[1])
                sizes = f"{whole / 1e9:,.0f} of {has / 1e9:,.0f} GB of {what} a node"
                return Limit(whole - has, f"{sizes}, most for {name} ({size / 1e9:,.0f} GB)")
        return None

    def least(self, other: HostRoom) -> HostRoom:
        """What a node of either kind has."""
        pairs = ((self.memory, other.memory), (self.shm, other.shm))
        return HostRoom(*(min((size for size in pair if size is not None), default=None) for pair in pairs))


def snapshot_bytes(shape: ModelShape, core_nodes: int) -> float:
    """Parts of snapshots on a node of the core, its own and those of another one."""
    nodes = 1 if core_nodes == 1 else 2
    return SNAPSHOTS * nodes * _state_bytes(shape) / core_nodes


def _state_bytes(shape: ModelShape) -> float:
    """Bytes of the optimizer's state of the whole model, or of its adapters."""
    return STATE_BYTES * (sum(trained_params(shape, Degrees(1), 0)) if shape.lora else shape.params)


def node_memory(shape: ModelShape, work: NodeWork) -> NodeMemory:
    """Memory of a node with this work."""
    state = _state_bytes(shape) / work.core_nodes if work.core_nodes else 0.0
    kept = KEPT_WHOLE if shape.dtype_bytes == MASTER_BYTES else KEPT_OFFERS
    engines, on_cpus = work.engines if work.rolls else 0, work.caches is not None
    (agent, engine), head = CPU_PROCESS_BYTES, CPU_HEADS * shape.hidden * shape.dtype_bytes
    return NodeMemory(
        weight_image=float((1 + bool(work.core_nodes)) * shape.weight_bytes),
        weight_offers=float((kept + 1) * shape.weight_bytes),
        weight_staging=float(engines * shape.weight_bytes),
        snapshots=snapshot_bytes(shape, work.core_nodes) if work.snapshots else 0.0,
        optimizer=work.states * state,
        checkpoint_copy=state,
        reference_policy=work.reference / (work.core_nodes or work.elastic_nodes),
        adapter_bases=bool(shape.lora) * shape.weight_bytes * work.trains / (work.core_nodes or work.elastic_nodes),
        environments=work.environment_bytes,
        engine_weights=float(on_cpus * engines * shape.weight_bytes),
        engine_workspace=float(on_cpus * engines * shape.vocab * (4 * CPU_LOGITS * work.slots + head)),
        KV_cache=work.caches or 0.0,
        processes=agent + engines * engine if on_cpus else PROCESS_BYTES,
    )
