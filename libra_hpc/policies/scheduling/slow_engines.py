"""Which engines take longer than others of their kind: named in the status, and priced by `costs`.

Engines of one TP degree and about one KV capacity should be equally fast.  The reference is their median pace.

- An engine takes `SLOW` times the reference for `SURE_S` -> it is named, with the time at which that began.
- It takes less than `RECOVERED` times -> it is no longer named.
- Half of the engines are slow, or there are fewer than `MIN_ENGINES` -> none is: they may be GPUs of another kind.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from .board import Board, EngineView

SLOW: Final = 1.5
"""A ratio.  The pace of equal engines differs by up to 1.2; at 2.0 a slow engine that costs a fifth goes unnamed."""
RECOVERED: Final = 1.25
"""A ratio below `SLOW`, so that an engine is not named and dropped in turns."""
SURE_S: Final = 30.0
"""Seconds: a load that the step costs do not describe passes in less."""
MIN_ENGINES: Final = 3
"""Fewest engines to compare: of two unequal ones nobody knows which one is right."""
SAME_KV: Final = 1.1
"""Largest ratio of KV capacities of engines of one kind: the memory left for it depends on the GPU."""


class SlowEngine(NamedTuple):
    engine: str
    ratio: float
    """Its time per step over the median one."""
    since: float
    """Epoch seconds."""


class SlowEngines:
    """Call `update` about once a second."""

    def __init__(self) -> None:
        self._since: dict[str, float] = {}
        """When each engine that is slow now became slow."""
        self._named: set[str] = set()

    def update(self, board: Board, now: float) -> list[SlowEngine]:
        """The engines to name, the slowest first."""
        ratios = {view.engine: ratio for kind in _kinds(board) for view, ratio in _ratios(kind)}
        self._since = {name: since for name, since in self._since.items() if ratios.get(name, 0.0) > RECOVERED}
        self._named &= self._since.keys()
        for name, ratio in ratios.items():
            if ratio < SLOW and name not in self._named:
                self._since.pop(name, None)
            elif now - self._since.setdefault(name, now) >= SURE_S:
                self._named.add(name)
        found = [SlowEngine(name, ratios[name], self._since[name]) for name in self._named]
        return sorted(found, key=lambda slow: -slow.ratio)


def _kinds(board: Board) -> list[list[EngineView]]:
    """The engines by TP degree and KV capacity."""
    kinds: list[list[EngineView]] = []
    for tp_class in board.classes:
        smallest = 0.0
        for view in sorted((v for v in tp_class.members if not v.borrowed), key=lambda v: v.kv_capacity):
            if view.kv_capacity > SAME_KV * smallest:
                smallest = view.kv_capacity
                kinds.append([])
            kinds[-1].append(view)
    return kinds


def _ratios(kind: list[EngineView]) -> list[tuple[EngineView, float]]:
    """Time per step of each engine over the median one."""
    if len(kind) < MIN_ENGINES:
        return []
    median = sorted(view.pace for view in kind)[len(kind) // 2]
    return [(view, view.pace / median) for view in kind]
