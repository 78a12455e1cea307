"""Elastic data parallelism: replicas of a membership generation, joined by groups outside torch's global state.

Every replica has its own torch world for life. Per generation, ranks with the same (tensor, pipeline) coordinate get
one *bare* process group, with a rendezvous file on the shared file system.

1. At a join, all take the state of the member with the highest step. A replica commits it once all its processes have
   received theirs: a source that dies leaves it unchanged.
2. Gradients are summed before any change. All processes of a replica agree on success, else nothing is committed.
3. A process that fails leaves the group at once: its closed sockets wake waiting peers.
4. Members announce themselves first, which can be interrupted. They connect, which cannot, when all are there.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist

from libra_hpc.protocol.trainer import Join

from .device import Store, bare_group, file_store, wait
from .train_engine import TrainEngine

BROADCAST_ELEMENTS = 1 << 24
"""Elements per broadcast at a join (64 MiB of float32): hides latency without doubling the source's memory."""


ANNOUNCE_POLL_S = 0.05
"""Seconds between two reads of the announcements on the shared file system."""
CONNECT_S = 8.0
"""Longest connect in seconds of announced members; on the CPU it takes milliseconds.

Half: a loaded node may miss it. Double: a member that dies in between delays the others so long.
"""


class PeerLost(Exception):
    """A collective over the replicas failed: a member died, left, or was late."""


class Replicas:
    def __init__(
        self,
        engine: TrainEngine,
        step_timeout_s: float,
        join_timeout_s: float,
        waiting: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """``waiting`` is the context of waits for other replicas."""
        self._engine, self._waiting = engine, waiting
        self._step_timeout_s, self._join_timeout_s = step_timeout_s, join_timeout_s
        self._group: Any = None
        self.generation = -1
        """The present generation; -1: none."""
        self.waited_s = 0.0
        """Seconds in sums over replicas since the counter was set to 0."""

    def join(self, message: Join, interrupted: Callable[[], bool] = lambda: False) -> int:
        """Join a generation and take its state; returns the bytes received.

        Collective over the generation; ``interrupted`` ends the wait for missing members. Raises `PeerLost`, in no
        generation and with an unchanged state.
        """
        self.leave()
        received: list[torch.Tensor] = []
        counters, error = (self._engine.state.step, self._engine.state.updates), ""
        try:
            if message.size > 1:
                with self._waiting():
                    counters, received = self._form(message, interrupted)
        except (RuntimeError, OSError) as failure:
            error = str(failure)
            self.leave()
        if not self._engine.agree(not error):
            self.leave()
            raise PeerLost(error or "another process of this replica could not join")
        if received:
            flat = torch.cat(received) if len(received) > 1 else received[0]
            tensors = self._engine.state.tensors()
            for tensor, part in zip(tensors, torch.split(flat, [t.numel() for t in tensors]), strict=True):
                tensor.copy_(part.view_as(tensor))
            self._engine.state.commit(*counters)
            self._engine.state.refresh()
        self.generation = message.generation
        return sum(part.numel() * part.element_size() for part in received)

    def _form(self, message: Join, interrupted: Callable[[], bool]) -> tuple[tuple[int, int], list[torch.Tensor]]:
        split, state, device = self._engine.split, self._engine.state, self._engine.device
        store = file_store(f"{message.rendezvous}.tp{split.tp_rank}-pp{split.pp_rank}", message.size)
        assemble(store, message.rank, message.size, self._join_timeout_s, interrupted)
        # NCCL connects in its first collective: seconds for many devices.
        connect_s = self._join_timeout_s if device.type == "cuda" else min(CONNECT_S, self._join_timeout_s)
        self._group = bare_group(device, store, rank=message.rank, size=message.size, timeout_s=connect_s)
        mine = torch.tensor([state.step, state.updates], dtype=torch.int64, device=device)
        everyone = [torch.empty_like(mine) for _ in range(message.size)]
        wait(self._group.allgather([everyone], [mine]), connect_s)
        counters = [(int(each[0]), int(each[1])) for each in everyone]
        source = max(range(message.size), key=lambda rank: counters[rank][0])
        if all(each == counters[source] for each in counters):
            return counters[source], []
        options = _within(dist.BroadcastOptions(), self._step_timeout_s)
        options.rootRank = source
        received: list[torch.Tensor] = []
        for part in self._parts():
            # The source's parts are copies too: all members pass the same kind of buffer.
            wait(self._group.broadcast([part], options), self._step_timeout_s)
            if counters[message.rank] != counters[source]:
                received.append(part)
        return counters[source], received

    def _parts(self) -> Any:
        pieces: list[torch.Tensor] = []
        for tensor in self._engine.state.tensors():
            for piece in torch.split(tensor.reshape(-1), BROADCAST_ELEMENTS):
                if pieces and sum(p.numel() for p in pieces) + piece.numel() > BROADCAST_ELEMENTS:
                    yield torch.cat(pieces)
                    pieces = []
                pieces.append(piece)
        yield torch.cat(pieces)

    def reduce(self) -> None:
        """Sum the gradients over the members; on failure leaves the generation and raises `PeerLost`."""
        self._sum(self._engine.gradients())

    def add(self, sums: torch.Tensor) -> None:
        """Sum over the members in place, as `reduce`."""
        self._sum([sums])

    def spread_weights(self) -> None:
        """Members compute their weights themselves."""

    def _sum(self, tensors: list[torch.Tensor]) -> None:
        if self._group is None:
            return
        begin = time.monotonic()
        options = _within(dist.AllreduceOptions(), self._step_timeout_s)
        try:
            with self._waiting():
                for tensor in tensors:
                    wait(self._group.allreduce([tensor], options), self._step_timeout_s)
        except RuntimeError as failure:
            self.leave()
            raise PeerLost(str(failure)) from failure
        finally:
            self.waited_s += time.monotonic() - begin

    def leave(self) -> None:
        group, self._group, self.generation = self._group, None, -1
        if group is not None:
            group.abort()


def _within(options: Any, seconds: float) -> Any:
    options.timeout = datetime.timedelta(seconds=seconds)
    return options


def assemble(store: Store, rank: int, size: int, timeout_s: float, interrupted: Callable[[], bool]) -> None:
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
