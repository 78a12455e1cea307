"""Libra's published prefix tree (arXiv 2606.03077, `cmlfq_prefix_tree.py` of its code): statistics of remaining length
by sequence of tool returns.

One tree per prompt and a global one; a path is the sequence of symbols (tool, payload class, status).  When a
trajectory of T generated tokens with tool returns at p_1..p_m (m >= 1) ends, the root gets the sample T and the node at
depth i gets max(0, T - p_i), in both trees.  A node keeps its count, the mean of all its samples ever, and the last
`RING` = 200 of them, whose 90th percentile (nearest rank) is its p90.  A look-up walks the prompt's own tree as deep as
it matches, when there is one, otherwise the global tree.

Payload classes are small up to 500 and medium up to 5,000 tokens.  The published status is derived from the text of the
answer and misfires on "0 errors" or ``error: null``; here it comes from the signal's outcome, so the baseline sees
better signals than the original did.

Every `REBUILD_VERSIONS` = 5 weight versions (steps, in the published 48-GPU configuration) the trees are rebuilt from
the last `RECENT` = 5,000 trajectories.
"""

from __future__ import annotations

from collections import deque

from libra_hpc.protocol.env import Signal
from libra_hpc.sched.protocol import Finished

RING = 200
SMALL, MEDIUM = 500, 5_000
REBUILD_VERSIONS = 5
RECENT = 5_000

Symbol = tuple[str, int, str]


def symbol(signal: Signal) -> Symbol:
    """(tool, payload class 0..2, ``success`` | ``failure`` | ``timeout``); a task's own outcome class counts as
    success, as any unknown status did."""
    size = 0 if signal.payload_tokens <= SMALL else 1 if signal.payload_tokens <= MEDIUM else 2
    return signal.tool, size, {"error": "failure", "timeout": "timeout"}.get(signal.outcome, "success")


class PrefixNode:
    """Samples of one path."""

    __slots__ = ("_p90", "_ring", "children", "count", "mean")

    def __init__(self) -> None:
        self.count = 0
        self.mean = 0.0
        self._ring: deque[float] = deque(maxlen=RING)
        self._p90: float | None = None
        self.children: dict[Symbol, PrefixNode] = {}

    def add(self, value: float) -> None:
        """Learn one sample."""
        self.count += 1
        self.mean += (value - self.mean) / self.count
        self._ring.append(value)
        self._p90 = None

    @property
    def p90(self) -> float:
        """90th percentile of the last samples; there must be one."""
        if self._p90 is None:
            values = sorted(self._ring)
            self._p90 = values[-(-9 * len(values) // 10) - 1]
        return self._p90


class PrefixTree:
    """See the module."""

    def __init__(self) -> None:
        self._global = PrefixNode()
        self._prompts: dict[str, PrefixNode] = {}
        self._recent: deque[Finished] = deque(maxlen=RECENT)
        self._built = 0

    def insert(self, record: Finished) -> None:
        """Learn from a completed trajectory."""
        self._recent.append(record)
        if record.version // REBUILD_VERSIONS > self._built:
            self._built = record.version // REBUILD_VERSIONS
            self._global, self._prompts = PrefixNode(), {}
            for old in self._recent:
                self._learn(old)
        else:
            self._learn(record)

    def look_up(self, prompt_id: str, signals: tuple[Signal, ...]) -> PrefixNode:
        """The deepest node that matches; its count is 0 when nothing was learned."""
        node = self._prompts.get(prompt_id, self._global)
        for signal in signals:
            child = node.children.get(symbol(signal))
            if child is None:
                break
            node = child
        return node

    def _learn(self, record: Finished) -> None:
        if not record.signals:
            return
        for node in (self._global, self._prompts.setdefault(record.prompt_id, PrefixNode())):
            node.add(record.generated_tokens)
            for signal, at in zip(record.signals, record.at_signal, strict=False):
                node = node.children.setdefault(symbol(signal), PrefixNode())
                node.add(max(0, record.generated_tokens - at))
