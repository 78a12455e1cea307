"""`round_robin`: every turn goes to the next engine in the order they joined, whatever their load.

The default of simple routers.  A prefix is found in the cache only by chance.
"""

from __future__ import annotations

from libra_hpc.policies.scheduling.board import Board
from libra_hpc.policies.scheduling.protocol import Decision, TurnView
from libra_hpc.policies.scheduling.rules.rule import Rule, eligible, wait


class RoundRobin(Rule):
    """The next eligible engine in the order they joined."""

    name = "round_robin"

    def __init__(self) -> None:
        self._last = ""

    def route(self, turn: TurnView, board: Board, now: float) -> Decision:
        """See `Policy.route`."""
        free = eligible(turn, board)
        if not free:
            return wait(board)
        place = {engine: i for i, engine in enumerate(board.engines)}
        after = place.get(self._last, -1)
        chosen = min(free, key=lambda e: (place[e.engine] - after - 1) % len(place))
        self._last = chosen.engine
        reason, numbers = "{engine} is next in turn", {"engine": chosen.engine}
        return Decision(engine=chosen.engine, priority=0, level=chosen.level, template=reason, numbers=numbers)
