"""The one rule for what makes no progress: how long a phase may last before whoever waits for it must act.

- A child reports once a second what it does and since when (`Doing`, sent by its `Pulse`).
- A phase lasts longer than its limit in `TABLE` -> *stalled*: dump stacks, end the process, start another.
- Nothing is reported for the limit of silence -> stalled, too. Half of a limit has passed -> *late*, reported once.
- Nothing measured of a phase -> ``first_s``: imports, compilation, cold file systems are slow once.
- Measured -> ``factor`` times the longest of the last `WINDOW` durations, at least ``floor_s``.
- A duration doubles the limit at most (`learnt`), and so do those that began under the same one.
- Stalled -> the limit of the phase doubles until one ends.
- All processes of the run make no progress -> the last rows, by `libra_hpc.coordinator.liveness`.
- The observer itself was stopped (`stall_of`) -> `ProgressWatch.discount`.

`ProgressWatch` is pure: times are seconds of any monotonic clock.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection, Hashable, Iterator
from typing import Any, Literal, NamedTuple, Protocol

from libra_hpc.protocol import engine_state as phases
from libra_hpc.protocol.engine_state import Doing

PULSE_S = 1.0
"""Seconds between two reports of a child."""
WINDOW = 32
"""Durations remembered of a phase. Half: a slow one is dropped sooner; double: a limit stays long after it."""
GROWTH = 2.0
"""Most by which one duration multiplies a limit: a hang is no slow phase.  Half: nothing slower is learnt; double:
after three hangs of what takes seconds the next is ended after an hour."""
LATE_SHARE = 0.5
"""Share of a limit from which a phase is late."""
STALL_S = 1.0
"""A loop that wakes so much later than planned was stopped, or could read nothing."""
WAITS = "; it waits for peers"
SILENT, TURN, ABORTED = "silence", "turn", "abort of a turn"
PEERS, DROP, RESTART = "wait for peers", "drop", "restart"


class PhaseLimit(NamedTuple):
    limit: Literal["measured", "storage", "floor", "none"] = "measured"
    """``storage``: ``storage_s`` alone."""
    blind: bool = False
    """Whether it may report nothing for ``first_s``."""
    times: float = 1.0
    """Multiple of the limit."""
    then: str = ""
    """The phase that follows once it is stalled."""


MEASURED = PhaseLimit()
TABLE: dict[str, PhaseLimit] = {
    phases.START: PhaseLimit(blind=True),
    phases.IDLE: PhaseLimit("none"),
    phases.SNAPSHOT: PhaseLimit("storage"),
    phases.CHECKPOINT: PhaseLimit("storage"),
    phases.LOAD: PhaseLimit("storage"),
    phases.WRITE: PhaseLimit("storage"),
    phases.FIRST_STEPS: PhaseLimit("none", blind=True),
    phases.SERVING: PhaseLimit("none"),
    phases.PAUSED: PhaseLimit("none"),
    TURN: PhaseLimit(then=ABORTED),
    ABORTED: PhaseLimit("floor"),
    # Half: a replica may be ended before the slow one that it waits for; double: a lost message holds the run longer.
    PEERS: PhaseLimit(times=3.0),
    # Of the limit of a step, while nothing in the run progresses. Half: a part has no time to end its hung process;
    # double: a run stands for an hour after steps of three minutes.
    DROP: PhaseLimit(times=2.0),
    RESTART: PhaseLimit(times=3.0),
}
"""Rows of phases; one without a row is `MEASURED`."""


def learnt(seconds: float, limit_s: float, settings: DeadlineLimits, growth: float = GROWTH) -> float:
    """What a duration counts for under the limit of its phase."""
    return min(max(0.0, seconds), growth * limit_s / settings.factor)


def stall_of(slept_s: float, planned_s: float) -> float:
    """Seconds for which this process was stopped while it slept; 0.0 for a loop that woke as planned."""
    stall = slept_s - planned_s
    return stall if stall > STALL_S else 0.0


async def ticks(seconds: float) -> AsyncIterator[float]:
    """Wake every so many seconds, with the stall of this process meanwhile."""
    import asyncio  # slow, and children have no loop

    while True:
        before = time.monotonic()
        await asyncio.sleep(seconds)
        yield stall_of(time.monotonic() - before, seconds)


class DeadlineLimits(Protocol):
    """The numbers of the module docstring, as in ``[deadlines]`` of a run file; all but ``factor`` in seconds."""

    @property
    def floor_s(self) -> float: ...
    @property
    def first_s(self) -> float: ...
    @property
    def factor(self) -> float: ...
    @property
    def storage_s(self) -> float: ...


class Stall(NamedTuple):
    """A phase of somebody that is late or stalled, or its silence."""

    key: Any
    phase: str
    seconds: float
    limit_s: float
    beside: str = ""
    """What else is known of it."""

    @property
    def what(self) -> str:
        """Which phase, how long, and its limit."""
        lasts = "has reported nothing for" if self.phase == SILENT else f"{self.phase} has not ended after"
        return f"{lasts} {self.seconds:.0f} s (limit {self.limit_s:.0f} s){self.beside}"

    @property
    def sentence(self) -> str:
        return f"{self.key}: {self.what}"


class _Watched:
    def __init__(self, seen: float, since: dict[str, float], doing: Doing | None = None) -> None:
        self.seen, self.since, self.doing = seen, since, doing
        self.over: set[str] = set()
        """Phases that were stalled."""

    def move(self, seconds: float) -> None:
        self.seen += seconds
        self.since = {phase: at + seconds for phase, at in self.since.items()}


class ProgressWatch:
    """What is watched, by key: a child by its reports, or a phase that begins and ends here."""

    def __init__(self, settings: DeadlineLimits) -> None:
        self._settings = settings
        self._watched: dict[Hashable, _Watched] = {}
        self._durations: dict[str, deque[float]] = {}
        self._exceeded: dict[str, tuple[int, float]] = {}
        """How often in a row a phase was stalled, and when last."""
        self._grown: dict[str, float] = {}
        """When the limit of a phase last grew."""
        self._late: set[tuple[Hashable, str]] = set()

    def begin(self, key: Hashable, phase: str, now: float) -> None:
        self.drop(key)
        self._watched[key] = _Watched(now, {phase: now})

    def end(self, key: Hashable, now: float) -> None:
        """It ended, and its duration counts; an unknown key was given up before."""
        known = self._watched.get(key)
        for phase, at in known.since.items() if known is not None else ():
            self._learn(phase, now - at, now)
        self.drop(key)

    def drop(self, key: Hashable) -> None:
        """Watch it no more; its duration does not count."""
        if self._watched.pop(key, None) is not None:
            self._late = {late for late in self._late if late[0] != key}

    def report(self, key: Hashable, doing: Doing, now: float) -> None:
        """A child's report; one that is not watched any more is ignored."""
        known = self._watched.get(key)
        if known is None:
            return
        ended = dict(doing.ended)
        if known.doing is None:
            own = {phase: now - at for phase, at in known.since.items() if phase not in doing.now}
            ended = own | ended
        else:
            ended[SILENT] = now - known.seen - PULSE_S
        for phase, seconds in ended.items():
            self._learn(phase, seconds, now)
            self._late.discard((key, phase))
        self._watched[key] = _Watched(now, {phase: now - seconds for phase, seconds in doing.now.items()}, doing)

    def over(self, key: Hashable) -> bool:
        """Whether it was stalled, and goes on with what follows."""
        return key in self._watched and bool(self._watched[key].over)

    def discount(self, seconds: float, keys: Collection[Hashable] | None = None) -> None:
        """Extend limits by a stall of the observer; ``keys``: of these alone."""
        for key in self._watched if keys is None else self._watched.keys() & keys:
            self._watched[key].move(seconds)

    def limit(self, phase: str) -> float:
        """The limit of a phase as measured, in seconds."""
        durations = self._durations.get(phase)
        unmeasured = 0.0 if phase == SILENT else self._settings.first_s
        seconds = self._settings.factor * max(durations) if durations else unmeasured
        return max(self._settings.floor_s, seconds) * 2.0 ** self._exceeded.get(phase, (0, 0.0))[0]

    def late(self, now: float) -> list[Stall]:
        """What has used up `LATE_SHARE` of its limit, each once."""
        found = [one for one in self._beyond(now, LATE_SHARE) if (one.key, one.phase) not in self._late]
        self._late.update((one.key, one.phase) for one in found)
        return found

    def stalled(self, now: float) -> list[Stall]:
        """What is beyond its limit, the longest first and each key once; it is not watched any more."""
        found = dict[Hashable, Stall]()
        for one in self._beyond(now, 1.0):
            found.setdefault(one.key, one)
            times, last = self._exceeded.get(one.phase, (0, float("-inf")))
            watched = self._watched[one.key]
            # Those that began under the same limit count once: the engines of a node start together.
            if not TABLE.get(one.phase, MEASURED).then and watched.since.get(one.phase, watched.seen) >= last:
                self._exceeded[one.phase] = times + 1, now
        for one in found.values():
            if then := TABLE.get(one.phase, MEASURED).then:
                self._watched[one.key].over.add(one.phase)
                self._watched[one.key].since[then] = now
            else:
                self.drop(one.key)
        return list(found.values())

    def _learn(self, phase: str, seconds: float, now: float) -> None:
        limit_s, since = self.limit(phase), self._grown.get(phase, float("-inf"))
        # Turns begin at once, and differ.
        grows = now - seconds >= since or TABLE.get(phase, MEASURED).then
        counted = learnt(seconds, limit_s, self._settings, GROWTH if grows else 1.0)
        self._durations.setdefault(phase, deque(maxlen=WINDOW)).append(counted)
        self._exceeded.pop(phase, None)
        if self.limit(phase) > limit_s:
            self._grown[phase] = now

    def _beyond(self, now: float, share: float) -> list[Stall]:
        found = list[Stall]()
        for key, one in self._watched.items():
            silent = self._silent(key, one, now)
            if silent is not None and silent.seconds > share * silent.limit_s:
                found.append(silent)
            elif not one.over or share == 1.0:
                found += self._too_long(key, one, now, share)
        return sorted(found, key=lambda one: -one.seconds)

    def _silent(self, key: Hashable, one: _Watched, now: float) -> Stall | None:
        """The silence of a child; None of what does not report."""
        if one.doing is None:
            return None
        blind = any(TABLE.get(phase, MEASURED).blind for phase in one.since)
        limit = max(self.limit(SILENT), one.doing.silence_s, self._settings.first_s if blind else 0.0)
        return Stall(key, SILENT, now - one.seen, limit, f"; its last report: {', '.join(one.since) or phases.IDLE}")

    def _too_long(self, key: Hashable, one: _Watched, now: float, share: float) -> Iterator[Stall]:
        """Its phases that last longer than that share of their limits."""
        waits = one.doing is not None and one.doing.waits
        times, beside = (TABLE[PEERS].times, WAITS) if waits else (1.0, "")
        for phase in one.since.keys() - one.over:
            row, usual, waited_s = TABLE.get(phase, MEASURED), self.limit(phase), now - one.since[phase]
            if row.limit == "none":
                continue
            limits = {"measured": usual, "storage": self._settings.storage_s, "floor": self._settings.floor_s}
            limit = times * limits[row.limit]
            if waited_s > share * (usual if row.limit == "storage" and share < 1.0 else limit):
                yield Stall(key, phase, waited_s, limit, beside)


class _Phase:
    def __init__(self, name: str) -> None:
        self.name, self.seconds, self.since = name, 0.0, time.monotonic()

    def age(self) -> float:
        return self.seconds + time.monotonic() - self.since


class Pulse:
    """Reports what this process does, from a thread of its own; phases are those of threads, or have a key.

    A phase within another stops the clock of the outer one.
    """

    def __init__(self, send: Callable[[Doing], object], first: str = phases.START) -> None:
        self._send, self._lock = send, threading.Lock()
        self._open: dict[Hashable, list[_Phase]] = {threading.get_ident(): [_Phase(first)]}
        self._ended: dict[str, float] = {}
        self._waits, self._started = False, threading.Event()
        threading.Thread(target=self._run, name="pulse", daemon=True).start()

    def begin(self, name: str, key: Hashable = None) -> None:
        """A phase begins, again where it goes on; without a key it has its own."""
        with self._lock:
            stack = self._open.setdefault(key or name, [])
            if key is None:
                stack.clear()
            elif stack:
                stack[-1].seconds = stack[-1].age()
            stack.append(_Phase(name))

    def end(self, key: Hashable = None) -> None:
        """The newest phase of the key ends, if there is one; without a key that of this thread."""
        key = key or threading.get_ident()
        with self._lock:
            if stack := self._open.get(key):
                phase = stack.pop()
                if phase.name == phases.START:
                    self._started.set()
                self._ended[phase.name] = max(phase.age(), self._ended.get(phase.name, 0.0))
                if stack:
                    stack[-1].since = time.monotonic()
                else:
                    del self._open[key]

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """A phase of this thread."""
        thread = threading.get_ident()
        self.begin(name, thread)
        try:
            yield
        finally:
            self.end(thread)

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """This process waits for peers, in the phase that it is in."""
        self._waits = True
        try:
            yield
        finally:
            self._waits = False

    def _run(self) -> None:
        before = time.monotonic()
        while True:
            with self._lock:
                stall = stall_of(time.monotonic() - before, PULSE_S)
                for stack in self._open.values():
                    stack[-1].since = min(stack[-1].since + stall, time.monotonic())
                now = {stack[-1].name: stack[-1].age() for stack in self._open.values()}
                ended, self._ended = self._ended, {}
            before = time.monotonic()
            try:
                self._send(Doing(now, ended, self._waits))
            except OSError:
                return  # the agent is gone; the main thread notices too
            # From the end of the start on, silence has a shorter limit.
            self._started.wait(PULSE_S)
            self._started.clear()
