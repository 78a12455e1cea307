"""Which engines take longer than others of their kind: named in the status, and priced by `costs`.

Engines of one TP degree and about one KV capacity should be equally fast.  The reference is their median pace.

- An engine takes `SLOW` times the reference for `SURE_S` -> it is named, with the time at which that began.
- It takes less than `RECOVERED` times -> it is no longer named.
- Half of the engines are slow, or there are fewer than `MIN_ENGINES` -> none is: they may be GPUs of another kind.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from .board import Board

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

    def update(self, board: Board, now: float) -> list[SlowEngine]:
        """The engines to name, the slowest first."""
        ratios: dict[str, float] = {}
        own = [view for view in board.engines.values() if not view.borrowed]
        for view in own:
            least, most = view.kv_capacity / SAME_KV, view.kv_capacity * SAME_KV
            kind = [v.pace for v in own if v.tp == view.tp and least <= v.kv_capacity <= most]
            if len(kind) >= MIN_ENGINES:
                ratios[view.engine] = view.pace / sorted(kind)[len(kind) // 2]
        before = {name: self._since.get(name, now) for name in ratios}
        limits = {name: RECOVERED if now - since >= SURE_S else SLOW for name, since in before.items()}
        self._since = {name: since for name, since in before.items() if ratios[name] > limits[name]}
        found = [SlowEngine(name, ratios[name], since) for name, since in self._since.items() if now - since >= SURE_S]
        return sorted(found, key=lambda slow: -slow.ratio)
