"""The best training layout on a number of devices: TP, PP, CP, EP, ETP, DP, micro-batch and recomputation; exact.

Candidates are the layouts that the runtime can run (`libra_hpc.models.train_parallel.runs`) within a `TrainSpace`.
`TrainCost.device_seconds` is a lower bound for any DP. Candidates are evaluated in its order, until it exceeds the best
time. One whose longest trajectory takes longer is left out.

- A layout that does not fit in memory -> excluded, with the reason.
- ``elastic``: so many hybrid nodes can train beside the core: they are a whole number of replicas, which fit on them.
- ``worlds``: so many worlds of ``elastic`` nodes do, and the time is that of all.
- Seconds that differ by less than `ROUNDING` are equal: the layout with fewer context ranks is taken.
- Micro-batches are powers of two, from the mean trajectory on.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import msgspec

from libra_hpc.config.learn import Recompute
from libra_hpc.config.node_groups import Degrees
from libra_hpc.models.memory import RECOMPUTE, Limit, TrainLayout, TrainMemory
from libra_hpc.models.train_parallel import runs
from libra_hpc.models.train_seconds import HybridWorlds, TrainCost, TrainTime

MOST_MICRO_TOKENS = 65536
"""Largest micro-batch, unless one trajectory is longer: kernels are efficient long before."""

ROUNDING = 1e-3
"""Resolution of predicted seconds. Half, double: hardly seen. `plan` prints three or four digits, and the models err by
more."""


class TrainSpace(msgspec.Struct, frozen=True):
    """Degrees to search; those that cannot run are skipped."""

    tp: tuple[int, ...] = (1, 2, 3, 4, 6, 8)
    pp: tuple[int, ...] = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16)
    cp: tuple[int, ...] = (1, 2, 4, 8)
    ep: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128)
    """With tensor ranks of an expert as many as those of the rest, or one."""
    recompute: tuple[Recompute, ...] = RECOMPUTE
    host: bool = False
    """Whether AdamW's state is in host memory."""


class Hybrid(msgspec.Struct, frozen=True):
    """Which nodes of the training pool are hybrid: they roll out, and can train beside the core."""

    most: int = 0
    """At most so many; one node rolls out only. None where no training layout fits on a hybrid node."""
    rest: bool = False
    """All that do not train, because a run file has no other place for them."""
    world: int = 1
    """Nodes that train together."""

    def nodes(self, left: int) -> int:
        """Return how many of ``left`` nodes beside the core are hybrid: whole worlds unless there is no other place."""
        return left if self.rest else max(0, min(self.most, left - 1)) // self.world * self.world


NO_HYBRID = Hybrid()


class TrainChoice(msgspec.Struct, frozen=True):
    layout: TrainLayout
    time: TrainTime
    memory: TrainMemory


class Excluded(msgspec.Struct, frozen=True):
    what: str
    limit: Limit


class TrainSearch:
    """Best layouts by number of devices, which are whole nodes; results are cached."""

    def __init__(self, cost: TrainCost, devices_per_node: int, space: TrainSpace = TrainSpace()) -> None:  # noqa: B008
        self._cost, self._node = cost, devices_per_node
        shards = [(cost.device_seconds(shard), shard) for shard in _shards(cost, devices_per_node, space)]
        self._shards = sorted(shards, key=lambda s: s[0])
        self._replicas = [shard.replica for _, shard in self._shards]
        self._all = range(len(self._shards))
        self._able: Sequence[int] = self._all
        """Indices of shards without those found never to fit."""
        self._best: dict[tuple[int, int, int], TrainChoice | None] = {}
        self._bounds: dict[tuple[int, int, bool], tuple[int, float]] = {}
        """(Largest dp that does not fit, smallest that does) by shard, micro-batches in flight and `shared`."""
        self._hopeless: dict[int, bool] = {}
        self._runs: dict[tuple[Degrees, int], bool] = {}

    def best(self, devices: int, *, elastic: int = 0, worlds: int = 0) -> TrainChoice | None:
        """The fastest layout of a core of exactly ``devices`` devices that fits, or None."""
        key = devices, elastic, worlds
        if key not in self._best:
            self._best[key] = self._search(*key)
        return self._best[key]

    def candidates(self, devices: int) -> Iterator[TrainLayout]:
        """Every layout of exactly ``devices`` devices, fitting or not."""
        for _, layout in self._spread(devices, self._all):
            yield layout

    def runs_beside(self, layout: TrainLayout, nodes: int = 1) -> bool:
        """Whether so many hybrid nodes alone are a whole number of replicas of ``layout``."""
        return self._can_run(layout.degrees, nodes)

    def excluded(self, devices: int) -> list[Excluded]:
        """For all degrees without a fitting variant, the variant nearest to fitting; nearest first."""
        nearest: dict[Degrees, tuple[TrainLayout, Limit] | None] = {}
        for _, layout in self._spread(devices, self._all):
            key = layout.degrees
            seen = nearest.get(key)
            if key in nearest and seen is None:
                continue
            limit = self._cost.limit(layout)
            if limit is None:
                nearest[key] = None
            elif seen is None or limit.over < seen[1].over:
                nearest[key] = (layout, limit)
        found = [
            Excluded(f"training {layout}{layout.recomputed}", limit)
            for entry in nearest.values()
            if entry is not None
            for layout, limit in [entry]
        ]
        return sorted(found, key=lambda e: e.limit.over)

    def _search(self, devices: int, elastic: int, worlds: int) -> TrainChoice | None:
        # Whatever takes up to this time may be as good as the fastest.
        most, found = math.inf, list[tuple[TrainTime, TrainLayout]]()
        beside = elastic * self._node
        never: set[int] = set()
        for index, layout in self._spread(devices, self._able):
            seconds, shard = self._shards[index]
            if seconds / (devices + worlds * beside) >= most:
                break
            if seconds / shard.replica * self._cost.longest_share >= most:
                continue
            if self._never(index):
                never.add(index)
            elif self._fits(index, layout, elastic > 0) and (not elastic or self._fits_beside(layout, elastic)):
                time = self._cost.time(layout, HybridWorlds(worlds, beside // layout.replica))
                most = min(most, time.total * (1.0 + ROUNDING))
                found.append((time, layout))
        if never:
            self._able = [index for index in self._able if index not in never]
        equal = [(time, layout) for time, layout in found if time.total <= most]
        if not equal:
            return None
        time, layout = min(equal, key=lambda one: (one[1].cp, one[0].total))
        return TrainChoice(layout, time, self._cost.memory(layout, elastic > 0))

    def _spread(self, devices: int, indices: Sequence[int]) -> Iterator[tuple[int, TrainLayout]]:
        """Layouts of exactly ``devices`` devices with the index of their shard, in the order of the bound."""
        for index in indices:
            dp, rest = divmod(devices, self._replicas[index])
            if dp and not rest and self._can_run(self._shards[index][1].degrees, devices // self._node):
                yield index, msgspec.structs.replace(self._shards[index][1], dp=dp)

    def _never(self, index: int) -> bool:
        if index not in self._hopeless:
            self._hopeless[index] = self._cost.never_fits(self._shards[index][1])
        return self._hopeless[index]

    def _fits_beside(self, layout: TrainLayout, nodes: int) -> bool:
        own = msgspec.structs.replace(layout, dp=nodes * self._node // layout.replica, elastic=True)
        return self.runs_beside(layout, nodes) and self._cost.limit(own) is None

    def _can_run(self, degrees: Degrees, nodes: int) -> bool:
        if (degrees, nodes) not in self._runs:
            self._runs[degrees, nodes] = runs(self._cost.shape, degrees, nodes, self._node)
        return self._runs[degrees, nodes]

    def _fits(self, index: int, layout: TrainLayout, shared: bool) -> bool:
        """More data-parallel ranks need less memory each, as long as the micro-batches in flight are as many."""
        key = index, min(layout.pp, self._cost.micro_batches(layout)), shared
        most, least = self._bounds.get(key, (0, math.inf))
        if most < layout.dp < least:
            fits = self._cost.limit(layout, shared) is None
            most, least = (most, layout.dp) if fits else (layout.dp, least)
            self._bounds[key] = most, least
        return layout.dp >= least


def _shards(cost: TrainCost, devices_per_node: int, space: TrainSpace) -> Iterator[TrainLayout]:
    """Every layout that the model allows, as one replica."""
    shape, sizes = cost.shape, _micro_tokens(cost)
    for tp in (t for t in space.tp if devices_per_node % t == 0):
        for pp in (p for p in space.pp if shape.trains(tp, p)):
            for cp in space.cp:
                for ep, etp in _experts(cost, tp, space):
                    for micro in sizes:
                        for recompute in space.recompute:
                            yield TrainLayout(tp, pp, cp, ep, 1, micro, recompute, etp, host=space.host)


def _experts(cost: TrainCost, tp: int, space: TrainSpace) -> Iterator[tuple[int, int]]:
    """(EP, ETP); ETP 0 stands for TP."""
    for ep in (e for e in space.ep if e == 1 or (cost.shape.experts and cost.shape.experts % e == 0)):
        yield ep, 0
        if ep > 1 and tp > 1:
            yield ep, 1


def _micro_tokens(cost: TrainCost) -> list[int]:
    size = 1 << max(0, math.ceil(math.log2(cost.work.mean)))
    top = max(MOST_MICRO_TOKENS, 1 << math.ceil(math.log2(cost.work.longest)))
    sizes = [size]
    while sizes[-1] < min(top, cost.work.tokens):
        sizes.append(2 * sizes[-1])
    return sizes
