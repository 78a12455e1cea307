"""The dispatcher: the queue of ready turns that a policy routes to engines, live and in the simulator.

- An engine has a free slot -> the turn with the lowest `Policy.key` is offered to `Policy.route`.
- It waits for any slot -> it returns to its place, after `MAX_REFUSED` of them behind the turns behind it.
- It waits for its last engine -> it is set aside until that engine has a free slot or new weights, or takes no turns.
- It waits for room in a KV cache -> it is set aside, and offered first, until the first of these still has no room.
"""

from __future__ import annotations

from heapq import heappop, heappush
from math import inf

from .board import Board
from .protocol import Decision, Finished, Policy, TurnView

MAX_REFUSED = 32
"""Turns that refuse a free slot before a pass ends; offering thousands would cost more than it finds. The next pass,
at most a second later, begins with those behind them.
"""

_Entry = tuple[float, int, int, TurnView]
"""Key of a waiting turn, its number in the order of arrival, a number of its own, and the turn."""


class Dispatcher:
    """Orders and routes the ready turns of one policy."""

    def __init__(self, policy: Policy, board: Board) -> None:
        self.policy, self.board = policy, board
        self._entries: dict[str, _Entry] = {}
        """Waiting turns by trajectory; entries of heaps that are not here are dropped."""
        self._heap: list[_Entry] = []
        self._roomless: list[_Entry] = []
        """Heap of the turns that wait for room."""
        self._last: dict[tuple[str, int], list[_Entry]] = {}
        """Heap of the turns that wait for an engine, which has the weights of a version."""
        self._refused: list[_Entry] = []
        """Turns that refused in passes that ended before the last waiting turn was offered."""
        self._count = 0

    def __len__(self) -> int:
        """Waiting turns."""
        return len(self._entries)

    @property
    def waiting_for_room(self) -> int:
        """Waiting turns that no KV cache has room for."""
        return sum(1 for entry in self._roomless if self._waits(entry))

    def ready(self, turn: TurnView, now: float) -> None:
        """Queue a turn; an older turn of the trajectory is replaced."""
        self._put(turn, self.policy.key(turn, now), self._count)

    def withdraw(self, trajectory: str) -> None:
        """Remove a waiting turn, if there is one."""
        self._entries.pop(trajectory, None)

    def dispatch(self, now: float) -> list[tuple[TurnView, Decision]]:
        """Route all turns that can start now; the board counts them as sent."""
        routed: list[tuple[TurnView, Decision]] = []
        refused: list[_Entry] = []
        heap, roomless, board, route = self._heap, self._roomless, self.board, self.policy.route
        if board.free > 0:
            for engine, version in list(self._last):
                self._requeue(engine, version)
        while roomless:
            entry = roomless[0]
            if self._waits(entry):
                board.room_key = entry[0]
                if board.free == 0:
                    break
                decision = route(entry[3], board, now)
                if not decision.engine and decision.wait == "room":
                    break
                self._settle(entry, decision, routed, refused)
            heappop(roomless)
        else:
            board.room_key = inf
        while heap and board.free > 0 and len(refused) < MAX_REFUSED:
            entry = heappop(heap)
            if self._waits(entry):
                self._settle(entry, route(entry[3], board, now), routed, refused)
        self._return(refused)
        return routed

    def finished(self, record: Finished, now: float) -> None:
        """A trajectory ended: the policy learns, and the waiting turns of its prompt get new keys."""
        self.policy.finished(record, now)
        self._rekey(record.prompt_id, now)

    def drop(self, trajectory: str, prompt_id: str, now: float) -> None:
        """A trajectory was aborted."""
        self.withdraw(trajectory)
        self.policy.forget(trajectory)
        self._rekey(prompt_id, now)

    def _rekey(self, prompt_id: str, now: float) -> None:
        """Recompute the keys of a prompt's waiting turns."""
        for key, number, _, turn in [entry for entry in self._entries.values() if entry[3].prompt_id == prompt_id]:
            if (new := self.policy.key(turn, now)) != key:
                self._put(turn, new, number)

    def _put(self, turn: TurnView, key: float, number: int) -> None:
        self._count += 1
        entry = self._entries[turn.trajectory] = key, number, self._count, turn
        heappush(self._heap, entry)

    def _waits(self, entry: _Entry) -> bool:
        found = self._entries.get(entry[3].trajectory)
        return found is not None and found[2] == entry[2]

    def _settle(
        self, entry: _Entry, decision: Decision, routed: list[tuple[TurnView, Decision]], refused: list[_Entry]
    ) -> None:
        """Send a turn, or set it aside until that for which it waits is there."""
        turn, board = entry[3], self.board
        if decision.engine:
            board.sent(decision.engine, turn.context_tokens)
            del self._entries[turn.trajectory]
            routed.append((turn, decision))
        elif decision.wait == "room":
            board.room_key = min(entry[0], board.room_key)
            heappush(self._roomless, entry)
        elif decision.wait == "last" and turn.engine in board.engines:
            version = board.engines[turn.engine].version
            heappush(self._last.setdefault((turn.engine, version), []), entry)
        else:
            refused.append(entry)

    def _return(self, refused: list[_Entry]) -> None:
        """Put turns that refused back in their places, once all waiting turns have been offered or no slot is left."""
        self._refused += refused
        if not self._heap or self.board.free <= 0:
            for entry in self._refused:
                heappush(self._heap, entry)
            self._refused.clear()

    def _requeue(self, engine: str, version: int) -> None:
        """Offer as many of the turns that wait for an engine as it has free slots; all, if the wait is in vain."""
        waiting, view = self._last[engine, version], self.board.engines.get(engine)
        count = view.free if view is not None and view.open and view.version == version else len(waiting)
        while waiting and count > 0:
            entry = heappop(waiting)
            if self._waits(entry):
                heappush(self._heap, entry)
                count -= 1
        if not waiting:
            del self._last[engine, version]
