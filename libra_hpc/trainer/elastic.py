"""Elastic data parallelism: replicas without optimizer state around a core that owns it.

The core and every replica have a torch world of their own for life. Per membership generation, processes with the same
parameters form a `libra_hpc.trainer.channel`, with a rendezvous file on the shared file system.

1. Join: a replica that lacks the core's present weights receives them from it.
2. Step: replicas sum their gradients among themselves and send each piece to a process of the core, before any change.
   All processes of the core agree that everything came, else nothing is committed.
3. After the update the core sends the new weights.
4. A process that fails leaves the group at once: its closed sockets wake waiting peers.
5. A newer order ends every wait: a dead peer that nothing shows, or one that hangs, is left out of it.
6. A replica whose weights are incomplete has no step until its next join.

Members announce themselves first, and connect when all are there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

import torch

from libra_hpc.protocol.trainer import Join

from .channel import Channel
from .link import PeerLost
from .train_engine import NO_STEP, TrainEngine

CONNECT_S = 8.0
"""Longest connect in seconds of announced members; on the CPU it takes milliseconds.

Half: a loaded node may miss it. Double: a member that dies in between delays the others so long.
"""


class ElasticReplicas:
    """One process's end of the exchange, in the core or in a replica (an engine without optimizer)."""

    def __init__(
        self,
        engine: TrainEngine,
        step_timeout_s: float,
        join_timeout_s: float,
        waiting: Callable[[], AbstractContextManager[None]] = nullcontext,
        interrupted: Callable[[], bool] = lambda: False,
        *,
        core_dp: int = 1,
        elastic_dp: int = 1,
    ) -> None:
        """``core_dp``, ``elastic_dp``: data-parallel ranks of the core, and of each replica beside it.

        ``waiting`` is the context of waits for other processes; ``interrupted`` ends them, when a newer order came.
        """
        self._engine, self.waiting, self._elastic = engine, waiting, engine.elastic
        self._join_timeout_s = join_timeout_s
        place = engine.split
        core, replica = place._replace(dp=core_dp), place._replace(dp=elastic_dp)
        shared, experts = engine.buckets()
        channel = partial(
            Channel, elastic=self._elastic, device=engine.device, timeout_s=step_timeout_s, interrupted=interrupted
        )
        label = f"tp{place.tp_rank}-pp{place.pp_rank}"
        self._channels = [channel(shared, label, core.copies, copies=place.copies, copy=place.copy_rank)]
        self._copies = [replica.copies]
        """In each replica, for every channel."""
        if experts:
            label = f"etp{place.etp_rank}-ep{place.ep_rank}-pp{place.pp_rank}"
            own = channel(experts, label, core.expert_copies, copies=place.expert_copies, copy=place.expert_copy_rank)
            self._channels.append(own)
            self._copies.append(replica.expert_copies)
        self.shared = False
        """Whether the present generation has replicas, known alike to all processes of this world."""
        self.generation = -1
        """The present generation; -1: none."""
        self.waited_s = 0.0
        """Seconds in exchanges since the counter was set to 0."""

    # --- membership ---

    def join(self, message: Join) -> int:
        """Join a generation, a replica with the core's weights; returns the bytes received.

        The core is member 0. Collective over the generation; raises `PeerLost`, in no generation.
        """
        self.park()
        self.shared = False
        received, error = 0, ""
        try:
            if message.size > 1:
                with self.waiting():
                    received = self._form(message)
        except (RuntimeError, OSError) as failure:
            error = str(failure)
            self.leave()
        if not self._engine.agree(not error):
            self.leave()
            raise PeerLost(error or "another process of this replica could not join")
        if self._elastic and message.size > 1 and not self._engine.agree(not received):
            self._engine.gather_weights()
        self.generation, self.shared = message.generation, message.size > 1
        return received

    def park(self) -> None:
        """Leave a generation that works; if its members meet again, they are connected."""
        self.generation = -1
        for channel in self._channels:
            channel.park()

    def leave(self) -> None:
        """Leave a generation that failed."""
        self.generation = -1
        for channel in self._channels:
            channel.leave()

    def _form(self, message: Join) -> int:
        state, replicas, cuda = self._engine.state, message.size - 1, self._engine.device.type == "cuda"
        for channel, copies in zip(self._channels, self._copies, strict=True):
            channel.announce(message.rendezvous, copies, replicas, message.rank - 1)
        deadline = time.monotonic() + self._join_timeout_s
        for channel in self._channels:
            channel.assemble(deadline)
        # NCCL connects in its first collective: seconds for many devices.
        connect_s = self._join_timeout_s if cuda else min(CONNECT_S, self._join_timeout_s)
        # Also where weights have come already: the counters are those of before.
        mine, received = (state.step, state.updates), 0
        for channel in self._channels:
            everyone = channel.connect(connect_s, mine)
            lacking = {rank for rank, (step, _) in enumerate(everyone) if step != everyone[0][0]}
            if self._elastic and lacking:
                # Until all have come, the weights are of no step.
                state.commit(NO_STEP, 0)
            received += channel.send_weights(lacking)
        if self._elastic:
            state.commit(*everyone[0])
        return received

    # --- a step ---

    def reduce(self) -> None:
        """Add the replicas' gradients to those of the core; raises `PeerLost`, outside the generation."""
        if not self.shared:
            return
        with self._exchanging():
            for channel in self._channels:
                channel.reduce()

    def add(self, sums: torch.Tensor) -> None:
        """Add every replica's sums to those of the core's data-parallel rank 0; raises `PeerLost` as `reduce`."""
        if not self.shared:
            return
        with self._exchanging():
            self._channels[0].add(sums)

    def spread_weights(self) -> None:
        """Give the replicas the weights after an update.

        Collective over this world; raises `PeerLost` in all of it. A replica has no step then: the caller sets it when
        the whole step is done.
        """
        if not self.shared:
            return
        error = ""
        if self._elastic:
            self._engine.state.commit(NO_STEP, 0)
        try:
            with self._exchanging():
                for channel in self._channels:
                    channel.spread_weights()
        except PeerLost as lost:
            error = str(lost)
        if not self._engine.agree(not error):
            self.leave()
            raise PeerLost(error or "another process of this world lost its peers")
        if self._elastic:
            self._engine.gather_weights()

    @contextmanager
    def _exchanging(self) -> Iterator[None]:
        begin = time.monotonic()
        try:
            if not all(channel.connected for channel in self._channels):
                raise RuntimeError("this process has left the generation")
            with self.waiting(), torch.no_grad():
                yield
        except RuntimeError as failure:
            self.leave()
            # Its frames refer to the group, whose sockets are to close.
            raise PeerLost(str(failure)) from failure.with_traceback(None)
        finally:
            self.waited_s += time.monotonic() - begin
