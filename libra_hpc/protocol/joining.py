"""A guest: an agent that was not there when the ranks started, and joins the running job.

It calls rank 0, proves that it has the secret of the run's record (`DoorRecord`), sends `JoinWanted` and gets
`Admitted` or `NotAdmitted`. From then on it is an agent of the mesh, with a rank outside the layout of the run's own.
Before, one without the run's folder asks for the configuration (`ConfigWanted`).
"""

from __future__ import annotations

from typing import Annotated, Any, Union

import msgspec

from .callers import proof
from .codec import Codec

FIRST_GUEST = 10_000
"""Ranks from here on are guests: far more than a job has nodes."""
AT_THE_DOOR = 0xFFFFFFFF
"""Rank in the proof of a caller that has none yet."""
RANKS_OF_A_START = 1_000
"""Guests of one start of the ranks, at most: their ranks are reserved before the first one, so that none is used twice.
"""


class DoorRecord(msgspec.Struct, frozen=True):
    """How to join: a file of mode 0600 in the run directory, written at each start of the ranks."""

    attempt: int
    host: str
    """Host of rank 0."""
    addresses: tuple[str, ...]
    port: int
    secret: str
    """Hexadecimal; of guests alone, so that none can pose as a rank of the run."""
    code: str
    """`code_stamp` of the run."""
    model: str
    """Checksum of the model's config.json; empty in a dry run."""
    next_rank: int
    """The first rank that no start has reserved."""
    open: bool = True
    """Whether the ranks of its start still run, as far as rank 0 could write it."""


door_record = msgspec.json.Decoder(DoorRecord)


Offer = tuple[Annotated[int, msgspec.Meta(ge=0)], Annotated[int, msgspec.Meta(ge=1)]]
"""A lender -> rank 0, in a file that it renews: GPUs of an engine (0: as on a node of the run), and engines."""
GONE_S = 15.0
"""Three renewals of an offer, or of a lender's record: without one for so long, there is none."""


class ConfigWanted(msgspec.Struct, tag=True, frozen=True):
    """Caller -> rank 0: show the run's configuration, answered by `ConfigShown`."""


class ConfigShown(msgspec.Struct, tag=True, frozen=True):
    """Rank 0 -> caller: the run's configuration, by section, without what may be a secret."""

    sections: dict[str, Any]


class JoinWanted(msgspec.Struct, tag=True, frozen=True):
    """Caller -> rank 0: take this agent in, which listens there."""

    host: str
    addresses: tuple[str, ...]
    port: int


class Admitted(msgspec.Struct, tag=True, frozen=True):
    """Rank 0 -> caller: its rank, and where the ranks of the run listen: (host, addresses, port)."""

    rank: int
    ranks: tuple[tuple[str, tuple[str, ...], int], ...]


class NotAdmitted(msgspec.Struct, tag=True, frozen=True):
    """Rank 0 -> caller: it takes no guest."""

    reason: str


JoinMessage = Union[ConfigWanted, ConfigShown, JoinWanted, Admitted, NotAdmitted]
door: Codec[JoinMessage] = Codec(JoinMessage)


def guest_secret(secret: bytes) -> bytes:
    """What guests prove themselves with, made of the run's secret, which it does not give away."""
    return proof(secret, b"guests")


def is_guest(rank: int) -> bool:
    return rank >= FIRST_GUEST
