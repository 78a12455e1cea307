"""Prefix tree of Libra (arXiv 2606.03077, ``cmlfq_prefix_tree.py``): remaining tokens by sequence of tool returns.

- A path is the sequence of symbols (tool, payload class, status), in a tree per prompt and in a global one.
- A trajectory of T tokens ends, with tool returns at p_1..p_m -> the root gets T, depth i gets max(0, T - p_i).
- A node has the mean of all samples and the 90th percentile of the last `RING`.
- A lookup walks the prompt's tree as deep as it matches; without one, the global tree.
- `REBUILD_VERSIONS` weight versions pass -> both are rebuilt from the last `RECENT` trajectories.

The original derives the status from text; here it comes from the signal's outcome.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from libra_hpc.policies.scheduling.protocol import Finished
from libra_hpc.protocol.env import Signal

RING = 200
"""Samples of a node behind its 90th percentile."""
SMALL, MEDIUM = 500, 5_000
"""Upper bounds of the payload classes, tokens."""
REBUILD_VERSIONS = 5
"""Steps, in the published 48-GPU configuration."""
RECENT = 5_000
"""Trajectories in a rebuild."""

Symbol = tuple[str, int, str]


def symbol(signal: Signal) -> Symbol:
    """(tool, payload class 0..2, ``success`` | ``failure`` | ``timeout``); a task's own outcome class is a success."""
    size = 0 if signal.payload_tokens <= SMALL else 1 if signal.payload_tokens <= MEDIUM else 2
    return signal.tool, size, {"error": "failure", "timeout": "timeout"}.get(signal.outcome, "success")


class PrefixNode:
    """Samples of one path."""

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
    def recent(self) -> Sequence[float]:
        """The last samples, oldest first."""
        return self._ring

    @property
    def p90(self) -> float:
        """90th percentile of the last samples; at least one must exist."""
        if self._p90 is None:
            values = sorted(self._ring)
            self._p90 = values[-(-9 * len(values) // 10) - 1]
        return self._p90


class PrefixTree:
    """The global tree and one tree per prompt."""

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
        """The deepest node that matches; its count is 0 if nothing was learned."""
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
