"""The best rollout layout when the scheduler cannot sort by length: every replica gets a fair sample.

Within a time T, a replica serves the share 1 / r(T) of the batch; r(T) such replicas would serve all of it. Shares add
up, so the best class of a pool is the one with the largest share per device. Only layouts of one class per pool need
comparing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product

from libra_hpc.policies.costs.rollout_time import ReplicaCost

from .rollout_layout import ReplicaClass, RolloutLayout, Segment

CLOSE = 1e-9
"""Relative width at which a bisection over seconds or replicas ends."""


class EvenRolloutSearch:
    """Searches one set of classes; the interface of `libra_hpc.policies.search.rollout_layout.RolloutSearch`."""

    def __init__(self, costs: Sequence[ReplicaClass], bins: int) -> None:
        # A fair sample has every length, so the longest must fit everywhere.
        self.costs = [c for c in costs if c.replica.limit() is None and c.replica.fits(bins - 1)]
        self._bins = bins

    def best(self, devices: Sequence[int], lag: float = 0.0) -> RolloutLayout | None:
        """The layout of least time; None when no class holds the longest trajectories.

        ``lag``: see `ReplicaCost.time`.
        """
        chosen = [(c, devices[c.pool] // c.tp) for c in self.costs if devices[c.pool] >= c.tp]
        if not chosen:
            return None
        first = min((self.only(c, n, lag) for c, n in chosen), key=lambda layout: layout.seconds)
        if len({c.pool for c, _ in chosen}) == 1:
            return first
        low, high = 0.0, first.seconds
        while high - low > CLOSE * high:
            middle = (low + high) / 2
            if sum(share for _, _, share in self._picks(chosen, middle, lag)) >= 1.0:
                high = middle
            else:
                low = middle
        picks = self._picks(chosen, high, lag)
        return RolloutLayout(
            tuple(
                Segment(pool=c.pool, tp=c.tp, replicas=n, first=0, last=self._bins - 1, seconds=high)
                for c, n, share in picks
                if share > 0.0
            )
        )

    def straggler(self) -> float:
        """Seconds of the longest trajectories with unlimited replicas: no layout is faster."""
        return min(c.replica.time(0, self._bins - 1, math.inf) for c in self.costs)

    def only(self, cost: ReplicaClass, replicas: int, lag: float = 0.0) -> RolloutLayout:
        return RolloutLayout((cost.segment(replicas, 0, self._bins - 1, lag),))

    def _picks(
        self, chosen: Sequence[tuple[ReplicaClass, int]], seconds: float, lag: float
    ) -> list[tuple[ReplicaClass, int, float]]:
        """Per pool, the class that serves the largest share within ``seconds``."""
        best: dict[int, tuple[ReplicaClass, int, float]] = {}
        for cost, count in chosen:
            share = served_share(cost.replica, count, bins=self._bins, seconds=seconds, lag=lag)
            if cost.pool not in best or share > best[cost.pool][2]:
                best[cost.pool] = (cost, count, share)
        return list(best.values())


def homogeneous_layouts(
    classes: Sequence[ReplicaClass], devices: Sequence[int], bins: int, lag: float = 0.0
) -> list[RolloutLayout]:
    """Every layout with one class on all devices of each pool, for lengths that cannot be sorted."""
    pools = [i for i, count in enumerate(devices) if count]
    by_pool = ([c for c in classes if c.pool == i and c.most(devices[i])] for i in pools)
    found = []
    for chosen in product(*by_pool):
        search = EvenRolloutSearch(chosen, bins)
        layout = search.best(devices, lag=lag) if len(search.costs) == len(pools) else None
        if layout is not None and len(layout.segments) == len(pools):
            found.append(layout)
    return found


def layout_seconds(classes: Sequence[ReplicaClass], layout: RolloutLayout, bins: int) -> float:
    """Seconds of a layout, found for other lengths or options, with these ``classes``; no wait for training.

    Segments that all have every bin share them; others serve their own, the same share of the ``bins`` there are here.
    """
    costs = {(c.pool, c.tp): c for c in classes}
    chosen = [costs[s.pool, s.tp] for s in layout.segments]
    there = 1 + max(s.last for s in layout.segments)
    if len(chosen) > 1 and all(s.first == 0 and s.last == there - 1 for s in layout.segments):
        devices = [layout.devices(pool) for pool in range(1 + max(c.pool for c in chosen))]
        even = EvenRolloutSearch(chosen, bins).best(devices)
        return math.inf if even is None else even.seconds
    slowest = 0.0
    for c, s in zip(chosen, layout.segments, strict=True):
        first, end = round(s.first * bins / there), round((s.last + 1) * bins / there)
        if first < end:
            slowest = max(slowest, c.replica.time(first, end - 1, s.replicas))
    return slowest


def served_share(replica: ReplicaCost, replicas: int, *, bins: int, seconds: float, lag: float = 0.0) -> float:
    """Share of the batch (it can exceed 1) that replicas with a fair sample serve within ``seconds``.

    0.0 when the longest trajectory takes longer.
    """
    last = bins - 1
    if replica.time(0, last, math.inf, lag) > seconds:
        return 0.0
    low, high = 0.0, 1.0
    while replica.time(0, last, replicas / high, lag) <= seconds and high < 1e9:
        low, high = high, 2 * high
    while high - low > CLOSE * high:
        middle = (low + high) / 2
        if replica.time(0, last, replicas / middle, lag) <= seconds:
            low = middle
        else:
            high = middle
    return low
