"""Between the owner of a run and its ranks: what a start is given, what rank 0 leaves of its end, and the messages."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Literal, Union

import msgspec

from .codec import Codec

START = "LIBRA_HPC_START"
"""Environment variable of the ranks with a `RanksStart` as JSON."""
JOB_END, KILL_WAIT = "LIBRA_HPC_JOB_END", "LIBRA_HPC_KILL_WAIT"
"""Environment variables of the ranks: the job's end, and the seconds between Slurm's SIGTERM and SIGKILL."""
OUTPUT, OUTPUT_FD = "LIBRA_HPC_OUTPUT_FD", 3
"""Environment variable of the ranks with the file descriptor of Slurm's own output, and that descriptor.  Without the
variable a rank has none."""

Why = Literal[
    "completed",
    "time_limit",
    "cancelled",
    "paused",
    "broken",
    "storage",
    "repartition",
    "lost",
    "defect",
    "fatal",
    "orphaned",
    "taken",
    "unmet",
]
STATES: dict[Why, str] = {
    "completed": "completed",
    "time_limit": "time_limit",
    "cancelled": "cancelled",
    "paused": "paused",
    "broken": "failed",
    "storage": "failed",
    "repartition": "restarting",
    "lost": "restarting",
    "defect": "restarting",
    "fatal": "failed",
    "orphaned": "failed",
    "taken": "failed",
    "unmet": "restarting",
}
"""State that the last status of rank 0 has, by why it ends."""


class FewerNodes(msgspec.Struct, frozen=True):
    """A layout of the ranks for the nodes that are left of a job; without changes there is none."""

    sentence: str = ""
    """How the run goes on with them, or why it cannot."""
    changes: dict[str, Any] = {}
    """Run-file values, by dotted key."""
    nodes: tuple[int, ...] = ()
    """Nodes with a rank, by component of the job."""


class RanksStart(msgspec.Struct, frozen=True):
    """What one start of all ranks is given."""

    nonce: str = ""
    """Nonce of the owner's lease; empty: there is no owner."""
    generation: int = 0
    """Generation of the owner's lease."""
    restarts: int = 0
    """Restarts of this attempt after a loss."""
    reason: str = ""
    """Why this is a restart; empty for a first start and after a repartition."""
    last: bool = False
    """No restart is left after this start."""
    spare: int = 0
    """Nodes of the job that have no rank; negative where some are missing."""
    met: bool = False
    """The ranks of this run have met before."""
    fewer: FewerNodes = FewerNodes()
    """What this start has instead of the configuration's layout."""


class RanksStop(msgspec.Struct, frozen=True):
    """Why rank 0 ended all ranks."""

    why: Why
    """``paused``, ``broken``: learning broke; people are to look, or it ends.  ``storage``: the run directory takes no
    writes.  ``lost``: a part that the others cannot go on without.  ``defect``: an exception in an agent.
    ``orphaned``: there is no owner.  ``taken``: another owner has the run.  ``unmet``: the ranks cannot go on together,
    which is a mistake of the user only at the first start of a run."""
    sentence: str
    step: int


_start, ranks_stop, fewer_layout = (
    msgspec.json.Decoder(RanksStart),
    msgspec.json.Decoder(RanksStop),
    msgspec.json.Decoder(FewerNodes),
)


class RankJoined(msgspec.Struct, tag=True, frozen=True):
    """Rank -> owner: its process is there."""

    rank: int
    node: str
    """Slurm's name."""


class RanksMet(msgspec.Struct, tag=True, frozen=True):
    """Rank 0 -> owner: all ranks are in one world."""


class ProcessLost(msgspec.Struct, tag=True, frozen=True):
    """Owner -> ranks: the process of one has ended."""

    rank: int
    reason: str
    """Why Slurm set its node down; empty: Slurm did not."""


class RankRecord(msgspec.Struct, tag=True, frozen=True):
    """Rank -> owner: what it has the others know in this round of the meeting."""

    record: bytes


class RankRecords(msgspec.Struct, tag=True, frozen=True):
    """Owner -> ranks: the records of all, in rank order."""

    packed: bytes
    """`rank_records`, compressed once for all ranks."""


LinkMessage = Union[RankJoined, RankRecord, RankRecords, RanksMet, ProcessLost]
owner_link: Codec[LinkMessage] = Codec(LinkMessage)
rank_records: Codec[list[bytes]] = Codec(list[bytes])


def start_of(environ: Mapping[str, str] = os.environ) -> RanksStart:
    """What this start was given."""
    return _start.decode(environ.get(START, "{}"))
