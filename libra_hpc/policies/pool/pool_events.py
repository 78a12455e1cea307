"""What happens to the elastic pool, and what follows from it: events and effects of `policies.pool.states`."""

from __future__ import annotations

from typing import Literal, Union

import msgspec

Role = Literal["train", "rollout"]


class Membership(msgspec.Struct, frozen=True):
    """A numbered set of training nodes; a run starts from an empty one."""

    generation: int
    ranks: tuple[int, ...]


# Events -------------------------------------------------------------------------------------------


class MoveOrdered(msgspec.Struct, frozen=True):
    """The planner wants a hybrid node in the other role."""

    rank: int
    to: Role


class Drained(msgspec.Struct, frozen=True):
    """A node that leaves rollout has no turn in flight any more."""

    rank: int


class EngineAnswers(msgspec.Struct, frozen=True):
    """The node's engine of this kind answers."""

    rank: int
    kind: Role


class StateArrived(msgspec.Struct, frozen=True):
    """The node's training engine has the weights of the current step."""

    rank: int


class MemberOf(msgspec.Struct, frozen=True):
    """The node's training engine formed this generation's group; one of a superseded generation changes nothing."""

    rank: int
    generation: int


class EngineEnded(msgspec.Struct, frozen=True):
    """The node's engine of this kind ended unasked; the node itself lives."""

    rank: int
    kind: Role
    world: int = 0
    """Of a training engine; one of an earlier world changes nothing."""


class HeartbeatLost(msgspec.Struct, frozen=True):
    """The node is silent for too long."""

    rank: int


class Returned(msgspec.Struct, frozen=True):
    """A lost node is heard again; whatever it held is gone."""

    rank: int


Event = Union[MoveOrdered, Drained, EngineAnswers, StateArrived, MemberOf, EngineEnded, HeartbeatLost, Returned]

# Effects ------------------------------------------------------------------------------------------


class OrderStart(msgspec.Struct, frozen=True):
    """Start the node's engine of this kind, or wake it from standby."""

    rank: int
    kind: Role
    world: int = 0


class OrderEnd(msgspec.Struct, frozen=True):
    """End the node's training processes: their world has lost a part."""

    rank: int


class OrderStandby(msgspec.Struct, frozen=True):
    """Put the node's engine of this kind into warm standby."""

    rank: int
    kind: Role


class OrderDrain(msgspec.Struct, frozen=True):
    """Send no new turns to this node; report `Drained` when those in flight are answered or moved."""

    rank: int


class FormMembership(msgspec.Struct, frozen=True):
    """Form this generation at the next step boundary; members report `MemberOf`, new ones `StateArrived` too."""

    membership: Membership


Effect = Union[OrderStart, OrderEnd, OrderStandby, OrderDrain, FormMembership]
