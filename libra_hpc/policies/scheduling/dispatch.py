"""The dispatcher: the queue of ready turns that a policy routes to engines, live and in the simulator.

- An engine has a free slot -> the turn with the lowest `Policy.key` is offered to `Policy.route`.
- It waits for any slot -> it returns to its place.
- It waits for its last engine -> it is set aside until that engine has a free slot, or takes no turns.
- It waits for a sibling -> it is set aside until a trajectory of its prompt ends.
- It waits for room in a KV cache -> it is set aside, and offered first, until the first of these still has no room.
- Nothing waits -> a policy that migrates running turns (`turn_migration`) chooses moves.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from heapq import heappop, heappush
from math import inf

from .board import Board
from .protocol import Decision, Finished, Policy, TurnView
from .turn_migration import Rebalances, Running, TurnMigration

MAX_REFUSED = 32
"""Turns that refuse a free slot before a pass ends; offering thousands would cost more than it finds."""
REBALANCE_EVERY_S = 5.0
"""Seconds between two evaluations of running turns; a turn worth moving has minutes left."""


class _Entry:
    def __init__(self, turn: TurnView, key: float, number: int) -> None:
        self.turn = turn
        self.key = key
        self.number = number
        self.alive = True
        self.parked = False


class Dispatcher:
    """Orders and routes the ready turns of one policy."""

    def __init__(self, policy: Policy, board: Board) -> None:
        self.policy, self.board = policy, board
        self._heap: list[tuple[float, int, _Entry]] = []
        self._entries: dict[str, _Entry] = {}
        self._prompts: dict[str, dict[str, _Entry]] = {}
        self._roomless: list[tuple[float, int, _Entry]] = []
        self._home: dict[str, list[tuple[float, int, _Entry]]] = {}
        """By engine: heap of the turns that wait for it."""
        self._count = 0
        self._rebalances = policy if isinstance(policy, Rebalances) else None
        self._rebalance_at = 0.0

    def __len__(self) -> int:
        """Waiting turns."""
        return len(self._entries)

    @property
    def waiting_for_room(self) -> int:
        """Waiting turns that no KV cache has room for."""
        return sum(1 for key, _, entry in self._roomless if entry.alive and entry.parked and key == entry.key)

    def ready(self, turn: TurnView, now: float) -> None:
        """Queue a turn; an older turn of the trajectory is replaced."""
        self.withdraw(turn.trajectory)
        self._count += 1
        entry = self._entries[turn.trajectory] = _Entry(turn, self.policy.key(turn, now), self._count)
        self._prompts.setdefault(turn.prompt_id, {})[turn.trajectory] = entry
        self._push(entry)

    def withdraw(self, trajectory: str) -> None:
        """Remove a waiting turn, if there is one."""
        entry = self._entries.get(trajectory)
        if entry is not None:
            self._remove(entry)

    def dispatch(self, now: float) -> list[tuple[TurnView, Decision]]:
        """Route all turns that can start now; the board counts them as sent."""
        routed: list[tuple[TurnView, Decision]] = []
        refused: list[_Entry] = []
        heap, board, route = self._heap, self.board, self.policy.route
        if board.free > 0:
            for engine in list(self._home):
                self._requeue(engine)
        if self._roomless:
            self._offer_room(routed, now)
        while heap and board.free > 0 and len(refused) < MAX_REFUSED:
            key, _, entry = heappop(heap)
            if not entry.alive or entry.parked or key != entry.key:
                continue
            turn = entry.turn
            decision = route(turn, board, now)
            if decision.engine:
                self._send(entry, decision, routed)
            elif decision.wait == "sibling":
                entry.parked = True
            elif decision.wait == "room":
                entry.parked = True
                heappush(self._roomless, (key, entry.number, entry))
                board.room_key = min(key, board.room_key)
            elif decision.wait == "home":
                entry.parked = True
                heappush(self._home.setdefault(turn.engine, []), (key, entry.number, entry))
            else:
                refused.append(entry)
        for entry in refused:
            self._push(entry)
        return routed

    @property
    def rebalances(self) -> bool:
        """Whether the policy migrates running turns."""
        return self._rebalances is not None

    def rebalance(self, running: Iterable[Running], now: float) -> Sequence[TurnMigration]:
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
        self.release(record.prompt_id, now)

    def drop(self, trajectory: str, prompt_id: str, now: float) -> None:
        """A trajectory was aborted."""
        self.withdraw(trajectory)
        self.policy.forget(trajectory)
        self.release(prompt_id, now)

    def release(self, prompt_id: str, now: float) -> None:
        """Recompute the keys of a prompt's waiting turns, and requeue those that were set aside."""
        for entry in self._prompts.get(prompt_id, {}).values():
            key = self.policy.key(entry.turn, now)
            if entry.parked or key != entry.key:
                entry.parked, entry.key = False, key
                self._push(entry)

    def _offer_room(self, routed: list[tuple[TurnView, Decision]], now: float) -> None:
        """Route the turns that wait for room, in order, until one still has none."""
        waiting, board = self._roomless, self.board
        while waiting:
            key, _, entry = waiting[0]
            if not entry.alive or not entry.parked or key != entry.key:
                heappop(waiting)
                continue
            board.room_key = key
            if board.free == 0:
                return
            decision = self.policy.route(entry.turn, board, now)
            if decision.engine:
                heappop(waiting)
                self._send(entry, decision, routed)
            elif decision.wait == "room":
                return
            else:
                heappop(waiting)
                entry.parked = False
                self._push(entry)
        board.room_key = inf

    def _requeue(self, engine: str) -> None:
        """Offer as many of the turns that wait for an engine as it has free slots; all, if it takes no turns."""
        waiting, view = self._home[engine], self.board.engines.get(engine)
        count = view.free if view is not None and view.open else len(waiting)
        while waiting and count > 0:
            key, _, entry = heappop(waiting)
            if entry.alive and entry.parked and key == entry.key:
                entry.parked = False
                self._push(entry)
                count -= 1
        if not waiting:
            del self._home[engine]

    def _send(self, entry: _Entry, decision: Decision, routed: list[tuple[TurnView, Decision]]) -> None:
        self.board.sent(decision.engine, entry.turn.context_tokens)
        self._remove(entry)
        routed.append((entry.turn, decision))

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
