"""How many nodes of one pool train: every number, or branch and bound over intervals of numbers.

- The seconds of a batch with n training nodes come from `PlanSearch.build`; they neither rise nor fall with n.
- The bound of an interval has the least training time there, and rollout with as many nodes as its smallest n leaves.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .best_plan import PlanSearch, RunPlan

GAP = 2e-3
"""Relative difference at which branch and bound drops an interval: a tenth of the models' own error or less."""


class NodeCountSearch:
    """The search over the number of training nodes of one pool, 1..most."""

    def __init__(
        self, search: PlanSearch, have: Sequence[int], pool: int, most: int, found: dict[tuple[int, int], RunPlan]
    ) -> None:
        self._search, self._have, self._pool, self._most, self._found = search, have, pool, most, found
        self._done: dict[int, float] = {}

    def seconds(self, nodes: int) -> float:
        """Seconds of the best plan with so many training nodes; records the plan."""
        if nodes not in self._done:
            plan = self._search.build(self._have, self._pool, nodes)
            if plan is not None:
                self._found[self._pool, nodes] = plan
            self._done[nodes] = math.inf if plan is None else plan.seconds
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

    def _bound(self, low: int, high: int, best: float) -> float:
        """Seconds that no plan with ``low``..``high`` training nodes is below.

        Rollout is not faster with fewer nodes or a longer wait: its time at ``low`` after the least one bounds all.
        """
        search = self._search
        train = min(search.train_seconds(self._have, self._pool, n) for n in range(low, high + 1))
        if search.batch_seconds(train, 0.0) >= best:
            return search.batch_seconds(train, 0.0)
        devices = search.rest(self._have, self._pool, low)
        return search.batch_seconds(train, search.rollout_seconds(devices, search.lag(train)))
