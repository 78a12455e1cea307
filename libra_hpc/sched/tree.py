"""The causal tree: how much work a trajectory has left, given its prompt and what its tools answered so far.

A *path* is the sequence of signals (tool, outcome, payload class) a trajectory has received.  There is one tree per prompt and one global tree
over all prompts.  When a trajectory ends, the node of each of its paths, in both trees, receives what it still had to generate from there; the
root (the empty path) receives the total.  A signal after which nothing more was generated teaches nothing: no decision is ever asked for there.

The estimate for a running trajectory goes from coarse to fine, each stage pulling the one before by its evidence, weight n / (n + k):

    totals of all trajectories that got this far -> global node of the path -> this prompt's totals that got this far -> this prompt's node of the path

"Totals that got this far" is attained service, the fallback when a path was never seen: the mean excess T - a over recent totals T > a.  With
none beyond a, the excess is taken to be a itself, the answer of a heavy tail (the longer it ran, the longer it will); with no data at all,
`PRIOR_TOKENS`.

n / (n + k) is the credibility weight (Buhlmann), whose k is the variance within a class over the variance between classes:

* `K_PROMPT` = 1: on tau-bench the prompt explains 0.59 of the variance of lengths, so within/between = 0.7; one finished sibling already counts a half.
* `K_SIGNAL` = 8: tool signals correlate with what remains by at most 0.3 (0.09 of the variance, within/between = 10); a path needs some eight visits before
  it outweighs what is known without it.

Evidence fades as the policy changes: with each weight version it loses half its weight per `HALF_LIFE` = 16 versions, so that a node forgets
within an epoch of small data sets but keeps its siblings, which finish within a few versions.  Quantiles come from the last `SAMPLES` = 16
values of a node (two groups of eight), totals from the last `TOTALS` = 256 of the global root.

Bounds: paths deeper than `MAX_DEPTH` = 16 are not followed (they are almost all unique and would fill the tree with nodes seen once; attained
service answers there), and at most `MAX_NODES` = 20,000 nodes (some 20 MB) are kept, the least recently updated leaf going first.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from typing import NamedTuple

from libra_hpc.protocol.env import Signal
from libra_hpc.sched.protocol import Finished

K_PROMPT = 1.0
K_SIGNAL = 8.0
HALF_LIFE = 16.0
SAMPLES = 16
TOTALS = 256
MAX_DEPTH = 16
MAX_NODES = 20_000
PRIOR_TOKENS = 512.0
"""Tokens left of a trajectory when nothing has finished yet: the order of a few agentic turns."""
SMALL_PAYLOAD, LARGE_PAYLOAD = 128, 1024
"""Tokens: borders of the payload classes small, medium, large (about 500 and 4,000 characters)."""

Symbol = tuple[str, str, int]


def symbol(signal: Signal) -> Symbol:
    """What the tree keeps of a signal: tool, outcome, payload class 0..2."""
    size = signal.payload_tokens
    return (signal.tool, signal.outcome, 0 if size <= SMALL_PAYLOAD else 1 if size <= LARGE_PAYLOAD else 2)


class Remaining(NamedTuple):
    """Estimate of the tokens a trajectory will still generate."""

    mean: float
    p50: float
    p90: float
    own: float
    """Evidence from the same prompt: effective number of finished trajectories behind the estimate."""
    seen: float
    """Evidence from the global node of the same path."""


class Sketch:
    """Decayed count and mean, and the last few values for quantiles, of one node."""

    __slots__ = ("_count", "_next", "_size", "_sorted", "_suffix", "_values", "_version", "mean")

    def __init__(self, size: int) -> None:
        self.mean = 0.0
        self._count = 0.0
        self._version = 0
        self._size = size
        self._next = 0
        self._values: list[float] = []
        self._sorted: list[float] | None = None
        self._suffix: list[float] = []

    def add(self, value: float, version: int) -> None:
        """Learn one value sampled under a weight version; older versions than the newest seen count for less."""
        weight = 1.0
        if version > self._version:
            self._count *= 0.5 ** ((version - self._version) / HALF_LIFE)
            self._version = version
        elif version < self._version:
            weight = 0.5 ** ((self._version - version) / HALF_LIFE)
        self._count += weight
        self.mean += (value - self.mean) * weight / self._count
        if len(self._values) < self._size:
            self._values.append(value)
        else:
            self._values[self._next] = value
            self._next = (self._next + 1) % self._size
        self._sorted = None

    def evidence(self, version: int) -> float:
        """Effective number of values as of a weight version."""
        age = version - self._version
        return self._count if age <= 0 else self._count * 0.5 ** (age / HALF_LIFE)

    def quantile(self, q: float) -> float:
        """Quantile ``q`` of the last values (nearest rank); there must be one."""
        values = self._order()
        return values[min(len(values) - 1, int(q * len(values)))]

    def excess(self, attained: float) -> tuple[float, float, float, float] | None:
        """(mean, p50, p90) of value - attained over the kept values above ``attained``, and the share of values above it; None without any."""
        values = self._order()
        first = bisect_right(values, attained)
        beyond = len(values) - first
        if not beyond:
            return None
        p50, p90 = values[first + beyond // 2], values[first + min(beyond - 1, int(0.9 * beyond))]
        return self._suffix[first] / beyond - attained, p50 - attained, p90 - attained, beyond / len(values)

    def _order(self) -> list[float]:
        values = self._sorted
        if values is None:
            values = self._sorted = sorted(self._values)
            total = 0.0
            self._suffix = [0.0] * len(values)
            for i in range(len(values) - 1, -1, -1):
                total += values[i]
                self._suffix[i] = total
        return values


class _Node:
    __slots__ = ("children", "key", "parent", "sketch")

    def __init__(self, parent: _Node | None, key: Symbol | str, size: int) -> None:
        self.parent = parent
        self.key = key
        self.sketch = Sketch(size)
        self.children: dict[Symbol, _Node] = {}


class CausalTree:
    """Learns from finished trajectories, estimates what a running one has left; see the module."""

    def __init__(self, max_nodes: int = MAX_NODES) -> None:
        self._global = _Node(None, "", TOTALS)
        self._prompts: dict[str, _Node] = {}
        self._lru: OrderedDict[_Node, None] = OrderedDict()
        self._max_nodes = max_nodes
        self._version = 0

    def __len__(self) -> int:
        return len(self._lru)

    @property
    def mean_total(self) -> float:
        """Mean tokens generated by a trajectory; the prior before any finished."""
        totals = self._global.sketch
        return totals.mean if totals.evidence(self._version) > 0.0 else PRIOR_TOKENS

    def insert(self, record: Finished) -> None:
        """Learn from a completed trajectory."""
        self._version = max(self._version, record.version)
        root = self._prompts.get(record.prompt_id)
        if root is None:
            root = self._prompts[record.prompt_id] = _Node(None, record.prompt_id, SAMPLES)
        total = float(record.generated_tokens)
        path = [(symbol(s), total - at) for s, at in zip(record.signals[:MAX_DEPTH], record.at_signal, strict=False) if at < total]
        self._learn(self._global, total, path, record.version)
        self._learn(root, total, path, record.version)
        while len(self._lru) > self._max_nodes:
            self._evict()

    def estimate(self, prompt_id: str, signals: tuple[Signal, ...], attained: int) -> Remaining:
        """What a trajectory of ``prompt_id`` that received ``signals`` and generated ``attained`` tokens still has to generate."""
        symbols = [symbol(s) for s in signals] if len(signals) <= MAX_DEPTH else None
        version = self._version
        known = self._global.sketch.excess(attained) if self._global.sketch.evidence(version) > 0.0 else None
        if known is not None:
            mean, p50, p90, _ = known
        else:
            mean = p50 = p90 = float(attained) if attained else PRIOR_TOKENS
        seen = own = 0.0
        node = _walk(self._global, symbols) if symbols else None
        if node is not None:
            seen = node.sketch.evidence(version)
            mean, p50, p90 = _pull(mean, p50, p90, node.sketch, seen / (seen + K_SIGNAL))
        root = self._prompts.get(prompt_id)
        if root is not None:
            excess = root.sketch.excess(attained)
            if excess is not None:
                own = root.sketch.evidence(version) * excess[3]
                weight = own / (own + K_PROMPT)
                mean += weight * (excess[0] - mean)
                p50 += weight * (excess[1] - p50)
                p90 += weight * (excess[2] - p90)
            node = _walk(root, symbols) if symbols else None
            if node is not None:
                count = node.sketch.evidence(version)
                mean, p50, p90 = _pull(mean, p50, p90, node.sketch, count / (count + K_SIGNAL))
        return Remaining(mean, p50, p90, own, seen)

    def _learn(self, root: _Node, total: float, path: list[tuple[Symbol, float]], version: int) -> None:
        root.sketch.add(total, version)
        visited = [root]
        for key, remaining in path:
            child = visited[-1].children.get(key)
            if child is None:
                child = visited[-1].children[key] = _Node(visited[-1], key, SAMPLES)
            child.sketch.add(remaining, version)
            visited.append(child)
        # A parent is refreshed after its children, so the least recently updated node is always a leaf.
        for node in reversed(visited):
            self._lru[node] = None
            self._lru.move_to_end(node)

    def _evict(self) -> None:
        node = next(iter(self._lru))
        if node is self._global:
            self._lru.move_to_end(node)
            return
        del self._lru[node]
        if node.parent is not None and not isinstance(node.key, str):
            del node.parent.children[node.key]
        elif isinstance(node.key, str):
            del self._prompts[node.key]


def _walk(root: _Node, symbols: list[Symbol]) -> _Node | None:
    node = root
    for key in symbols:
        child = node.children.get(key)
        if child is None:
            return None
        node = child
    return node


def _pull(mean: float, p50: float, p90: float, sketch: Sketch, weight: float) -> tuple[float, float, float]:
    return mean + weight * (sketch.mean - mean), p50 + weight * (sketch.quantile(0.5) - p50), p90 + weight * (sketch.quantile(0.9) - p90)
