"""How long the engines of a node may make no progress: start, weight update, waking, and silence in between.

- An operation began -> it has the limit of `Deadlines`, by the durations of the node's engines; silence is no fault.
- No operation in flight -> any message is a sign of life; engines send `EngineStats` once a second, idle ones too.
- The users of its device leave it no room -> the limits of what is in flight begin again.
- Half of a limit is used up -> *late*, reported once.
- All of a limit is used up -> *hung*.

Times are seconds of any monotonic clock.
"""

from __future__ import annotations

from typing import NamedTuple

from libra_hpc.process.deadlines import DeadlineLimits, Deadlines

START = "start of the engine"
WEIGHTS = "weight update of the engine"
WAKE = "waking of the engine"
SILENCE = "silence of the engine"


class LateEngine(NamedTuple):
    engine: str
    reason: str


class EngineWatch:
    def __init__(self, settings: DeadlineLimits) -> None:
        self._deadlines = Deadlines(settings)
        self._in_flight: dict[str, set[str]] = {}

    def began(self, engine: str, operation: str, now: float) -> None:
        """An operation starts; one that is in flight already goes on."""
        operations = self._in_flight.setdefault(engine, set())
        if operation not in operations:
            operations.add(operation)
            self._deadlines.drop((engine, SILENCE))
            self._deadlines.begin(operation, (engine, operation), now)

    def ended(self, engine: str, operation: str, now: float) -> None:
        self._in_flight.get(engine, set()).discard(operation)
        self._deadlines.end((engine, operation), now)

    def sign(self, engine: str, now: float) -> None:
        self.ended(engine, SILENCE, now)
        if not self._in_flight.get(engine):
            self._deadlines.begin(SILENCE, (engine, SILENCE), now)

    def stands_still(self, engine: str, now: float) -> None:
        for operation in self._in_flight.get(engine, ()):
            self._deadlines.begin(operation, (engine, operation), now)

    def gone(self, engine: str) -> None:
        for operation in (START, WEIGHTS, WAKE, SILENCE):
            self._deadlines.drop((engine, operation))
            self._in_flight.pop(engine, None)

    def discount(self, seconds: float) -> None:
        self._deadlines.discount(seconds)

    def late(self, now: float) -> list[LateEngine]:
        """Engines that became late since the last call."""
        return [LateEngine(one.key[0], one.sentence) for one in self._deadlines.late(now)]  # type: ignore[index]

    def hung(self, now: float) -> list[LateEngine]:
        """Engines beyond a limit, each once; they are not watched any more."""
        found: dict[str, LateEngine] = {}
        for pending in self._deadlines.pending(now):
            engine: str = pending.key[0]  # type: ignore[index]
            if engine not in found:
                found[engine] = LateEngine(engine, pending.sentence)
                self._deadlines.exceeded(pending.key)
        for engine in found:
            self.gone(engine)
        return list(found.values())
