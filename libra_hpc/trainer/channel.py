"""One process's connections to the processes with the same parameters in the core and in all elastic replicas.

A process has one `Channel` for what its tensor and pipeline coordinate decides and, in a model with experts, one for
its experts. A connected channel is a *bare* process group, outside torch's global state; aborting it wakes waiting
peers. A group that was parked connects the same processes again. All methods raise `RuntimeError` when a member is
missing, died or was late, or a newer order came.

Sends and receives are all-to-all operations of the group: one communicator, however many pairs of ranks. They and the
sums move copies of at most `CHUNK` elements, the memory beyond weights and gradients: an operation that was given up
may still write to its tensors.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from .device import Store, bare_group, end_groups, file_store, wait
from .exchange import GroupMembers, Transfer, join_transfers, owned, parts, rounds, step_transfers

CHUNK = 1 << 24
"""Elements of a rank in one operation (64 MiB of float32). Smaller ones show latency."""
ANNOUNCE_POLL_S = 0.05
"""Most seconds between two reads of the announcements on the shared file system; the first pause is a 32nd of it."""
PARKED = 2
"""Groups kept for members that meet again. NCCL makes one in seconds, and it has device memory. Half: two memberships
that alternate make theirs each time; double: more of that memory."""


class ConnectedGroup(NamedTuple):
    """A connected membership."""

    name: str
    """Unlike that of any other."""
    members: GroupMembers
    rank: int
    all: Any
    """Group of all members."""
    siblings: Any = None
    """Group of the same copy in all replicas, where there are several; else None."""


class Channel:
    def __init__(
        self,
        buckets: list[Any],
        label: str,
        core: int,
        *,
        copies: int,
        copy: int,
        elastic: bool,
        device: torch.device,
        timeout_s: float,
        interrupted: Callable[[], bool],
    ) -> None:
        """``buckets`` are Megatron-Core's, with the same parameters in all processes of the same ``label``.

        ``core``: copies in the core. ``copies``, ``copy``: of them in this world, and which one this is. ``elastic``:
        this world has no optimizer. ``timeout_s``: longest operation. ``interrupted``: whether a newer order came.
        """
        self._interrupted = interrupted
        self._buckets, self._label, self._device, self._timeout_s = buckets, label, device, timeout_s
        self._core, self._copies, self._copy, self._elastic = core, copies, copy, elastic
        self._sizes = [int(bucket.numel_unpadded) for bucket in buckets]
        self._members = GroupMembers(core, copies, 0)
        self._rank = self._replica = 0
        self._store: Store | None = None
        self._path = ""
        self._group: ConnectedGroup | None = None
        self._parked: dict[str, ConnectedGroup] = {}
        """By ticket, the one that was parked last at the end."""
        self._done = 0
        """Operations over all members that this process has completed in the present group."""

    @property
    def connected(self) -> bool:
        return self._group is not None

    # --- membership ---

    def announce(self, path: str, copies: int, replicas: int, replica: int) -> None:
        """Announce this process to the others; ``copies`` in each of the ``replicas``, of which this is ``replica``."""
        self._members, self._replica = GroupMembers(self._core, copies, replicas), replica
        self._rank = self._members.rank(replica, self._copy) if self._elastic else self._copy
        self._path = f"{path}.{self._label}"
        self._store = file_store(self._path, self._members.size)
        here = (self._members, self._rank)
        fitting = [ticket for ticket, group in self._parked.items() if (group.members, group.rank) == here]
        self._store.set(_member(self._rank), "\n".join(["here", *fitting]))

    def assemble(self, deadline: float) -> None:
        """Wait until all are announced, or ``deadline`` (monotonic), or a newer order came."""
        assert self._store is not None
        names = [_member(rank) for rank in range(self._members.size)]
        pause = ANNOUNCE_POLL_S / 32
        while True:
            # Also when all are there: members with the newer order leave, and the connect would wait for them.
            if self._interrupted():
                raise RuntimeError("a newer order came")
            if self._store.check(names):
                return
            if time.monotonic() > deadline:
                missing = [rank for rank, name in enumerate(names) if not self._store.check([name])]
                raise RuntimeError(f"members {missing} of {len(names)} did not appear in time")
            time.sleep(pause)
            pause = min(2 * pause, ANNOUNCE_POLL_S)

    def connect(self, timeout_s: float, counters: tuple[int, int]) -> list[tuple[int, int]]:
        """Connect the announced members, by a group that all of them have parked, or a new one.

        Returns the ``counters`` of each rank.
        """
        members = self._members
        self._group = self._taken()
        if self._group is None:
            self._make(timeout_s)
        mine = torch.tensor(counters, dtype=torch.int64, device=self._device)
        everyone = [torch.empty_like(mine) for _ in range(members.size)]
        self._finish(self._connected.all.allgather([everyone], [mine]), timeout_s)
        return [(int(first), int(second)) for first, second in everyone]

    def _taken(self) -> ConnectedGroup | None:
        """The group that all members have parked in the same state."""
        assert self._store is not None
        tickets = [self._store.get(_member(rank)).decode().splitlines()[1:] for rank in range(self._members.size)]
        ticket = max(set(tickets[0]).intersection(*tickets), default="")
        if not ticket:
            return None
        self._done = int(ticket.rpartition(" ")[2])
        return self._parked.pop(ticket)

    def _make(self, timeout_s: float) -> None:
        members, self._done = self._members, 0
        everyone = bare_group(self._device, self._store, self._rank, members.size, timeout_s)
        self._group = ConnectedGroup(self._path, members, self._rank, everyone)
        if self._elastic and members.replicas > 1:
            store = file_store(f"{self._path}-copy{self._copy}", members.replicas)
            siblings = bare_group(self._device, store, self._replica, members.replicas, timeout_s)
            self._group = self._group._replace(siblings=siblings)

    def park(self) -> None:
        """Leave a group that works: the same members may meet again."""
        if self._group is not None:
            # Members that have not completed the same operations have other tickets.
            self._parked[f"{self._group.name} {self._done}"] = self._group
            self._group = self._store = None
        while len(self._parked) > PARKED:
            _end([self._parked.pop(next(iter(self._parked)))])

    def leave(self) -> None:
        """Leave a group for good, which wakes peers that wait."""
        groups = [] if self._group is None else [self._group]
        self._group = self._store = None
        _end(groups)

    # --- exchanges ---

    def reduce(self) -> None:
        """Add the replicas' gradients to those of the core."""
        gradients = [bucket.grad_data for bucket in self._buckets]
        siblings = self._connected.siblings
        if siblings is not None:
            self._among_replicas(gradients, siblings.reduce, dist.ReduceOptions())
        plan = step_transfers(self._sizes, self._members, CHUNK)
        for own, received in self._exchange(plan, gradients, to_core=True):
            own += received

    def add(self, sums: torch.Tensor) -> None:
        """Add the sums of every process of the replicas to those of the first copy."""
        total = sums.clone() if self._elastic or self._rank == 0 else torch.zeros_like(sums)
        self._finish(self._connected.all.reduce([total], dist.ReduceOptions()))
        if self._rank == 0:
            sums.copy_(total)

    def spread_weights(self) -> None:
        """Give every process of the replicas its piece of the core's weights."""
        self._move_weights(step_transfers(self._sizes, self._members, CHUNK))
        siblings = self._connected.siblings
        if siblings is not None:
            weights = [bucket.param_data for bucket in self._buckets]
            self._among_replicas(weights, siblings.broadcast, dist.BroadcastOptions())

    def send_weights(self, lacking: set[int]) -> int:
        """Give the processes in ``lacking`` their piece of the core's weights; returns the bytes received."""
        plan = join_transfers(self._sizes, self._members, CHUNK)
        return self._move_weights([transfer for transfer in plan if transfer.peer in lacking])

    def _move_weights(self, plan: list[Transfer]) -> int:
        size, weights = 0, [bucket.param_data for bucket in self._buckets]
        for own, received in self._exchange(plan, weights, to_core=False):
            own.copy_(received)
            size += received.nbytes
        return size

    def _exchange(
        self, plan: list[Transfer], buffers: list[torch.Tensor], *, to_core: bool
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Own pieces of ``buffers``, each with what came for it; collective over the group."""
        for transfers in rounds(plan, CHUNK):
            out: list[list[torch.Tensor]] = [[] for _ in range(self._members.size)]
            into: list[list[torch.Tensor]] = [[] for _ in range(self._members.size)]
            for transfer in transfers:
                piece = buffers[transfer.bucket][transfer.begin : transfer.end]
                ends = (transfer.peer, transfer.core) if to_core else (transfer.core, transfer.peer)
                if self._rank == ends[0]:
                    out[ends[1]].append(piece)
                elif self._rank == ends[1]:
                    into[ends[0]].append(piece)
            sent, own = list(chain.from_iterable(out)), list(chain.from_iterable(into))
            outgoing = torch.cat(sent) if sent else buffers[0].new_empty(0)
            incoming = buffers[0].new_empty(sum(map(len, own)))
            sizes = [[sum(map(len, pieces)) for pieces in way] for way in (into, out)]
            self._finish(self._connected.all.alltoall_base(incoming, outgoing, *sizes))
            came = incoming.split([len(piece) for piece in own])  # type: ignore[no-untyped-call]
            yield from zip(own, came, strict=True)

    def _among_replicas(self, buffers: list[torch.Tensor], collective: Callable[..., Any], options: Any) -> None:
        for bucket, options.rootRank, first, last in self._parts():
            for begin in range(first, last, CHUNK):
                piece = buffers[bucket][begin : min(begin + CHUNK, last)]
                copy = piece.clone()
                wait(collective([copy], options), self._timeout_s, self._interrupted)
                piece.copy_(copy)

    @property
    def _connected(self) -> ConnectedGroup:
        assert self._group is not None
        return self._group

    def _finish(self, work: Any, timeout_s: float | None = None) -> None:
        wait(work, timeout_s or self._timeout_s, self._interrupted)
        self._done += 1

    def _parts(self) -> Iterator[tuple[int, int, int, int]]:
        """Bucket, replica that stands for it, begin and end of every part of this copy's pieces."""
        for bucket, size in enumerate(self._sizes):
            piece = owned(size, self._copies)[self._copy]
            for replica, (begin, end) in enumerate(parts(piece, self._members.replicas)):
                if begin < end:
                    yield bucket, replica, begin, end


def _end(groups: list[ConnectedGroup]) -> None:
    """Abort groups, which have no other reference, and empty the list."""
    parts = [part for group in groups for part in (group.all, group.siblings) if part is not None]
    groups.clear()
    if parts:
        end_groups(parts)


def _member(rank: int) -> str:
    return f"member-{rank}"
