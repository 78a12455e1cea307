"""The best training layout on a number of devices: TP, PP, CP, EP, DP, micro-batch and recomputation; exact.

All degrees that the model allows (`ModelShape.trains`) and that divide the devices are candidates.
`TrainCost.device_seconds` is a lower bound for any DP. Candidates are evaluated in its order, until it exceeds the best
time.

- A layout that does not fit in memory -> excluded, with the reason.
- TP stays within a node.
- Micro-batches are powers of two, from the mean trajectory on.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import msgspec

from libra_hpc.cost_models.memory import RECOMPUTE, Limit, Recompute, TrainLayout, TrainMemory
from libra_hpc.cost_models.training_time import TrainCost, TrainTime

MOST_MICRO_TOKENS = 65536
"""Largest micro-batch, unless one trajectory is longer: kernels are efficient long before."""


class TrainSpace(msgspec.Struct, frozen=True):
    """Degrees to search; those that the model does not allow are skipped."""

    tp: tuple[int, ...] = (1, 2, 4, 8)
    pp: tuple[int, ...] = (1, 2, 4, 8, 16)
    cp: tuple[int, ...] = (1, 2, 4, 8)
    ep: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    recompute: tuple[Recompute, ...] = RECOMPUTE
    distributed: tuple[bool, ...] = (False,)
    """Optimizer state divided over data-parallel ranks; False also holds where the core is one replica."""
    replica_devices: int = 0
    """Most devices of a data-parallel replica; 0: any."""
    least_devices: int = 0
    """Fewest devices of one: those of a node where each training node is one replica."""


class TrainChoice(msgspec.Struct, frozen=True):
    layout: TrainLayout
    time: TrainTime
    memory: TrainMemory


class Excluded(msgspec.Struct, frozen=True):
    what: str
    limit: Limit


class TrainSearch:
    """Best layouts by number of devices; results are cached."""

    def __init__(self, cost: TrainCost, devices_per_node: int, space: TrainSpace = TrainSpace()) -> None:  # noqa: B008
        self._cost = cost
        shards = [(cost.device_seconds(shard), shard) for shard in _shards(cost, devices_per_node, space)]
        self._shards = sorted(shards, key=lambda s: s[0])
        self._replicas = [shard.replica for _, shard in self._shards]
        self._best: dict[int, TrainChoice | None] = {}
        self._limits: dict[tuple[int, int, int], Limit | None] = {}

    def best(self, devices: int) -> TrainChoice | None:
        """The fastest layout of exactly ``devices`` devices that fits, or None."""
        if devices not in self._best:
            self._best[devices] = self._search(devices)
        return self._best[devices]

    def seconds(self, devices: int) -> float:
        """Its seconds per global batch; infinite without one."""
        found = self.best(devices)
        return math.inf if found is None else found.time.total

    def candidates(self, devices: int) -> Iterator[TrainLayout]:
        """Every layout of exactly ``devices`` devices, fitting or not."""
        for _, layout in self._spread(devices):
            yield layout

    def excluded(self, devices: int) -> list[Excluded]:
        """For each (TP, PP, CP, EP) without a fitting variant, the variant nearest to fitting; nearest first."""
        nearest: dict[tuple[int, int, int, int], tuple[TrainLayout, Limit] | None] = {}
        for index, layout in self._spread(devices):
            key = (layout.tp, layout.pp, layout.cp, layout.ep)
            limit = self._limit(index, layout)
            seen = nearest.get(key)
            if limit is None:
                nearest[key] = None
            elif key not in nearest or (seen is not None and limit.over < seen[1].over):
                nearest[key] = (layout, limit)
        found = [
            Excluded(f"training {layout}{layout.recomputed}", limit)
            for entry in nearest.values()
            if entry is not None
            for layout, limit in [entry]
        ]
        return sorted(found, key=lambda e: e.limit.over)

    def _search(self, devices: int) -> TrainChoice | None:
        best: tuple[float, TrainLayout, TrainTime] | None = None
        for index, layout in self._spread(devices):
            if best is not None and self._shards[index][0] / devices >= best[0]:
                break
            if self._limit(index, layout) is None:
                time = self._cost.time(layout)
                if best is None or time.total < best[0]:
                    best = (time.total, layout, time)
        return None if best is None else TrainChoice(best[1], best[2], self._cost.memory(best[1]))

    def _spread(self, devices: int) -> Iterator[tuple[int, TrainLayout]]:
        """Layouts of exactly ``devices`` devices with the index of their shard, in the order of the bound."""
        for index, (_, shard) in enumerate(self._shards):
            dp, rest = divmod(devices, self._replicas[index])
            if dp and not rest and not dp % shard.ep:
                yield (
                    index,
                    TrainLayout(
                        tp=shard.tp,
                        pp=shard.pp,
                        cp=shard.cp,
                        ep=shard.ep,
                        dp=dp,
                        micro_tokens=shard.micro_tokens,
                        recompute=shard.recompute,
                        distributed=shard.distributed,
                    ),
                )

    def _limit(self, index: int, layout: TrainLayout) -> Limit | None:
        # Without a distributed optimizer memory depends on dp only through the micro-batches in flight.
        in_flight = min(layout.pp, self._cost.micro_batches(layout))
        key = (index, in_flight, layout.dp if layout.distributed else 0)
        if key not in self._limits:
            self._limits[key] = self._cost.limit(layout)
        return self._limits[key]


def _shards(cost: TrainCost, devices_per_node: int, space: TrainSpace) -> Iterator[TrainLayout]:
    """Every layout that the model allows, with the least dp that holds its experts."""
    shape = cost.shape
    for tp in space.tp:
        for pp in (p for p in space.pp if tp <= devices_per_node and shape.trains(tp, p)):
            for cp in space.cp:
                if tp * pp * cp < space.least_devices or (
                    space.replica_devices and tp * pp * cp > space.replica_devices
                ):
                    continue
                for ep in (e for e in space.ep if e == 1 or (shape.experts and shape.experts % e == 0)):
                    for micro in _micro_tokens(cost):
                        for recompute in space.recompute:
                            for distributed in space.distributed:
                                yield TrainLayout(
                                    tp=tp,
                                    pp=pp,
                                    cp=cp,
                                    ep=ep,
                                    dp=ep,
                                    micro_tokens=micro,
                                    recompute=recompute,
                                    distributed=distributed,
                                )


def _micro_tokens(cost: TrainCost) -> list[int]:
    lengths = cost.batch.lengths
    size = 1 << max(0, math.ceil(math.log2(lengths.context)))
    top = max(MOST_MICRO_TOKENS, 1 << math.ceil(math.log2(lengths.longest_context)))
    sizes = [size]
    while sizes[-1] < min(top, cost.batch.tokens):
        sizes.append(2 * sizes[-1])
    return sizes
