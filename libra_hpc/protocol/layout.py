"""The Layout: the desired state of the whole run, which rank 0 numbers and publishes as changes.

- Of two numbers the higher one holds, however late the other one comes.
- An order is a difference: a node compares its new row with what it did (`libra_hpc.policies.pool.reconcile`).
- What a node does and has is its heartbeat and its reports.

A turn, a batch or a step stays a message of its own, because it must come exactly once.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from .engine_state import EngineKind

Drain = Literal["", "wait", "abort"]
"""Whether a node gets no more turns; ``abort``: those in flight go on elsewhere, with what they have."""


RECEIVING = ("rollout", "to_train", "serving")
"""States of nodes to which new weights are pushed: they serve, or join with them.

A node on its way to rollout, or being rebuilt, asks for them itself.
"""


class Row(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """What one node is to be."""

    state: str = ""
    """Its state in the pool, ``lost`` among them."""
    active: EngineKind | None = None
    """Which of its engines are awake; None: nobody knows any."""
    starts: int = 0
    """Starts of engines ordered so far: one that ended starts again when this grows."""
    world: int = 0
    """See `ObservedEngine.world`; trainers of an earlier one end."""
    drain: Drain = ""
    life: int = 0
    """How often it was declared lost: it drops all that it had before."""
    guest: tuple[str, tuple[str, ...], int] | None = None
    """Host, addresses and port of an agent that joined later."""
    member: bool = False
    """Whether it is in the newest membership."""


class ResumePoint(msgspec.Struct, frozen=True):
    """The state from which the attempt starts, decided once for all nodes."""

    step: int
    checkpoint: str
    """Checkpoint folder, empty at the beginning of a run."""
    low: int
    extra: tuple[int, ...]
    """Prompts below ``low`` and these are trained."""
    pid: int = 0
    """Process id of rank 0's agent: distinguishes its end from that of an earlier start."""
    snapshot: str = ""
    """Name of the snapshot to start from, which is newer than ``checkpoint``; empty: none."""
    saved_step: int = 0
    """Step of ``checkpoint``, beside a snapshot."""
    restore: dict[int, int] = {}
    """Node of the core that lost its part of the snapshot -> node that has a copy."""

    def trained(self, index: int) -> bool:
        return index < self.low or index in self.extra


class StopTraining(msgspec.Struct, frozen=True):
    """Why training saves and finishes, and after which step; 0: at once, also while its leader waits for a batch."""

    reason: str
    after: int = 0


class Layout(msgspec.Struct, tag=True, frozen=True):
    """What every node and both leaders are to be and to do."""

    number: int = 0
    rows: dict[int, Row] = {}
    """By rank; a guest that has left has none, and nobody before all are there."""
    start: ResumePoint | None = None
    """None in the Layout of an evaluation, which resumes nothing."""
    generation: int = 0
    """Newest membership: from the next step boundary on its `members` train together."""
    rest: bool = False
    """Whether the trainers of the core go into standby once they have nothing to do."""
    awaited: tuple[int, ...] = ()
    """Nodes without which no step begins until ``await_s`` after its batch came."""
    await_s: float = 0.0
    stop: StopTraining | None = None
    recorded: int = 0
    """Highest step that is in `metrics.jsonl`."""
    good_step: int = -1
    """The newest checkpoint up to this step stays whatever is saved later; -1: none has to."""

    @property
    def members(self) -> tuple[int, ...]:
        return tuple(rank for rank, row in self.rows.items() if row.member)

    @property
    def receivers(self) -> tuple[int, ...]:
        """Ranks that get new weights, to serve or to join with."""
        return tuple(rank for rank, row in self.rows.items() if row.state in RECEIVING)


class LayoutChange(msgspec.Struct, tag=True, frozen=True, omit_defaults=True):
    """How a Layout differs from one of an earlier number; a node that has that, or a later one, can take it."""

    number: int
    since: int
    """The earlier number; 0: this is the whole Layout; the same number: a repeat, with the sum alone."""
    digest: int
    """Sum over the whole Layout of ``number``."""
    rows: dict[int, Row] = {}
    gone: tuple[int, ...] = ()
    """Ranks that have no row any more."""
    head: dict[str, Any] = {}
    """Other fields of the Layout, by name."""
