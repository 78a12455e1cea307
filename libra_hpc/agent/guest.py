"""A guest's agent: it joins a running job with engines alone, and leaves it again.

- It is admitted -> a carrier and engines, as on a rollout node; it passes no weights on.
- The owner of its device takes it back (`Page`) -> the same, but its engines go into standby, until he gives it again.
- SIGTERM, SIGUSR1 or Ctrl-C, or its own time limit is near -> its turns go on elsewhere, then it ends; a second signal
  ends it at once.
- The ranks restart, or gave it up -> it ends its engines and joins again, as another guest.
- Its engines end too often -> it leaves with the reason. The run is over -> it ends.

Nothing that happens here ends the run.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import time
from typing import Any, Literal, NamedTuple

from libra_hpc.config.run import RunConfig
from libra_hpc.facts.rundir import RunDir
from libra_hpc.gate.gated_steps import Behind, GivenTokens
from libra_hpc.gate.page import Page
from libra_hpc.mesh.agent_context import AgentContext, RankLayout
from libra_hpc.mesh.door import JoinedWorld
from libra_hpc.mesh.mesh import Mesh
from libra_hpc.protocol import agents as wire
from libra_hpc.protocol.engine_state import LenderKind
from libra_hpc.protocol.layout import LayoutChange, ResumePoint, Row
from libra_hpc.protocol.layout_changes import NOTHING, taken
from libra_hpc.simulated.dry_run import in_wall_time

from .coordinator_watch import CoordinatorWatch
from .node import NodeAgent, Routes, add_rollout
from .node_carrier import NodeCarrier
from .rollout_node import RolloutNode

LEAVE_S = 10.0
"""For the turns in flight to go on elsewhere; Slurm gives a preempted job 30 s by default."""
FOLLOW_S = 0.25
"""Between two looks at the page.  Double: memory is free so much later."""
LEAVE_EARLY_S = 60.0
"""Before the own time limit: Slurm compares times about every 30 s, and engines take seconds to end."""

log = logging.getLogger("libra_hpc.guest")


class Stay(NamedTuple):
    """How a stay in the job ended."""

    how: Literal["over", "again", "left", "failed"]
    """``again``: it may join again."""
    reason: str


class GuestSettings(NamedTuple):
    engines: tuple[int, int]
    """TP and number."""
    until: float
    """Epoch seconds of the own time limit."""
    behind: Behind | None = None
    """Which part of a served device the guest may use; None: the guest is not beside a server."""
    kv_cache_mb: int = 0
    kind: LenderKind = "idle"
    pull_mb_s: float = 0.0
    """Limit of pulled weights in MB/s, like `AgentContext.pull_mb_s`."""


class GuestAgent(NodeAgent):
    def __init__(
        self, joined: JoinedWorld, config: RunConfig, run: RunDir, attempt: int, settings: GuestSettings
    ) -> None:
        layout = RankLayout.of(config)
        super().__init__(Mesh(joined.world, self._on_message), "guest", Routes(), layout.listeners)
        self._until = settings.until
        behind = settings.behind
        self._given = None if behind is None else GivenTokens(behind)
        self._context = AgentContext(
            rank=joined.world.rank,
            layout=layout,
            config=in_wall_time(config).changed(rollout={"kv_cache_mb": settings.kv_cache_mb}),
            run=run,
            attempt=attempt,
            send=self._send,
            resume_point=ResumePoint(0, "", 0, ()),
            private=self.private,
            shared_memory=self.shared_memory,
            changed=self.changed,
            secret=joined.world.secret,
            addresses=joined.addresses,
            guest_engines=settings.engines,
            lender=((behind.lender if behind else "") or socket.gethostname(), settings.kind),
            pull_mb_s=settings.pull_mb_s,
            gate=behind.gate if behind else None,
        )
        self._carrier = NodeCarrier(self._context, self.on_image)
        self._engines = RolloutNode(self._context, self._carrier)
        self.engines += [self._carrier, self._engines]
        self._watch = CoordinatorWatch(lambda rank: rank in self.mesh.unreachable())
        self._stay: Stay | None = None
        self._layout = NOTHING
        # The first start is its own.
        self._observed = Row(active="rollout")
        self._leaving = ""
        """Why it leaves; empty: it does not."""
        self._returns = False
        """See `Heartbeat.returns`."""
        self._page = None if behind is None else Page(behind.gate.page)
        self._routes.add(wire.StopAgent, self._on_stop)
        self._routes.add(LayoutChange, self._on_change)
        add_rollout(self._routes, self._engines, self._carrier)

    async def serve(self) -> Stay:
        """Until the run ends, or this guest leaves."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        self._spawn(self.mesh.run())
        self._spawn(self._outlive_coordinator())
        if self._page is not None:
            self._spawn(self._follow_owner(self._page))
        await self.live()
        assert self._stay is not None
        return self._stay

    def _on_change(self, change: LayoutChange) -> None:
        self._layout = layout = taken(self._layout, change)
        context, row = self._context, layout.rows.get(self._context.rank)
        if not context.resume_point.pid and layout.start is not None:
            context.resume_point = layout.start
            for part in (self._carrier, self._engines):
                self._spawn(part.watch())
                self._spawn(part.start())
        if row is not None:
            self.reconcile(row)

    def _beat(self, **fields: Any) -> None:
        fields |= {"lender": self._context.lender, "leaving": self._leaving, "returns": self._returns}
        super()._beat(layout=self._layout.number, **fields)
        if self._given is not None:
            self._given.beat(self._engines.generated, self._engines.asleep)
        if time.time() > self._until - LEAVE_EARLY_S:
            self._leave("its time limit is near")
        if 0 in self.mesh.unreachable():
            # Also where its messages still come: it gives a silent guest up.
            self._end("again", "its link to rank 0 broke")

    async def _outlive_coordinator(self) -> None:
        await self._watch.gone()
        self._end("again", "the run's rank 0 is gone")

    async def _follow_owner(self, page: Page) -> None:
        """Have the turns go on elsewhere and sleep while the owner gives nothing; wake once he gives again."""
        while True:
            await asyncio.sleep(FOLLOW_S)
            closed = page.read().closed
            if closed and not self._leaving and self._engines.serves:
                self._leaving, self._returns = "its owner takes it back", True
                self._beat()
            elif closed and not self._leaving:
                self._leave("its owner takes it back")
            elif self._returns and self._engines.asleep and not closed:
                self._leaving, self._returns = "", False
                self._beat()

    def _leave(self, reason: str) -> None:
        """Have the turns go on elsewhere, then end."""
        if self._leaving and not self._returns:
            return
        self._leaving, self._returns = reason, False
        log.info("leaving: %s", reason)
        self._beat()
        asyncio.get_running_loop().call_later(LEAVE_S, self._end, "left", reason)

    def _end(self, how: Literal["over", "again", "left", "failed"], reason: str) -> None:
        self._stay = self._stay or Stay(how, reason)
        self._stop.set()

    def _on_signal(self, number: signal.Signals) -> None:
        if self._leaving and not self._returns:
            self._end("left", self._leaving)
        self._leave(f"it got {signal.Signals(number).name}")

    def _on_stop(self, stop: wire.StopAgent) -> None:
        if self._leaving:
            self._end("left", self._leaving)
        else:
            self._end("again" if stop.restart else "over", stop.reason)

    def _send(self, rank: int, message: Any) -> None:
        self.mesh.send(rank, message)
        if isinstance(message, wire.Fatal):
            self._end("failed", message.reason)

    def _on_message(self, source: int, message: Any) -> None:
        if source == 0:
            self._watch.seen()
        self._routes.deliver(message)

    def defect(self, reason: str, error: BaseException) -> None:
        self._send(0, wire.Fatal(self.rank, reason))
