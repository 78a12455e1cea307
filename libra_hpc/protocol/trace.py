"""A trajectory as plain numbers: a line of ``trajectories.jsonl`` or of a trace.

The rollout leader writes one line per finished trajectory. The simulator, the dry run and the planner read them as
workloads; a scheduling policy learns from them. Readers ignore unknown fields (engine, versions, times).

A start from a checkpoint appends a `Restart` line. It supersedes earlier lines of prompts that are not trained there,
unless the start goes on with them. Every reader goes through `live_lines`, which leaves those out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import msgspec

from .env import Signal

OPTIONAL_FIELDS = ("exit_code", "passed", "failed", "parallel", "new_sample")
"""Fields that a line has only when the tool reported them, or the turn begins a sample."""


class TurnRecord(msgspec.Struct, frozen=True):
    """One turn: the environment adds ``new_tokens``, the policy generates ``gen_tokens`` and calls ``tool`` (last
    turn: None), the slowest of parallel calls.
    """

    new_tokens: int
    """0 on the first turn, whose context is the prompt."""
    gen_tokens: int
    tool: str | None = None
    outcome: str | None = None
    """``ok`` | ``error`` | ``timeout`` | a task's own class; None: not recorded."""
    tool_s: float = 0.0
    """Seconds the tool took."""
    exit_code: int | None = None
    passed: int | None = None
    failed: int | None = None
    parallel: tuple[Signal, ...] | None = None
    """Reports of the turn's other tool calls."""
    new_sample: bool = False
    """Its context is ``new_tokens`` alone: what was before is a finished sample of the trajectory."""

    def line(self) -> dict[str, Any]:
        """The turn as a line of the file has it."""
        return {
            name: value
            for name, value in msgspec.structs.asdict(self).items()
            if (value is not None and value is not False) or name not in OPTIONAL_FIELDS
        }


class TrajectoryRecord(msgspec.Struct, frozen=True):
    """One trajectory."""

    prompt_id: str
    """Same prompt, same id."""
    sample: int
    """Number within the prompt's group."""
    prompt_tokens: int
    turns: tuple[TurnRecord, ...]
    reward: float | None = None

    @property
    def generated(self) -> int:
        """Tokens generated over all turns."""
        return sum(turn.gen_tokens for turn in self.turns)

    @property
    def context(self) -> int:
        """Tokens of the longest context."""
        return max(sample_tokens(self.prompt_tokens, self.turns))

    @property
    def tokens(self) -> int:
        """Tokens of all samples, which is what training gets."""
        return sum(sample_tokens(self.prompt_tokens, self.turns))


def sample_tokens(prompt_tokens: int, turns: Sequence[TurnRecord]) -> list[int]:
    """Tokens of each sample of a trajectory, at its end."""
    found = [prompt_tokens]
    for turn in turns:
        if turn.new_sample:
            found.append(0)
        found[-1] += turn.new_tokens + turn.gen_tokens
    return found


def signals_of(turn: TurnRecord, payload_tokens: int) -> list[Signal]:
    """The reports of the tools at the end of ``turn``, whose answer adds ``payload_tokens``, the slowest first.

    An unknown outcome is ``ok``.
    """
    if turn.tool is None:
        return []
    others = turn.parallel or ()
    slowest = Signal(
        tool=turn.tool,
        outcome=turn.outcome or "ok",
        payload_tokens=max(0, payload_tokens - sum(other.payload_tokens for other in others)),
        seconds=turn.tool_s,
        exit_code=turn.exit_code,
        passed=turn.passed,
        failed=turn.failed,
    )
    return [slowest, *others]


def payload_of(following: TurnRecord) -> int:
    """Tokens that tools added before a turn; unknown, and 0, where their answers are in the prompt of a sample."""
    return 0 if following.new_sample else following.new_tokens


def all_signals(turns: Sequence[TurnRecord]) -> tuple[list[Signal], list[int]]:
    """The reports of the tools between the turns, and the tokens generated before each."""
    signals: list[Signal] = []
    at: list[int] = []
    attained = 0
    for turn, following in pairwise(turns):
        attained += turn.gen_tokens
        found = signals_of(turn, payload_of(following))
        signals += found
        at += [attained] * len(found)
    return signals, at


class Restart(msgspec.Struct, frozen=True):
    """A start from a checkpoint: prompts below ``low`` and in ``extra`` are trained; trajectories in ``kept`` stay
    valid.
    """

    step: int
    low: int
    extra: tuple[int, ...]
    kept: tuple[tuple[int, int], ...]
    """(index, sample)"""

    def line(self) -> dict[str, Any]:
        """The line of the file."""
        return {"restart": msgspec.to_builtins(self)}


class _RestartLine(msgspec.Struct, frozen=True):
    restart: Restart


class _Place(msgspec.Struct, frozen=True):
    index: int | None = None
    sample: int = 0


_MARK = b'{"restart":'
_restart = msgspec.json.Decoder(_RestartLine)
_place = msgspec.json.Decoder(_Place)


def live_lines(read: Callable[[], Iterable[bytes]]) -> Iterator[tuple[int, bytes]]:
    """Numbers (from 1) and lines of valid trajectories: no restart lines, none that a later restart superseded.

    ``read`` returns the lines from the beginning; it is called twice, so that a file need not be kept in memory.
    """
    restarts = [
        (number, found)
        for number, line in enumerate(read(), 1)
        if line.startswith(_MARK) and (found := _restart_of(line))
    ]
    marks = {number for number, _ in restarts}
    rules = [(number, one.low, frozenset(one.extra), frozenset(one.kept)) for number, one in restarts]
    for number, line in enumerate(read(), 1):
        while rules and rules[0][0] <= number:
            rules.pop(0)
        if number in marks or (rules and _superseded(line, rules)):
            continue
        yield number, line


def _restart_of(line: bytes) -> Restart | None:
    try:
        return _restart.decode(line).restart
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def _superseded(line: bytes, rules: Sequence[tuple[int, int, frozenset[int], frozenset[tuple[int, int]]]]) -> bool:
    try:
        place = _place.decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return False
    index = place.index
    return index is not None and not all(
        index < low or index in extra or (index, place.sample) in kept for _, low, extra, kept in rules
    )
