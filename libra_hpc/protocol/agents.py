"""Agent <-> agent: the closed union of all messages between nodes.

The *coordinator* is rank 0, the *train leader* the lowest rank of component ``train``, the *rollout leader* the
lowest rank of component ``rollout``. Every node has an *agent*.
"""

from __future__ import annotations

from typing import Union

import msgspec

from .carriers import Peer, Publish
from .codec import Codec
from .engine import Abort, Generate, Generated
from .engine_state import EngineStats, LenderKind, ObservedEngine, StepCosts
from .env import FromHost, HostLost, ToHost
from .layout import LayoutChange
from .plan import GroupFact, TrajectoryFact
from .trainer import FromWorker, Offered, Sample, ToWorker


class MpiStart(msgspec.Struct, tag=True, frozen=True):
    """Coordinator -> agents: replace your MPI process by one of a new world, with those of these ranks."""

    world: int
    members: tuple[int, ...]


class MpiBarrier(msgspec.Struct, tag=True, frozen=True):
    """Agent -> coordinator: its MPI process is in a barrier of its start.  Back, through other agents: all are.

    Going out it has what that process put for the others, coming back what all have put.
    """

    world: int
    values: tuple[bytes, ...]
    """See `KeyValueSpace.put`."""
    rank: int = -1
    """The agent's, in what it sends."""


class MemberJoined(msgspec.Struct, array_like=True, frozen=True):
    """The rank is a member of the generation and has the weights of ``step``."""

    rank: int
    generation: int
    step: int
    received_bytes: int
    seconds: float
    source: str = ""
    """See `Joined.source`."""


class TrainReport(msgspec.Struct, frozen=True):
    """What the train leader does beside its steps."""

    saving: bool = False
    """Whether a checkpoint is being written."""
    save_s: float = 0.0
    """Seconds of the newest complete checkpoint; 0: this start has none."""
    core_wanted: bool = False
    """Whether there is something to do for the core, whose trainers are in standby."""
    done: int | None = None
    """The last step, once it is committed and saved."""
    joined: tuple[MemberJoined, ...] = ()
    """Members of the newest generation that was formed."""


class Heartbeat(msgspec.Struct, tag=True, frozen=True):
    """Agent -> coordinator, once a second, and at once for a new row or where an engine has changed.

    Those with engines go to both leaders, too.  The first one is its first sign of life.
    """

    rank: int
    role: str
    engines: dict[str, ObservedEngine]
    """What has changed since the heartbeat before, in some heartbeats all of them."""
    version: int
    unreachable: tuple[int, ...] = ()
    """Ranks to which this one's connection broke."""
    life: int = 0
    """See `Row.life`: it has ended all that it had in earlier ones."""
    host: str = ""
    pid: int = 0
    layout: int = 0
    """Number of the newest Layout it has."""
    by_mpi: bool = False
    """Whether MPI brought that."""
    ended_world: int = -1
    """The newest world of MPI processes of which its own has ended."""
    drained: dict[int, int] = {}
    """The rollout leader's: nodes without a turn in flight -> `Row.starts` with which they were to drain."""
    training: TrainReport | None = None
    """The train leader's."""
    lender: tuple[str, LenderKind] = ("", "idle")
    """Whose a guest's engines are."""
    leaving: str = ""
    """Why this guest wants to leave, once its turns go on elsewhere; answered by `StopAgent`."""
    returns: bool = False
    """Whether it stays in standby instead, until it leaves no more; answered by its row in the Layout."""


class Log(msgspec.Struct, tag=True, frozen=True):
    """Any -> coordinator: one record for the event log."""

    kind: str
    t: float
    fields: dict[str, Union[str, int, float, bool, list[int], dict[str, float]]]


class StopAgent(msgspec.Struct, tag="MeshStop", frozen=True):
    """Coordinator -> all: end engines and exit."""

    reason: str
    restart: bool = False
    """All ranks start again: snapshots stay."""


class Fatal(msgspec.Struct, tag=True, frozen=True):
    """Any -> coordinator: the run cannot go on."""

    rank: int
    reason: str
    restart: bool = False
    """All ranks may restart from the newest checkpoint, if a restart is left."""
    defect: bool = False
    """The same, for an exception in an agent: not when it comes again at the same step."""


# --- training ---


class ToReplica(msgspec.Struct, tag=True, frozen=True):
    """Train leader -> train or hybrid node: a message for all its training processes."""

    message: ToWorker


class WeightsOffered(msgspec.Struct, tag=True, frozen=True):
    """Every process of the node has written its offer of a version."""

    offers: tuple[Offered, ...]


class FromReplica(msgspec.Struct, tag=True, frozen=True):
    """Train node -> train leader: local rank 0's answer, once all processes have answered, or the agent's own."""

    rank: int
    message: FromWorker | WeightsOffered


class SnapshotPart(msgspec.Struct, tag=True, frozen=True):
    """Train node -> train node: node ``part_of``'s part of a snapshot can be pulled from the carrier ``peer``.

    To this node, which lost it, or to the node that is to have a copy.
    """

    part_of: int
    name: str
    peer: Peer | None = None
    """None: the node lost it, and asks the one that has a copy."""


class StepReport(msgspec.Struct, tag=True, frozen=True):
    """Train leader -> coordinator: one committed step."""

    step: int
    metrics: dict[str, float]
    """Columns of ``metrics.jsonl`` (`libra_hpc.facts.columns`); one that was not measured is left out."""
    t: float = 0.0
    """Epoch seconds of the commit."""


# --- experience ---


class Group(msgspec.Struct, frozen=True):
    """All trajectories of one prompt, with their advantages within the group."""

    index: int
    samples: tuple[Sample, ...]


class GroupDone(msgspec.Struct, tag=True, frozen=True):
    """Rollout leader -> train leader, ahead of the batch: a group of ``step`` is complete.

    It has no samples where its prompt was given up, or where another group takes its place.
    """

    step: int
    group: Group


class Batch(msgspec.Struct, tag=True, frozen=True):
    """Rollout leader -> train leader: the global batch of one step, sent once."""

    step: int
    groups: tuple[Group, ...]
    stats: dict[str, float]
    """`libra_hpc.facts.columns.BATCH`, and the means of the task's own numbers."""
    given_up: tuple[int, ...] = ()
    """Prompts whose samples all failed, or whose groups others replaced: they count as trained with this batch."""


class Committed(msgspec.Struct, tag=True, frozen=True):
    """Train leader -> rollout leader: ``step`` is trained; drop these groups."""

    step: int
    indices: tuple[int, ...]
    """Prompts of the batch, including those it gave up."""
    engine_gaps: dict[int, tuple[float, int]] = {}
    """See `StepDone.engine_gaps`."""


class ExpertsWanted(msgspec.Struct, tag=True, frozen=True):
    """Train node -> rollout leader: the experts of samples that ``rank`` is about to train."""

    rank: int
    samples: tuple[str, ...]
    """`Sample.uid` of each."""


class SampleExperts(msgspec.Struct, tag=True, frozen=True):
    """Rollout leader -> train node, for each sample of an `ExpertsWanted`."""

    sample: str
    experts: bytes
    """See `Sample.experts`; empty: lost."""


# --- rollout ---


class WrongEngine(msgspec.Struct, tag=True, frozen=True):
    """End an engine that computes wrongly; its turns are elsewhere already."""

    reason: str
    closed: bool
    """Whether no other is started in its place."""


class Turns(msgspec.Struct, tag=True, frozen=True):
    """Rollout leader -> rollout node."""

    items: tuple[tuple[str, Generate | Abort | WrongEngine], ...]
    """(engine, what it is to do)"""


class TurnsDone(msgspec.Struct, tag=True, frozen=True):
    """Rollout node -> rollout leader."""

    items: tuple[tuple[str, Generated], ...]


class EngineLoads(msgspec.Struct, tag=True, frozen=True):
    """Rollout node -> rollout leader: what has changed, by engine."""

    loads: dict[str, EngineStats]


class ToEnvHost(msgspec.Struct, tag=True, frozen=True):
    """Rollout leader -> environment node."""

    host: int
    message: ToHost


class FromEnvHost(msgspec.Struct, tag=True, frozen=True):
    """Environment node -> rollout leader."""

    rank: int
    host: int
    message: FromHost | HostLost


class LenderReport(msgspec.Struct, frozen=True):
    """What a lender or a guest gave since the ranks started, with all engines that it had."""

    name: str
    kind: LenderKind
    engines: int
    """Present ones."""
    share: float
    """Share of the last minutes in which these can step; 0 without one."""
    mean_share: float
    """Over all its time."""
    turns: int
    """Answered ones, with those that went on elsewhere."""
    tokens: int
    """Generated."""
    paused: dict[str, float] = {}
    """Seconds of engines by the gate's reason."""
    now: str = ""
    """Why it is paused now; empty: it is not."""


class RolloutReport(msgspec.Struct, tag=True, frozen=True):
    """Rollout leader -> coordinator, once a second."""

    open_trajectories: int = 0
    waiting_turns: int = 0
    inflight: int = 0
    tools_running: int = 0
    ready_groups: int = 0
    outstanding_groups: int = 0
    resubmitted: int = 0
    joint_version: int = 0
    """Newest weights that every live engine of the run had."""
    generated_tokens: int = 0
    prefilled_tokens: int = 0
    """``generated_tokens`` and what follows, to ``buckets``, is without the engines of guests."""
    busy_s: float = 0.0
    """Busy seconds of all engines since the start."""
    buckets: tuple[tuple[int, int, int, int, float], ...] = ()
    """(tp, engines, in flight, trajectories, KV use)"""
    lengths: tuple[TrajectoryFact, ...] = ()
    """Finished ones since the last report, by their prompts; rank 0 numbers them."""
    open_groups: tuple[GroupFact, ...] = ()
    failures: tuple[tuple[str, int, str], ...] = ()
    """(kind, failed attempts since the start, last error), most frequent first."""
    paused: str = ""
    """Why no prompt is admitted now, as a sentence; else empty."""
    waiting_for_room: int = 0
    """Turns out of ``waiting_turns`` that wait for room in a KV cache."""
    recomputed_tokens: int = 0
    """Context tokens computed again since the start."""
    evicted_tokens: int = 0
    """Tokens out of ``recomputed_tokens`` that a KV cache had lost."""
    slow: tuple[tuple[str, int, float, float], ...] = ()
    """(engine, rank, its time per step over that of its class, since which epoch second), slowest first."""
    guest_tokens: int = 0
    """Generated by the engines of guests since the start."""
    lenders: tuple[LenderReport, ...] = ()
    lent_gpus: float = 0.0
    """GPUs of the guests' engines that take turns, each by its share of the time."""
    composed: int = 0
    """Newest step whose batch was sent."""
    running: tuple[tuple[int, int], ...] = ()
    """(rank, turns in flight) of the run's nodes."""
    step_costs: tuple[StepCosts, ...] = ()
    """See `PlanSnapshot.step_costs`."""
    environments: str = ""
    """How environments hold up the engines, as a sentence; empty: they do not."""
    evaluates: bool = False
    """Whether an evaluation goes on, or the last step is still to be evaluated."""


# --- weights ---


class WeightsWanted(msgspec.Struct, tag=True, frozen=True):
    """Rollout node -> train leader: `Publish` to ``rank`` again what is newer than ``have``, if anything is."""

    rank: int
    have: int


class WeightsCurrent(msgspec.Struct, tag=True, frozen=True):
    """Train leader -> rollout node: ``version`` is the newest there is."""

    version: int


class WeightsHere(msgspec.Struct, tag=True, frozen=True):
    """Agent -> train leader: ``version`` is whole on its node."""

    rank: int
    version: int = -1
    bytes: int = 0
    wire_s: float = 0.0
    """See `VersionHere.wire_s`."""
    carrier: Peer | None = None
    """The node's carrier has started there, and has no weights."""


MeshMessage = Union[
    MpiStart,
    MpiBarrier,
    Heartbeat,
    LayoutChange,
    Log,
    StopAgent,
    Fatal,
    ToReplica,
    FromReplica,
    SnapshotPart,
    StepReport,
    GroupDone,
    Batch,
    Committed,
    ExpertsWanted,
    SampleExperts,
    Turns,
    TurnsDone,
    EngineLoads,
    ToEnvHost,
    FromEnvHost,
    RolloutReport,
    Publish,
    WeightsWanted,
    WeightsCurrent,
    WeightsHere,
]

mesh: Codec[MeshMessage] = Codec(MeshMessage)
