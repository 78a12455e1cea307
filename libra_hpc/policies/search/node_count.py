"""How many nodes of one pool train: every number, or branch and bound over intervals of numbers.

- The seconds of a batch neither rise nor fall with n training nodes.
- The bound of an interval has the least training time there, and rollout with as many nodes as its smallest n leaves.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable

GAP = 2e-3
"""Relative difference at which branch and bound drops an interval: a tenth of the models' own error or less."""


class NodeCountSearch:
    """The search over the number of training nodes of one pool, 1..most.

    ``seconds(n)``: of the best plan with n training nodes. ``bound(low, high, best)``: seconds that no plan with
    ``low``..``high`` of them is below; a looser one is enough from ``best`` on.
    """

    def __init__(self, most: int, seconds: Callable[[int], float], bound: Callable[[int, int, float], float]) -> None:
        self._most, self._seconds, self._bound = most, seconds, bound
        self._done: dict[int, float] = {}

    def seconds(self, nodes: int) -> float:
        """Seconds of the best plan with so many training nodes."""
        if nodes not in self._done:
            self._done[nodes] = self._seconds(nodes)
        return self._done[nodes]

    def around(self, count: int) -> list[int]:
        """Numbers of training nodes around the best one so far."""
        if not self._done or math.isinf(min(self._done.values())):
            return []
        best = min(self._done, key=lambda n: self._done[n])
        near = sorted(range(max(1, best - count), min(self._most, best + count) + 1), key=lambda n: abs(n - best))
        return near[:count]

    def branch_and_bound(self) -> float:
        """Best-first over intervals of training nodes; returns a lower bound of the optimum."""
        best = math.inf
        open_intervals: list[tuple[float, int, int]] = [(0.0, 1, self._most)]
        while open_intervals:
            bound, a, b = heapq.heappop(open_intervals)
            if bound >= best * (1.0 - GAP):
                return min(bound, best)
            best = min(best, self.seconds(a))
            if a == b:
                continue
            middle = (a + 1 + b) // 2
            for low, high in ((a + 1, middle), (middle + 1, b)):
                if low <= high:
                    heapq.heappush(open_intervals, (self._bound(low, high, best), low, high))
        return best
