"""Deadlines on progress: how long an operation may take before whoever waits for it must act.

- Nothing measured under a name -> the limit is ``first_s``: imports, compilation, cold file systems are slow once.
- Measured -> ``factor`` times the longest of the last `WINDOW` durations, at least ``floor_s``.
- Half of the limit has passed -> *late*: report it.
- All of it has passed -> *overdue*: dump stacks, end the process, start another.
- Overdue and given up (`exceeded`) -> the limit of its name doubles until one ends.
- Nothing in the run progresses meanwhile -> `libra_hpc.coordinator.ladder`.
- The waiting process itself was stopped -> `discount` the stall.

Pure: times are seconds of any monotonic clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Hashable
from typing import NamedTuple, Protocol

WINDOW = 32
"""Durations remembered under a name.  Half: a slow phase is dropped sooner; double: a deadline stays long after
it."""
LATE_SHARE = 0.5
"""Share of a limit from which an operation is late."""
STALL_S = 2.0
"""A loop that wakes so much later than planned: its process was stopped, not busy."""


def stall_of(slept_s: float, planned_s: float) -> float:
    """Seconds for which this process was stopped while it slept; 0.0 for a loop that woke as planned."""
    stall = slept_s - planned_s
    return stall if stall > STALL_S else 0.0


class DeadlineLimits(Protocol):
    """The numbers of the module docstring, as in ``[deadlines]`` of a run file."""

    @property
    def floor_s(self) -> float:
        """Seconds."""

    @property
    def first_s(self) -> float:
        """Seconds."""

    @property
    def factor(self) -> float:
        """A multiple of measured durations."""


class DeadlineSettings(NamedTuple):
    floor_s: float = 60.0
    first_s: float = 900.0
    factor: float = 10.0


class Pending(NamedTuple):
    """An operation that has not ended."""

    name: str
    """Durations are compared within a name."""
    key: Hashable
    waited_s: float
    limit_s: float

    @property
    def sentence(self) -> str:
        """What is waited for, how long, and its limit."""
        return f"{self.name} has not ended after {self.waited_s:.0f} s (limit {self.limit_s:.0f} s)"


class _Begun(NamedTuple):
    name: str
    at: float
    own_s: float
    level: int
    """How often in a row the limit of the name had been exceeded."""


class Deadlines:
    """Operations in flight by key.  A key that begins again starts from zero."""

    def __init__(self, settings: DeadlineLimits = DeadlineSettings()) -> None:  # noqa: B008 (an immutable tuple)
        self._settings = settings
        self._began: dict[Hashable, _Begun] = {}
        self._exceeded: dict[str, int] = {}
        self._durations: dict[str, deque[float]] = {}
        self._late: set[Hashable] = set()

    def begin(self, name: str, key: Hashable, now: float, limit_s: float = 0.0) -> None:
        """An operation starts; its own ``limit_s`` counts where it is longer."""
        self._late.discard(key)
        self._began[key] = _Begun(name, now, limit_s, self._exceeded.get(name, 0))

    def end(self, key: Hashable, now: float) -> None:
        """It ended, and its duration counts; an unknown key was given up before."""
        found = self.drop(key)
        if found is not None:
            self._durations.setdefault(found.name, deque(maxlen=WINDOW)).append(max(0.0, now - found.at))
            self._exceeded.pop(found.name, None)

    def exceeded(self, key: Hashable) -> None:
        """Give up an overdue operation.

        Operations that began under the same limit count once: the engines of a node start together.
        """
        found = self.drop(key)
        if found is not None:
            before = self._exceeded.get(found.name, 0)
            self._exceeded[found.name] = max(before, min(found.level, before) + 1)

    def drop(self, key: Hashable) -> _Begun | None:
        """Wait for it no more; its duration does not count."""
        self._late.discard(key)
        return self._began.pop(key, None)

    def clear(self) -> None:
        self._began.clear()
        self._late.clear()

    def limit(self, name: str) -> float:
        durations = self._durations.get(name)
        seconds = self._settings.factor * max(durations) if durations else self._settings.first_s
        return max(self._settings.floor_s, seconds) * 2.0 ** self._exceeded.get(name, 0)

    def discount(self, seconds: float, keys: Collection[Hashable] | None = None) -> None:
        """Extend the limits of operations; ``keys``: of these alone."""
        for key in tuple(self._began) if keys is None else self._began.keys() & keys:
            begun = self._began[key]
            self._began[key] = begun._replace(at=begun.at + seconds)

    def late(self, now: float) -> list[Pending]:
        """Operations that have used up `LATE_SHARE` of their limit, each once."""
        found = [pending for pending in self.pending(now, LATE_SHARE) if pending.key not in self._late]
        self._late.update(pending.key for pending in found)
        return found

    def pending(self, now: float, share: float = 1.0) -> list[Pending]:
        """Operations that have used up this share of their limit (0.5: late), the longest waiting first."""
        found = []
        for key, begun in self._began.items():
            limit = max(self.limit(begun.name), begun.own_s)
            if now - begun.at > share * limit:
                found.append(Pending(begun.name, key, now - begun.at, limit))
        return sorted(found, key=lambda pending: -pending.waited_s)
