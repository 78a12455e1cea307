"""Elastic data parallelism: replicas without optimizer state around a core that owns it.

The core and every replica have a torch world of their own for life. Per membership generation, processes with the same
(tensor, pipeline) coordinate get one *bare* process group, with a rendezvous file on the shared file system.

1. Join: a replica that lacks the core's present weights receives them from their owners.
2. Step: replicas sum their gradients among themselves and send each piece to its owner, before any change. All
   processes of the core agree that everything came, else nothing is committed.
3. After the update the owners send the new weights.
4. A process that fails leaves the group at once: its closed sockets wake waiting peers.
5. A replica whose weights are incomplete has no step until its next join.

Members announce themselves first, which can be interrupted. They connect, which cannot, when all are there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist

from libra_hpc.protocol.trainer import Join

from .device import Store, bare_group, file_store, wait, wait_peer
from .exchange import Transfer, join_transfers, parts, step_transfers
from .train_engine import NO_STEP, TrainEngine

CHUNK = 1 << 24
"""Elements of one transfer (64 MiB of float32): the owner's memory for what it receives. Smaller ones show latency."""
ANNOUNCE_POLL_S = 0.05
"""Seconds between two reads of the announcements on the shared file system."""
CONNECT_S = 8.0
"""Longest connect in seconds of announced members; on the CPU it takes milliseconds.

Half: a loaded node may miss it. Double: a member that dies in between delays the others so long.
"""


class PeerLost(Exception):
    """An exchange with the core or the replicas failed: a member died, left, or was late."""


class ElasticReplicas:
    """One process's end of the exchange, in the core or in a replica (an engine without optimizer)."""

    def __init__(
        self,
        engine: TrainEngine,
        owners: int,
        step_timeout_s: float,
        join_timeout_s: float,
        waiting: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """``owners``: data-parallel times context ranks of the core.

        ``waiting`` is the context of waits for other processes.
        """
        self._engine, self._owners, self.waiting, self._elastic = engine, owners, waiting, engine.elastic
        self._step_timeout_s, self._join_timeout_s = step_timeout_s, join_timeout_s
        self._group: Any = None
        self._siblings: Any = None
        """The group of the replicas alone, where there are several."""
        self._rank = self._replicas = 0
        self._shared = False
        """Whether the present generation has replicas, known alike to all processes of this world."""
        self.generation = -1
        """The present generation; -1: none."""
        self.waited_s = 0.0
        """Seconds in exchanges since the counter was set to 0."""

    # --- membership ---

    def join(self, message: Join, interrupted: Callable[[], bool] = lambda: False) -> int:
        """Join a generation, a replica with the core's weights; returns the bytes received.

        The core is member 0. Collective over the generation; ``interrupted`` ends the wait for missing members. Raises
        `PeerLost`, in no generation.
        """
        self.leave()
        self._shared = False
        received, error = 0, ""
        try:
            if message.size > 1:
                with self.waiting():
                    received = self._form(message, interrupted)
        except (RuntimeError, OSError) as failure:
            error = str(failure)
            self.leave()
        if not self._engine.agree(not error):
            self.leave()
            raise PeerLost(error or "another process of this replica could not join")
        self.generation, self._shared = message.generation, message.size > 1
        return received

    def leave(self) -> None:
        groups = self._group, self._siblings
        self._group, self._siblings, self.generation = None, None, -1
        for group in groups:
            if group is not None:
                group.abort()

    def _form(self, message: Join, interrupted: Callable[[], bool]) -> int:
        place, device, state = self._engine.split, self._engine.device, self._engine.state
        if place.ep > 1 or (self._elastic and place.cp > 1):
            # Experts have owners of their own, and context ranks of a replica would each have a part of the gradient.
            raise RuntimeError("replicas without optimizer have no context ranks, and no core with expert ranks")
        path = f"{message.rendezvous}.tp{place.tp_rank}-pp{place.pp_rank}"
        self._replicas = message.size - 1
        size = self._owners + self._replicas
        self._rank = self._owners + message.rank - 1 if self._elastic else place.copy_rank
        store = file_store(path, size)
        _assemble(store, self._rank, size, self._join_timeout_s, interrupted)
        # NCCL connects in its first collective: seconds for many devices.
        connect_s = self._join_timeout_s if device.type == "cuda" else min(CONNECT_S, self._join_timeout_s)
        self._group = bare_group(device, store, rank=self._rank, size=size, timeout_s=connect_s)
        mine = torch.tensor([state.step, state.updates], dtype=torch.int64, device=device)
        everyone = [torch.empty_like(mine) for _ in range(size)]
        wait(self._group.allgather([everyone], [mine]), connect_s)
        if self._elastic and self._replicas > 1:
            siblings = file_store(f"{path}-replicas", self._replicas)
            self._siblings = bare_group(
                device, siblings, rank=message.rank - 1, size=self._replicas, timeout_s=connect_s
            )
        step, updates = (int(counter) for counter in everyone[0])
        lacking = {rank for rank in range(self._owners, size) if int(everyone[rank][0]) != step}
        plan = join_transfers(self._sizes(), self._owners, self._replicas, CHUNK)
        received = self._move_weights([transfer for transfer in plan if transfer.replica in lacking])
        if self._elastic:
            state.commit(step, updates)
        return received

    # --- a step ---

    def reduce(self) -> None:
        """Add the replicas' gradients to those of their owners; raises `PeerLost`, outside the generation."""
        if not self._shared:
            return
        with self._exchanging():
            if self._siblings is not None:
                for gradient in self._gradients():
                    wait(self._siblings.allreduce([gradient]), self._step_timeout_s)
            gradients = self._gradients()
            for transfer in self._own(self._step_plan()):
                piece = gradients[transfer.bucket][transfer.begin : transfer.end]
                if self._elastic:
                    self._send(piece, transfer.owner)
                else:
                    received = torch.empty_like(piece)
                    self._receive(received, transfer.replica)
                    piece += received

    def add(self, sums: torch.Tensor) -> None:
        """Add every replica's sums to those of the core's data-parallel rank 0; raises `PeerLost` as `reduce`."""
        if not self._shared:
            return
        with self._exchanging():
            if self._elastic:
                self._send(sums, 0)
            elif self._rank == 0:
                for replica in range(self._owners, self._owners + self._replicas):
                    received = torch.empty_like(sums)
                    self._receive(received, replica)
                    sums += received

    def spread_weights(self) -> None:
        """Give the replicas the weights after an update.

        Collective over this world; raises `PeerLost` in all of it. A replica has no step then: the caller sets it when
        the whole step is done.
        """
        if not self._shared:
            return
        error = ""
        try:
            with self._exchanging():
                self._move_weights(self._step_plan())
                if self._siblings is not None:
                    self._gather_weights()
        except PeerLost as lost:
            error = str(lost)
        if not self._engine.agree(not error):
            self.leave()
            raise PeerLost(error or "another process of this world lost its peers")

    def _step_plan(self) -> list[Transfer]:
        return step_transfers(self._sizes(), self._owners, self._replicas, CHUNK)

    def _move_weights(self, plan: list[Transfer]) -> int:
        """Owners send, replicas receive; returns the bytes received."""
        weights, own, received = self._weights(), self._own(plan), 0
        if self._elastic and own:
            # Until all have come, the weights are of no step.
            self._engine.state.commit(NO_STEP, 0)
        for transfer in own:
            piece = weights[transfer.bucket][transfer.begin : transfer.end]
            if self._elastic:
                self._receive(piece, transfer.owner)
                received += piece.nbytes
            else:
                self._send(piece, transfer.replica)
        return received

    def _own(self, plan: list[Transfer]) -> list[Transfer]:
        return [transfer for transfer in plan if self._rank in (transfer.owner, transfer.replica)]

    def _gather_weights(self) -> None:
        options = dist.BroadcastOptions()
        for weights in self._weights():
            for root, (begin, end) in enumerate(parts(weights.numel(), self._replicas)):
                options.rootRank = root
                if begin < end:
                    wait(self._siblings.broadcast([weights[begin:end]], options), self._step_timeout_s)

    def _sizes(self) -> list[int]:
        return [bucket.numel_unpadded for bucket in self._engine.buckets()]

    def _weights(self) -> list[torch.Tensor]:
        return [bucket.param_data[: bucket.numel_unpadded] for bucket in self._engine.buckets()]

    def _gradients(self) -> list[torch.Tensor]:
        return [bucket.grad_data[: bucket.numel_unpadded] for bucket in self._engine.buckets()]

    def _send(self, tensor: torch.Tensor, peer: int) -> None:
        wait_peer(self._engine.device, self._group.send([tensor], peer, 0), self._step_timeout_s)

    def _receive(self, tensor: torch.Tensor, peer: int) -> None:
        wait_peer(self._engine.device, self._group.recv([tensor], peer, 0), self._step_timeout_s)

    @contextmanager
    def _exchanging(self) -> Iterator[None]:
        begin = time.monotonic()
        try:
            if self._group is None:
                raise RuntimeError("this process has left the generation")
            with self.waiting(), torch.no_grad():
                yield
        except RuntimeError as failure:
            self.leave()
            raise PeerLost(str(failure)) from failure
        finally:
            self.waited_s += time.monotonic() - begin


def _assemble(store: Store, rank: int, size: int, timeout_s: float, interrupted: Callable[[], bool]) -> None:
    """Announce this member and wait for all; raises `RuntimeError` when one is missing or a newer order came."""
    members = [f"member-{rank}" for rank in range(size)]
    store.set(members[rank], "here")
    deadline = time.monotonic() + timeout_s
    while True:
        # Also when all are there: members with the newer order leave, and the connect would wait for them.
        if interrupted():
            raise RuntimeError("a newer order came")
        if store.check(members):
            return
        if time.monotonic() > deadline:
            missing = [rank for rank, member in enumerate(members) if not store.check([member])]
            raise RuntimeError(f"members {missing} of {size} did not appear within {timeout_s:g} s")
        time.sleep(ANNOUNCE_POLL_S)
