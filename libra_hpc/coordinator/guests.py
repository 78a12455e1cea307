"""The guests of a running job at rank 0: agents that joined later, with engines alone.

- A caller proved that it has the secret of the record -> a rank and a row of its own in the Layout.
- Its engines have the newest weights -> it serves: it is a receiver of weights.
- It wants to leave -> its turns go on elsewhere with what they have, then it is stopped, or sleeps until it returns.
- It is silent, its connection broke, or its engines end too often -> lost: an event, and nothing else of the run.

Guests are in no pool, membership or layout. The planner knows what their engines stand for, and counts it apart.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from typing import Any, Literal

import msgspec

from libra_hpc.files import read_own
from libra_hpc.mesh.agent_context import AgentContext
from libra_hpc.policies.pool import states
from libra_hpc.protocol import agents as wire
from libra_hpc.protocol.agents import LenderReport
from libra_hpc.protocol.engine_state import ObservedEngine
from libra_hpc.protocol.joining import GONE_S, RANKS_OF_A_START, JoinWanted, Offer
from libra_hpc.protocol.layout import Row
from libra_hpc.protocol.plan import OfferFact

from .liveness import HEARTBEAT_LOST_S, NodeContact

_offer = msgspec.json.Decoder(Offer)

GuestState = Literal["starting", "serving", "leaving", "standby"]


class Offers:
    """What lenders offer, in files that they renew, whatever the clocks; one that is over is removed."""

    def __init__(self, context: AgentContext) -> None:
        self._folder, layout = context.run.offers, context.layout
        self._tp, self._engines = context.config.rollout.on_node(layout.engine_node(layout.rollout_leader))
        self._seen: dict[str, tuple[int, float, Offer]] = {}
        """By lender: time stamp of the file, when that changed in monotonic seconds, and the offer."""
        self._over = set[str]()
        """Lenders that do not renew what they offered, and have no guest here."""

    def read(self) -> None:
        """Read all files, which may take long; what a file system does not answer stays as it was."""
        found = dict[str, tuple[int, float, Offer]]()
        with contextlib.suppress(OSError):
            for path in self._folder.glob("[!.]*.json"):
                known = self._seen.get(path.stem)
                with contextlib.suppress(OSError, msgspec.DecodeError, UnicodeDecodeError):
                    renewed, offer = path.stat().st_mtime_ns, _offer.decode(read_own(path))
                    if known is None or known[0] != renewed:
                        known = renewed, time.monotonic(), offer
                    elif path.stem in self._over:
                        path.unlink()
                found |= {path.stem: known} if known else {}
            self._seen = found

    def present(self, given: Mapping[str, LenderReport]) -> list[OfferFact]:
        """The offers as the planner needs them; ``given``: what lenders gave so far."""
        found, now, seen = list[OfferFact](), time.monotonic(), self._seen
        for name, (_, at, (tp, engines)) in seen.items():
            report, gpus = given.get(name), (tp or self._tp) * engines
            lends, share = report is not None and report.engines > 0, report.mean_share if report else 1.0
            if lends or now - at < GONE_S:
                found.append(OfferFact(name, gpus, share * gpus / (self._tp * self._engines), lends))
        self._over = seen.keys() - {one.name for one in found}
        return found


class Guests:
    """``event(kind, **fields)`` writes to the event log; times are epoch seconds."""

    def __init__(self, context: AgentContext, event: Callable[..., None]) -> None:
        self._context, self._event = context, event
        self.contacts: dict[int, NodeContact] = {}
        self.states: dict[int, GuestState] = {}
        self.rows: dict[int, Row] = {}
        self.offers = Offers(context)
        self._next = self._end = 0
        self.start_s = 0.0
        """Seconds of the newest serving guest from the start of its engines until they served; 0.0: none has served."""
        self.closed = "its ranks are starting"
        """Why nobody may join; empty: everybody may."""

    @property
    def serving(self) -> tuple[int, ...]:
        return tuple(rank for rank, state in self.states.items() if state == "serving")

    def open(self, end: int) -> None:
        """Take guests, with the ranks before ``end``, which no other start has."""
        self._next, self._end, self.closed = end - RANKS_OF_A_START, end, ""

    def admit(self, wanted: JoinWanted, now: float) -> int | str:
        """The rank of a new guest, or why it gets none."""
        if self.closed or self._next >= self._end:
            return self.closed or f"{RANKS_OF_A_START} guests have joined since its ranks started"
        rank, self._next = self._next, self._next + 1
        self.contacts[rank], self.states[rank] = NodeContact(now), "starting"
        self.rows[rank] = Row("starting", "rollout", guest=(wanted.host, wanted.addresses, wanted.port))
        return rank

    def on_message(self, rank: int, message: Any, now: float) -> None:
        """A message of a guest."""
        contact = self.contacts.get(rank)
        if contact is None:
            return
        contact.seen = now
        match message:
            case wire.Heartbeat(host=host, pid=pid, leaving=reason):
                before = contact.take(message)
                if not contact.host:
                    contact.host, contact.pid = host, pid
                    self._event("guest_joined", rank=rank, host=host, pid=pid)
                if self.states[rank] == "standby":
                    if not reason:
                        self._take(rank, "starting", drain="", active="rollout", starts=self.rows[rank].starts + 1)
                    elif not message.returns:
                        self._left(rank)
                elif reason and self.states[rank] != "leaving":
                    self._take(rank, "leaving", drain="abort")
                    self._event("guest_leaves", rank=rank, reason=reason)
                self._on_engines(rank, contact, before, now)
            case wire.Fatal(reason=reason):
                self._lose(rank, reason, now)

    def _take(self, rank: int, state: GuestState, **changes: object) -> None:
        self.states[rank] = state
        self.rows[rank] = msgspec.structs.replace(self.rows[rank], state=state, **changes)

    def _on_engines(self, rank: int, contact: NodeContact, before: Mapping[str, ObservedEngine], now: float) -> None:
        state, row = self.states.get(rank), self.rows.get(rank)
        if row is None or state in ("leaving", "standby"):
            return
        if states.ended(before, contact.engines, "rollout"):
            self._take(rank, "starting", starts=row.starts + 1)
        elif state == "starting" and states.at_work(contact.engines, "rollout", row.starts):
            seconds = now - contact.since
            self._take(rank, "serving")
            self.start_s = self.start_s if row.starts else seconds
            self._event("guest_serves", rank=rank, seconds=seconds)

    def on_drained(self, rank: int, starts: int) -> None:
        """No turn of it is in flight any more, since it was to drain."""
        if self.states.get(rank) != "leaving" or self.rows[rank].starts != starts:
            return
        beat = self.contacts[rank].beat
        if beat is not None and beat.returns:
            self._take(rank, "standby", active=None)
            self._event("guest_sleeps", rank=rank)
        else:
            self._left(rank)

    def _left(self, rank: int) -> None:
        self._event("guest_left", rank=rank)
        self._stop(rank, "it left")

    def check(self, unreachable: set[int], now: float) -> None:
        """Lose silent guests and those in ``unreachable``."""
        for rank, contact in list(self.contacts.items()):
            silent_s = now - contact.seen
            if rank in unreachable:
                self._lose(rank, "its connection broke", now)
            elif silent_s >= HEARTBEAT_LOST_S:
                self._lose(rank, f"no heartbeat for {silent_s:.0f} s", now)

    def _lose(self, rank: int, reason: str, now: float) -> None:
        self._event("guest_lost", rank=rank, reason=reason, silent_s=now - self.contacts[rank].seen)
        self._stop(rank, f"it was given up: {reason}")

    def _stop(self, rank: int, reason: str) -> None:
        """Stop a guest and drop it; one that lives may come again as another one."""
        del self.contacts[rank], self.states[rank], self.rows[rank]
        self._context.send(rank, wire.StopAgent(reason, restart=True))
