"""The status snapshot: rank 0 writes it to `status.json` about once a second, `libra-hpc status` shows it.

Units: seconds, tokens, tokens per second; times ``*_at`` are epoch seconds.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import msgspec

from libra_hpc.protocol.plan import PlanDecision

from .estimate import StageEstimate, StepAccuracy
from .failed import FailedAttempts
from .rundir import RunDir

EndState = Literal["completed", "failed", "cancelled", "time_limit", "preempted"]
FINAL: tuple[EndState, ...] = get_args(EndState)
"""States of a run that has ended."""


class NodeStatus(msgspec.Struct, frozen=True):
    """One node (= one MPI rank, one agent)."""

    rank: int
    host: str
    component: str
    """``planner`` | ``train`` | ``hybrid`` | ``rollout``"""
    role: str
    """``planner`` | ``train`` | ``rollout`` | ``to_train`` | ``to_rollout`` | ``starting`` | ``lost`` | ``ended``"""
    engines: dict[str, str]
    """Engine id -> state (``starting`` | ``ready`` | ``standby`` | ``lost``)."""
    version: int
    """Lowest weight version of its ready engines; -1 without one."""
    heartbeat_age_s: float


class StageStatus(msgspec.Struct, frozen=True):
    """One stage's speed over the last steps."""

    tokens_per_s: float
    step_s: float
    """Seconds of this stage's own work per global batch."""
    busy: float
    """Share of the stage's node time spent working, 0..1."""
    nodes: int


class BucketStatus(msgspec.Struct, frozen=True):
    """Engines of one TP degree."""

    tp: int
    engines: int
    inflight: int
    trajectories: int
    kv_use: float


class DecisionStatus(PlanDecision, frozen=True, kw_only=True):
    """The planner's last decision."""

    at: float
    looks: int = 1
    """Evaluations in a row with this decision and reason."""


def because(reason: str, action: str) -> str:
    """The reason of a decision without the name of its action, which a screen shows beside it."""
    return reason.removeprefix(f"{action}: ")


class Status(msgspec.Struct, frozen=True):
    """All facts of the live screen."""

    run: str
    path: str
    job_id: str
    attempt: int
    state: str
    """``starting`` | ``running`` | ``restarting``, or one of `FINAL`"""
    started_at: float
    updated_at: float
    step: int
    steps: int
    version: int
    reward: float
    """Mean of the last step."""
    generation: int
    replicas: int
    train: StageStatus
    rollout: StageStatus
    open_trajectories: int
    waiting_turns: int
    tools_running: int
    ready_groups: int
    """Groups waiting to be trained."""
    staleness_mean: float
    staleness_max: int
    resubmitted: int
    trained_trajectories: int
    buckets: list[BucketStatus]
    nodes: list[NodeStatus]
    decision: DecisionStatus | None
    message: str
    estimate: StageEstimate | None = None
    """The planner's estimate of the present split."""
    accuracy: StepAccuracy | None = None
    """Accuracy of the planner's estimates for the last steps."""
    repartitioned: str = ""
    """The last repartition: after which step, by whom, and the layout."""
    notices: list[str] = []
    """Faults of the last minutes as sentences, newest first."""
    failures: list[FailedAttempts] = []
    """Failed attempts of trajectories since the ranks started, the most frequent kind first."""
    slow: list[str] = []
    """Engines that take longer per step than others of their class, as sentences, slowest first."""
    paused: str = ""
    """Why no prompt is admitted; empty while prompts are admitted."""
    waiting_for_room: int = 0
    """Of ``waiting_turns``: for room in a KV cache."""
    recomputed_tokens: int = 0
    """Context tokens that engines computed again since the ranks started."""
    evicted_tokens: int = 0
    """Of ``recomputed_tokens``: because a KV cache had lost them."""


_decoder = msgspec.json.Decoder(Status)
_encoder = msgspec.json.Encoder()


def encode_status(status: Status) -> bytes:
    """JSON bytes of a snapshot."""
    return _encoder.encode(status) + b"\n"


def decode_status(data: bytes) -> Status:
    """Parse a snapshot; raises ``msgspec.DecodeError`` for anything else."""
    try:
        return _decoder.decode(data)
    except (UnicodeDecodeError, RecursionError) as error:
        raise msgspec.DecodeError(str(error)) from None


def read_status(run: RunDir, attempt: int) -> Status | None:
    """The last snapshot of that attempt or a later one; None without one."""
    try:
        status = decode_status(run.status.read_bytes())
    except (OSError, msgspec.DecodeError):
        return None
    return status if status.attempt >= attempt else None


def as_ended(status: Status) -> Status:
    """The last snapshot of a run: a rank 0 that was killed left its nodes as they were."""
    nodes = [
        node
        if node.role == "lost"
        else msgspec.structs.replace(node, role="ended", engines={}, version=-1, heartbeat_age_s=0.0)
        for node in status.nodes
    ]
    return msgspec.structs.replace(status, nodes=nodes)


def status_dict(status: Status) -> dict[str, Any]:
    """A snapshot as a plain dictionary, for ``--json``."""
    value: dict[str, Any] = msgspec.to_builtins(status)
    return value
