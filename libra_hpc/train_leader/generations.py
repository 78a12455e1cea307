"""Which nodes train together: forms the membership generations that the coordinator orders.

- The core (all nodes of component ``train``) is member 0 of every generation; replicas of hybrid nodes are members 1,
  2, ..
- A newer order -> it is formed; an unfinished formation is given up.
- An order without a node of the core -> the next one is awaited.
- A member died -> wait for the coordinator's next order, which leaves it out or has it rebuilt.
- A step or join failed and nobody died -> after `RETRY_S` the same members join again, for at most
  `NEW_GENERATION_S`.
- Members are on their way (`Layout.awaited`) -> a step waits for them until the limit, then it begins without them.
- A member copies or writes its state, and the others wait for it -> that time does not count.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from libra_hpc.protocol.agents import Fatal, Log, MeshMessage, ToReplica
from libra_hpc.protocol.trainer import Join, Joined

NEW_GENERATION_S = 120.0
"""Seconds after which failing steps or joins without a death end the run."""
RETRY_S = 5.0
"""Seconds to wait for a new order after a failed step or join.

A death leads to an order sooner. Silence means a slow member or a broken connection: the same members try again.
"""
BUSY_S = 5.0
"""Seconds for which a member's report of writing its state counts; reports come every second."""


class Generations:
    """Base of the train leader: orders, members, and answers to the last request."""

    def __init__(
        self,
        rendezvous: Path,
        core: tuple[int, ...],
        nodes_per_replica: int,
        send: Callable[[int, MeshMessage], None],
        clock: Callable[[], float],
    ) -> None:
        """``core``: ranks of the core's nodes. The first node of a world answers for it.

        ``nodes_per_replica``: hybrid nodes that are one world.
        """
        self._rendezvous, self._core, self._send, self._clock = rendezvous, core, send, clock
        self._nodes_per_replica = nodes_per_replica
        self.generation = 0
        self.members: tuple[int, ...] = ()
        """All nodes of the generation, the core's first."""
        self._joining: tuple[int, ...] = ()
        self._ordered: tuple[int, tuple[int, ...]] = (0, ())
        self._broken = True
        self._replies: dict[int, Any] = {}
        self._failed = ""
        self._died = False
        """Whether the last failure is a death, upon which the coordinator orders a new generation."""
        self._failing_since: float | None = None
        """First failure without a death since the last step that succeeded."""
        self._joins = 0
        """Joins ordered so far; the attempt number of the last one."""
        self._busy_at: dict[int, float] = {}
        """Time of each member's last report of writing its state."""
        self._awaited: tuple[tuple[int, ...], float] = (), 0.0
        """Members on their way, and for how many seconds a step waits for them."""
        self._awaiting_since: float | None = None
        """When the batch of the present step was there."""
        self._wake = asyncio.Event()

    def on_generation(self, generation: int, ranks: tuple[int, ...]) -> None:
        if generation > self._ordered[0]:
            self._ordered = (generation, ranks)
        self._wake.set()

    def on_replica_down(self, rank: int, reason: str) -> None:
        """A replica died: the present request fails with it, but a join that it has no part in."""
        if rank in (self._joining or self.members):
            self._failed = self._failed or f"replica {rank}: {reason}"
            self._broken = self._died = True
        self._busy_at.pop(rank, None)
        self._wake.set()

    def _member_busy(self) -> bool:
        since = self._clock() - BUSY_S
        return any(self._busy_at.get(rank, since - 1.0) >= since for rank in self._ordered[1])

    def _membership_due(self) -> bool:
        return self._broken or self._ordered_newer()

    def _ordered_newer(self) -> bool:
        return self._ordered[0] > self.generation and set(self._core) <= set(self._ordered[1])

    async def _until(self, condition: Callable[[], bool], timeout: float | None = None) -> bool:
        deadline = None if timeout is None else self._clock() + timeout
        while not condition():
            self._wake.clear()
            try:
                await asyncio.wait_for(
                    self._wake.wait(), None if deadline is None else max(0.0, deadline - self._clock())
                )
            except TimeoutError:
                return condition()
        return True

    def _missing(self) -> set[int]:
        return set(self._awaited[0]).difference(self.members)

    async def _all_here(self, step: int, otherwise: Callable[[], bool]) -> bool:
        """Wait for the members on their way, the batch being there; False: ``otherwise`` comes first."""
        now = self._clock()
        self._awaiting_since = since = now if self._awaiting_since is None else self._awaiting_since
        left_s = since + self._awaited[1] - now
        if left_s > 0.0 and self._missing():
            await self._until(lambda: not self._missing() or otherwise(), left_s)
            return False
        if self._missing():
            self._log("members_late", step=step, ranks=sorted(self._missing()), seconds=now - since)
        self._awaiting_since = None
        return True

    async def _order_or_retry(self) -> bool:
        """Wait for a newer order or the time of a retry; False when retries took too long."""
        while not self._ordered_newer():
            alive = bool(self._failed) and not self._died
            if alive and (self._failing_since is None or self._member_busy()):
                self._failing_since = self._clock()
            if not await self._until(
                (lambda: self._ordered_newer() or self._died) if alive else self._ordered_newer,
                RETRY_S if alive else None,
            ):
                return self._failing_since is None or self._clock() - self._failing_since < NEW_GENERATION_S
        return True

    async def _join(self, wanted: tuple[int, ...]) -> bool:
        """Have these nodes form the generation, the core first; False when that failed or a newer order came."""
        self._joining, self._broken = wanted, True
        self._clear_replies()
        self._joins += 1
        path = f"{self._rendezvous}/generation-{self.generation:06d}.{self._joins}"
        worlds = self._worlds(wanted)
        for number, world in enumerate(worlds):
            join = Join(self.generation, number, len(worlds), path, attempt=self._joins, step=self.arriving)
            for rank in world:
                self._send(rank, ToReplica(join))

        def joined() -> bool:
            return all(isinstance(self._replies.get(rank), Joined) for rank in wanted)

        await self._until(lambda: bool(self._failed) or joined() or self._ordered_newer())
        self._joining = ()
        return joined() and not self._failed

    @property
    def arriving(self) -> int:
        """The version on its way to all nodes, as in `Join.step`."""
        return -1

    def _worlds(self, nodes: tuple[int, ...]) -> list[tuple[int, ...]]:
        """The nodes of each world of a generation, the core's first."""
        core, each = len(self._core), self._nodes_per_replica
        return [nodes[:core], *(nodes[begin : begin + each] for begin in range(core, len(nodes), each))]

    def _clear_replies(self) -> None:
        self._replies, self._failed, self._died = {}, "", False

    def _fail(self, reason: str, restart: bool = False) -> bool:
        """The run cannot go on, or only from its newest checkpoint; always False."""
        self._send(0, Fatal(self._core[0], reason, restart))
        return False

    def _log(self, kind: str, **fields: str | int | float | list[int]) -> None:
        self._send(0, Log(kind, time.time(), dict(fields)))
