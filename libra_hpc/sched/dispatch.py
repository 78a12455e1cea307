"""The dispatcher: the queue of ready turns that a policy routes to engines, live and in the simulator.

- An engine has a free slot -> the turn with the lowest `Policy.key` is offered to `Policy.route`.
- It waits for any slot -> it returns to its place.
- It waits for a sibling -> it is set aside until a trajectory of its prompt ends.
- It waits for one engine -> it is set aside until that engine has a free slot or is closed.
- No open engine admits its trajectory (`admission`) -> it is set aside until one does.
- Nothing waits -> a policy that migrates running turns (`turn_migration`) chooses moves.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from heapq import heappop, heappush

from .admission import Admission
from .board import Board
from .protocol import Decision, Finished, Policy, TurnView
from .turn_migration import Move, Rebalances, Running

MAX_REFUSED = 32
"""Turns that refuse a free slot before a pass ends; offering thousands would cost more than it finds."""
REBALANCE_EVERY_S = 5.0
"""Seconds between two evaluations of running turns; a turn worth moving has minutes left."""


class _Entry:
    __slots__ = ("alive", "key", "number", "parked", "turn")

    def __init__(self, turn: TurnView, key: float, number: int) -> None:
        self.turn = turn
        self.key = key
        self.number = number
        self.alive = True
        self.parked = False


class Dispatcher:
    """Orders and routes the ready turns of one policy; without an ``admission`` every engine admits every turn."""

    def __init__(self, policy: Policy, board: Board, admission: Admission | None = None) -> None:
        self.policy, self.board = policy, board
        self._admission = admission
        self._heap: list[tuple[float, int, _Entry]] = []
        self._entries: dict[str, _Entry] = {}
        self._prompts: dict[str, dict[str, _Entry]] = {}
        self._wanted: dict[str, list[tuple[float, int, _Entry]]] = {}
        self._barred: list[tuple[float, int, _Entry]] = []
        """First turns that no engine admits."""
        self._stranded: list[_Entry] = []
        """Later turns that no engine admits, because their own one is closed or gone."""
        self._count = 0
        self._rebalances = policy if isinstance(policy, Rebalances) else None
        self._rebalance_at = 0.0

    def __len__(self) -> int:
        """Waiting turns."""
        return len(self._entries)

    def ready(self, turn: TurnView, now: float) -> None:
        """Queue a turn; an older turn of the trajectory is replaced."""
        self.withdraw(turn.trajectory)
        self._count += 1
        entry = self._entries[turn.trajectory] = _Entry(turn, self.policy.key(turn, now), self._count)
        self._prompts.setdefault(turn.prompt_id, {})[turn.trajectory] = entry
        if self._admission is not None:
            self._admission.ready(turn)
        self._push(entry)

    def withdraw(self, trajectory: str) -> bool:
        """Remove a waiting turn; False if there is none."""
        entry = self._entries.get(trajectory)
        if entry is None:
            return False
        self._remove(entry)
        return True

    def dispatch(self, now: float) -> list[tuple[TurnView, Decision]]:
        """Route all turns that can start now; the board counts them as sent."""
        routed: list[tuple[TurnView, Decision]] = []
        refused: list[_Entry] = []
        heap, board, route, admission = self._heap, self.board, self.policy.route, self._admission
        if self._wanted:
            self._requeue()
        if admission is not None:
            admission.observe(board, now)
            self._unbar(admission)
        while heap and board.free > 0 and len(refused) < MAX_REFUSED:
            key, _, entry = heappop(heap)
            if not entry.alive or entry.parked or key != entry.key:
                continue
            turn = entry.turn
            if admission is None:
                decision = route(turn, board, now)
            elif (admitted := self._route_admitted(admission, turn, now)) is not None:
                decision = admitted
            else:
                entry.parked = True
                if turn.engine:
                    self._stranded.append(entry)
                else:
                    heappush(self._barred, (key, entry.number, entry))
                continue
            if decision.engine:
                if admission is not None:
                    admission.sent(turn, decision.engine)
                board.sent(decision.engine, turn.context_tokens)
                self._remove(entry)
                routed.append((turn, decision))
            elif decision.wait == "sibling":
                entry.parked = True
            elif decision.wait == "engine":
                entry.parked = True
                heappush(self._wanted.setdefault(decision.wanted, []), (key, entry.number, entry))
            else:
                refused.append(entry)
        for entry in refused:
            self._push(entry)
        return routed

    @property
    def rebalances(self) -> bool:
        """Whether the policy migrates running turns."""
        return self._rebalances is not None

    def rebalance(self, running: Iterable[Running], now: float) -> Sequence[Move]:
        """Running turns to interrupt, and the engines that continue them.

        ``running`` is read only if the policy evaluates it.
        """
        if self._rebalances is None or self._entries or now < self._rebalance_at:
            return ()
        self._rebalance_at = now + REBALANCE_EVERY_S
        return self._rebalances.rebalance(running, self.board, now)

    def finished(self, record: Finished, now: float) -> None:
        """A trajectory ended: the policy learns, and the waiting turns of its prompt get new keys."""
        self.policy.finished(record, now)
        if self._admission is not None:
            self._admission.ended(record.trajectory, record.context_tokens)
        self.release(record.prompt_id, now)

    def forget(self, trajectory: str, prompt_id: str, now: float) -> None:
        """A trajectory was aborted."""
        self.withdraw(trajectory)
        self.policy.forget(trajectory)
        if self._admission is not None:
            self._admission.ended(trajectory, 0)
        self.release(prompt_id, now)

    def release(self, prompt_id: str, now: float) -> None:
        """Recompute the keys of a prompt's waiting turns, and requeue those that were set aside."""
        for entry in self._prompts.get(prompt_id, {}).values():
            key = self.policy.key(entry.turn, now)
            if entry.parked or key != entry.key:
                entry.parked, entry.key = False, key
                self._push(entry)

    def _route_admitted(self, admission: Admission, turn: TurnView, now: float) -> Decision | None:
        """The policy's decision among the engines that admit the turn; None if no open engine does."""
        board = self.board
        is_open = [view for view in board.engines.values() if view.open]
        closed = [view.engine for view in is_open if not admission.admits(turn, view)]
        if closed and len(closed) == len(is_open):
            return None
        for name in closed:
            board.set_open(name, False)
        decision = self.policy.route(turn, board, now)
        for name in closed:
            board.set_open(name, True)
        return decision

    def _unbar(self, admission: Admission) -> None:
        """Requeue the first turns that an open engine admits, up to one that none does, so that none is overtaken for
        ever; and all later turns, whose engine may be open again.
        """
        for entry in self._stranded:
            if entry.alive and entry.parked:
                entry.parked = False
                self._push(entry)
        self._stranded.clear()
        barred = self._barred
        while barred:
            key, _, entry = barred[0]
            if entry.alive and entry.parked and key == entry.key:
                views = self.board.engines.values()
                if not any(view.free and admission.admits(entry.turn, view) for view in views):
                    return
                entry.parked = False
                self._push(entry)
            heappop(barred)

    def _requeue(self) -> None:
        """Requeue turns whose engine has free slots; all of them if it is closed or gone."""
        engines = self.board.engines
        for name, waiting in list(self._wanted.items()):
            view = engines.get(name)
            room = len(waiting) if view is None or not view.open else view.cap - view.inflight
            while waiting and room > 0:
                entry = heappop(waiting)[2]
                if entry.alive and entry.parked:
                    entry.parked = False
                    self._push(entry)
                    room -= 1
            if not waiting:
                del self._wanted[name]

    def _push(self, entry: _Entry) -> None:
        heappush(self._heap, (entry.key, entry.number, entry))

    def _remove(self, entry: _Entry) -> None:
        entry.alive = False
        turn = entry.turn
        del self._entries[turn.trajectory]
        group = self._prompts[turn.prompt_id]
        del group[turn.trajectory]
        if not group:
            del self._prompts[turn.prompt_id]
