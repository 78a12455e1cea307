"""One process's connections to the processes with the same parameters in the core and in all elastic replicas.

A process has one `Channel` for what its tensor and pipeline coordinate decides and, in a model with experts, one for
its experts. A connected channel is a *bare* process group, outside torch's global state; aborting it wakes waiting
peers. All methods raise `RuntimeError` when a member is missing, died or was late.

The memory beyond weights and gradients is one transfer of `CHUNK` elements.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from .device import Store, bare_group, file_store, wait, wait_peer
from .exchange import GroupMembers, Transfer, join_transfers, owned, parts, step_transfers

CHUNK = 1 << 24
"""Elements of one transfer (64 MiB of float32): the owner's memory for what it receives. Smaller ones show latency."""
ANNOUNCE_POLL_S = 0.05
"""Seconds between two reads of the announcements on the shared file system."""


class Channel:
    def __init__(
        self,
        buckets: list[Any],
        label: str,
        owners: int,
        *,
        copies: int,
        copy: int,
        elastic: bool,
        device: torch.device,
        timeout_s: float,
    ) -> None:
        """``buckets`` are Megatron-Core's, with the same parameters in all processes of the same ``label``.

        ``owners``: copies in the core. ``copies``, ``copy``: of them in this world, and which one this is. ``elastic``:
        this world has no optimizer. ``timeout_s``: longest transfer.
        """
        self._buckets, self._label, self._device, self._timeout_s = buckets, label, device, timeout_s
        self._owners, self._copies, self._copy, self._elastic = owners, copies, copy, elastic
        self._sizes = [int(bucket.numel_unpadded) for bucket in buckets]
        self._members = GroupMembers(owners, copies, 0)
        self._rank = self._replica = 0
        self._store: Store | None = None
        self._path = ""
        self._group: Any = None
        self._siblings: Any = None
        """The same copy in all replicas, where there are several."""

    @property
    def connected(self) -> bool:
        return self._group is not None

    # --- membership ---

    def announce(self, path: str, copies: int, replicas: int, replica: int) -> None:
        """Tell the others of this process; ``copies`` in each of the ``replicas``, of which this is ``replica``."""
        self._members, self._replica = GroupMembers(self._owners, copies, replicas), replica
        self._rank = self._members.rank(replica, self._copy) if self._elastic else self._copy
        self._path = f"{path}.{self._label}"
        self._store = file_store(self._path, self._members.size)
        self._store.set(_member(self._rank), "here")

    def assemble(self, deadline: float, interrupted: Callable[[], bool]) -> None:
        """Wait until all are announced, or ``deadline`` (monotonic), or a newer order came."""
        assert self._store is not None
        names = [_member(rank) for rank in range(self._members.size)]
        while True:
            # Also when all are there: members with the newer order leave, and the connect would wait for them.
            if interrupted():
                raise RuntimeError("a newer order came")
            if self._store.check(names):
                return
            if time.monotonic() > deadline:
                missing = [rank for rank, name in enumerate(names) if not self._store.check([name])]
                raise RuntimeError(f"members {missing} of {len(names)} did not appear in time")
            time.sleep(ANNOUNCE_POLL_S)

    def connect(self, timeout_s: float, counters: tuple[int, int]) -> list[tuple[int, int]]:
        """Connect the announced members, which cannot be interrupted; returns the ``counters`` of each rank."""
        members, copy = self._members, self._copy
        self._group = bare_group(self._device, self._store, rank=self._rank, size=members.size, timeout_s=timeout_s)
        mine = torch.tensor(counters, dtype=torch.int64, device=self._device)
        everyone = [torch.empty_like(mine) for _ in range(members.size)]
        wait(self._group.allgather([everyone], [mine]), timeout_s)
        if self._elastic and members.replicas > 1:
            store = file_store(f"{self._path}-copy{copy}", members.replicas)
            self._siblings = bare_group(
                self._device, store, rank=self._replica, size=members.replicas, timeout_s=timeout_s
            )
        return [(int(first), int(second)) for first, second in everyone]

    def leave(self) -> None:
        groups = self._group, self._siblings
        self._group, self._siblings, self._store = None, None, None
        for group in groups:
            if group is not None:
                group.abort()

    # --- exchanges ---

    def reduce(self) -> None:
        """Add the replicas' gradients to those of their owners."""
        gradients = [bucket.grad_data for bucket in self._buckets]
        if self._siblings is not None:
            options = dist.ReduceOptions()
            for bucket, options.rootRank, begin, end in self._parts():
                wait(self._siblings.reduce([gradients[bucket][begin:end]], options), self._timeout_s)
        for transfer in self._own(step_transfers(self._sizes, self._members, CHUNK)):
            piece = gradients[transfer.bucket][transfer.begin : transfer.end]
            if self._elastic:
                self._send(piece, transfer.owner)
            else:
                received = torch.empty_like(piece)
                self._receive(received, transfer.peer)
                piece += received

    def add(self, sums: torch.Tensor) -> None:
        """Add the sums of every process of the replicas to those of the first owner."""
        if self._elastic:
            self._send(sums, 0)
        elif self._rank == 0:
            for peer in range(self._members.owners, self._members.size):
                received = torch.empty_like(sums)
                self._receive(received, peer)
                sums += received

    def spread_weights(self) -> None:
        """Give every process of the replicas its piece of the owners' weights."""
        self._move_weights(step_transfers(self._sizes, self._members, CHUNK))
        if self._siblings is not None:
            options = dist.BroadcastOptions()
            for bucket, options.rootRank, begin, end in self._parts():
                weights = self._buckets[bucket].param_data[begin:end]
                wait(self._siblings.broadcast([weights], options), self._timeout_s)

    def send_weights(self, lacking: set[int]) -> int:
        """Give the processes in ``lacking`` their piece of the owners' weights; returns the bytes received."""
        plan = join_transfers(self._sizes, self._members, CHUNK)
        return self._move_weights([transfer for transfer in plan if transfer.peer in lacking])

    def _move_weights(self, plan: list[Transfer]) -> int:
        received = 0
        for transfer in self._own(plan):
            piece = self._buckets[transfer.bucket].param_data[transfer.begin : transfer.end]
            if self._elastic:
                self._receive(piece, transfer.owner)
                received += piece.nbytes
            else:
                self._send(piece, transfer.peer)
        return received

    def _own(self, plan: list[Transfer]) -> list[Transfer]:
        return [transfer for transfer in plan if self._rank in (transfer.owner, transfer.peer)]

    def _parts(self) -> Iterator[tuple[int, int, int, int]]:
        """Bucket, replica that stands for it, begin and end of every part of this copy's pieces."""
        for bucket, size in enumerate(self._sizes):
            piece = owned(size, self._copies)[self._copy]
            for replica, (begin, end) in enumerate(parts(piece, self._members.replicas)):
                if begin < end:
                    yield bucket, replica, begin, end

    def _send(self, tensor: torch.Tensor, peer: int) -> None:
        wait_peer(self._device, self._group.send([tensor], peer, 0), self._timeout_s)

    def _receive(self, tensor: torch.Tensor, peer: int) -> None:
        wait_peer(self._device, self._group.recv([tensor], peer, 0), self._timeout_s)


def _member(rank: int) -> str:
    return f"member-{rank}"
