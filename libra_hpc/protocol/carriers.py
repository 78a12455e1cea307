"""Agent <-> carrier: the process of a node that moves new weights between nodes and holds the node's image.

The train leader's `Publish` names the version, who offers it, and the node's part of the chain of nodes that it passes.
Agents hand it to their carriers as it is.
"""

from __future__ import annotations

from typing import Union

import msgspec

from .codec import Codec
from .engine_state import Doing


class Peer(msgspec.Struct, frozen=True):
    """The carrier of a node: addresses in order of trial, all with one port."""

    rank: int
    addresses: tuple[str, ...]
    port: int
    place: str = ""
    """Switches from the network's top down to its host, as Slurm names them; those nearby begin with the same words."""


class Publish(msgspec.Struct, tag=True, frozen=True):
    """Train leader -> every node of the chain, agent -> carrier: these offers are ``version``."""

    version: int
    base: int
    """The version that it changes; -1: whole tensors, nothing is needed before."""
    writers: tuple[tuple[str, int], ...]
    """(name of the process, its node) of every offer."""
    chain: tuple[Peer, ...]
    """The node's part: it pulls from the nearest before it. Nodes of the core, which have all offers, come first."""


class Engines(msgspec.Struct, tag=True, frozen=True):
    """Agent -> carrier: every live engine of the node has ``version``, so its offer is of no use to them."""

    version: int | None
    """None: the node has no live engine."""


class SavePolicy(msgspec.Struct, tag=True, frozen=True):
    """Agent -> carrier: write the weights of ``version`` to ``path``, for a checkpoint.

    The image gets no newer version before they are copied aside. Answered by `PolicySaved`, at once if another order
    comes while it waits for the version.
    """

    version: int
    """-1: none is needed any more."""
    path: str


class PullPart(msgspec.Struct, tag=True, frozen=True):
    """Agent -> carrier: get a part of a snapshot of another node into the folder ``target``; `PartPulled` answers."""

    peer: Peer
    source: str
    """Its name there, as in `libra_hpc.weights.parts`."""
    target: str


class CarrierReady(msgspec.Struct, tag=True, frozen=True):
    """Carrier -> agent, once: it serves at ``port``."""

    port: int


class VersionHere(msgspec.Struct, tag=True, frozen=True):
    """Carrier -> agent: all pieces of ``version`` are on this node and intact; ``files`` are the manifests.

    Without files it is an image of other nodes, whose blocks may have newer versions, too.
    """

    version: int
    base: int
    files: tuple[str, ...]
    bytes: int
    wire_s: float
    """From the first request for it to its last byte; 0.0 for what was written on this node."""


class ImageHere(msgspec.Struct, tag=True, frozen=True):
    """Carrier -> agent: the image has ``version``."""

    version: int
    seconds: float
    """For which it was written."""


class PieceRefused(msgspec.Struct, tag=True, frozen=True):
    """Carrier -> agent: a piece or manifest was not what was offered; it is asked for again at its writer."""

    version: int
    writer: str
    reason: str
    own: bool = False
    """The writer is of this node, so the trainers have to offer the version again."""


class Stalled(msgspec.Struct, tag=True, frozen=True):
    """Carrier -> agent: no node of the chain sends more of an offer; it asks them again."""

    version: int
    writer: str
    received: int
    reason: str


class NotStored(msgspec.Struct, tag=True, frozen=True):
    """Carrier -> agent: there is no room for an offer or the image; it tries again."""

    version: int
    reason: str


class PolicySaved(msgspec.Struct, tag=True, frozen=True):
    """Carrier -> agent: ``path`` has the weights that were asked for, and is durable."""

    path: str
    size: int = 0
    crc32: int = 0
    reason: str = ""
    """Why it has not, and there is no such file; empty: it has."""


class PartPulled(msgspec.Struct, tag=True, frozen=True):
    """Carrier -> agent: ``target`` has what the other node had."""

    target: str
    reason: str = ""
    """Why it has not; empty: it has."""


ToCarrier = Union[Publish, Engines, SavePolicy, PullPart]
FromCarrier = Union[
    CarrierReady, VersionHere, ImageHere, PieceRefused, Stalled, NotStored, PolicySaved, PartPulled, Doing
]

to_carrier: Codec[ToCarrier] = Codec(ToCarrier)
from_carrier: Codec[FromCarrier] = Codec(FromCarrier)
