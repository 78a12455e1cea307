"""A trajectory in numbers: a line of ``trajectories.jsonl`` or of a trace.

The rollout leader writes one line per finished trajectory. The simulator, the dry run and the planner read them as
workloads; a scheduling policy learns from them. Readers ignore unknown fields. With its tokens it is a
`libra_hpc.rollout.trajectory.Trajectory`.

A start from a checkpoint appends a `Restart` line. It supersedes earlier lines of prompts that are not trained there,
unless the start goes on with them. Every reader goes through `live_lines`, which leaves those out.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import msgspec

from .env import Signal


class TurnRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """One turn: the environment adds ``new_tokens``, the policy generates ``gen_tokens`` and calls ``tool`` (last
    turn: None), the slowest of parallel calls. The engine's fields are those of a run.
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
    engine: str = ""
    """Engine that generated (the end of) it."""
    versions: tuple[tuple[int, int], ...] = ()
    """(weight version, tokens generated under it), in order."""
    kv_version: int = -1
    """The oldest `Generated.kv_version` of its parts; -1: none has one."""
    recomputed: int = 0
    """Context tokens that an engine had computed before the turn and that had to be computed again."""
    evicted: int = 0
    """Tokens out of ``recomputed`` that the KV cache of the same engine had lost under the same weights."""
    reward: float = 0.0
    """What the environment gave for it, other than the trajectory's reward."""


class TrajectoryRecord(msgspec.Struct, omit_defaults=True):
    """One trajectory; a trace may have only the first fields."""

    prompt_id: str
    """Same prompt, same id."""
    sample: int
    """Number within the prompt's group."""
    prompt_tokens: int
    turns: tuple[TurnRecord, ...]
    reward: float | None = None
    index: int = 0
    """Number of the prompt in the data order, or in its evaluation."""
    attempt: int = 0
    task: str = ""
    """In a mixture its part, in an evaluation its name."""
    info: dict[str, float] = {}
    """The task's own numbers."""
    clipped: int = 0
    """Tokens of its last answer that the context had no room for."""
    started_at: float = 0.0
    finished_at: float = 0.0
    """Epoch seconds; 0.0: unknown."""

    @property
    def numbers(self) -> dict[str, Any]:
        """All fields, as a line of the file has them."""
        return {name: getattr(self, name) for name in TrajectoryRecord.__struct_fields__}

    @property
    def generated(self) -> int:
        """Tokens generated over all turns."""
        return sum([turn.gen_tokens for turn in self.turns])

    @property
    def versions(self) -> list[tuple[int, int]]:
        """(weight version, tokens generated under it), in order."""
        return [pair for turn in self.turns for pair in turn.versions]

    @property
    def context(self) -> int:
        """Tokens of the longest context."""
        return max(sample_tokens(self.prompt_tokens, self.turns))

    @property
    def all_tokens(self) -> int:
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


def payload_of(following: TurnRecord | None) -> int:
    """Tokens that tools added before a turn; unknown, and 0, where their answers are in the prompt of a sample."""
    return 0 if following is None or following.new_sample else following.new_tokens


def all_signals(turns: Sequence[TurnRecord]) -> tuple[list[Signal], list[int]]:
    """The reports of the tools, and the tokens generated before each."""
    signals: list[Signal] = []
    at: list[int] = []
    attained = 0
    for turn, following in zip_longest(turns, turns[1:]):
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
_record = msgspec.json.Decoder(TrajectoryRecord)


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


def recorded(path: Path) -> Iterator[TrajectoryRecord]:
    """Valid trajectories of a ``trajectories.jsonl``, without unreadable lines; a missing file is empty."""
    if not path.exists():
        return
    with path.open("rb") as first, path.open("rb") as second:
        passes = iter((first, second))
        for _, line in live_lines(lambda: next(passes)):
            with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                yield _record.decode(line)


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
