"""Outcome of a tool call, from the structure of its answer, never from its words.

"0 errors" is no error, ``{"exit_code": 1, "output": "..."}`` is one. A task may set its own outcome (``miss``,
``dead``); `classify` is the default. The first rule that applies to a mapping decides:

1. timeout: a status or error in `TIMEOUT_WORDS`, ``timed_out: true``, a `TimeoutError`, exit code 124 (timeout(1))
2. an exit code (`EXIT_CODES`): 0 is ok, others are errors
3. an error value (`ERRORS`: not None, false or empty), or a flag (`FLAGS`)
4. a status (`STATUSES`) that is a word of success or failure
5. test counts: any failed test is an error
6. an empty error field: ok
7. the values of `INSIDE`, up to `MAX_DEPTH` mappings deep; a JSON object in text counts as a mapping

Everything else is ok. In other text only a test runner's closing line counts (`count_tests`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from libra_hpc.protocol.env import Signal

from .base import ToolResult

EXIT_CODES = ("exit_code", "exitcode", "exitCode", "returncode", "return_code", "exit_status")
ERRORS = ("error", "exception", "traceback", "errors")
STATUSES = ("status", "state", "outcome")
INSIDE = ("result", "data", "value", "response", "output", "content", "stdout", "stderr")
TIMEOUT_WORDS = frozenset({"timeout", "timed_out", "timedout", "timed out", "deadline_exceeded"})
ERROR_WORDS = frozenset(
    "error errored failure failed fail exception crashed killed aborted cancelled canceled".split()  # noqa: SIM905
)
OK_WORDS = frozenset(
    {"ok", "success", "successful", "succeeded", "passed", "pass", "done", "completed", "complete", "finished"}
)
FLAGS = {"is_error": False, "isError": False, "success": True, "ok": True}
"""Boolean fields and their value in case of success."""
TIMEOUT_EXIT = 124
MAX_DEPTH = 4
SUMMARY_CHARS = 2_000
"""Characters at the end of a text that are searched for a test runner's closing line."""
JSON_CHARS = 1 << 20
"""Longest text that is parsed as a JSON object."""

_PYTEST = re.compile(r"(?:=+ )?((?:\d+ [a-z]+, )*\d+ [a-z]+)( in [\d.]+ ?s(?: \([\d:]+\))?)?(?: =+)?")
_PYTEST_WORDS = set(
    "passed xfailed xpassed failed error errors skipped deselected warning warnings rerun".split()  # noqa: SIM905
)
_COUNT = re.compile(r"(\d+) ([a-z]+)")
_UNITTEST = re.compile(r"Ran (\d+) tests? in [\d.]+s")
_UNITTEST_FAILED = re.compile(r"(?:failures|errors)=(\d+)")


class Outcome(NamedTuple):
    outcome: str
    """``ok`` | ``error`` | ``timeout``"""
    exit_code: int | None = None
    passed: int | None = None
    failed: int | None = None
    """Number of tests, including those that could not run."""


def classify(result: Any) -> Outcome:
    """Classify a tool's answer: a `ToolResult`, an exception, or any plain value."""
    if not isinstance(result, ToolResult):
        return _classify(result, 0) or Outcome("ok")
    inner = _classify(result.value, 0) or Outcome(result.outcome)
    if result.outcome != "ok" or result.exit_code is not None:
        # The call failed, or its process has an exit code: its output decides nothing.
        return inner._replace(outcome=result.outcome, exit_code=result.exit_code)
    return inner


def signal_of(tool: str, result: Any, payload_tokens: int, seconds: float | None = None) -> Signal:
    """The signal of a call of ``tool`` whose answer adds ``payload_tokens`` to the context.

    ``seconds`` default to those of a `ToolResult`, else to 0.0.
    """
    found = classify(result)
    if seconds is None:
        seconds = result.seconds if isinstance(result, ToolResult) else 0.0
    return Signal(
        tool=tool,
        outcome=found.outcome,
        payload_tokens=payload_tokens,
        seconds=seconds,
        exit_code=found.exit_code,
        passed=found.passed,
        failed=found.failed,
    )


def count_tests(text: str) -> tuple[int, int] | None:
    """(passed, failed) of a test runner's last closing line at the end of a text; None without one.

    It is a whole line: pytest's ``=== 3 failed, 12 passed in 0.5s ===`` (rules and time are optional), or unittest's
    ``Ran 12 tests in 0.1s`` with ``OK`` or ``FAILED (failures=1, errors=2)`` below.
    """
    lines = [line.strip() for line in text[-SUMMARY_CHARS:].splitlines()]
    for i in range(len(lines) - 1, -1, -1):
        pytest = _PYTEST.fullmatch(lines[i])
        if pytest:
            counts = {word: int(number) for number, word in _COUNT.findall(pytest[1])}
            # "0 errors, 2 warnings" alone is a compiler's line.
            if counts.keys() <= _PYTEST_WORDS and (counts.keys() & {"passed", "failed"} or pytest[2]):
                good = sum(counts.get(word, 0) for word in ("passed", "xfailed", "xpassed"))
                return good, sum(counts.get(word, 0) for word in ("failed", "error", "errors"))
        unittest = _UNITTEST.fullmatch(lines[i])
        if unittest:
            closing = next((line for line in lines[i + 1 :] if line), "")
            failed = sum(map(int, _UNITTEST_FAILED.findall(closing)))
            return max(0, int(unittest[1]) - failed), failed
    return None


def _classify(value: Any, depth: int) -> Outcome | None:
    """The outcome of one value; None when it has none."""
    if isinstance(value, BaseException):
        return Outcome("timeout" if isinstance(value, TimeoutError) else "error")
    if isinstance(value, str):
        return _classify_text(value, depth)
    return _classify_mapping(value, depth) if isinstance(value, Mapping) and depth < MAX_DEPTH else None


def _classify_mapping(value: Mapping[Any, Any], depth: int) -> Outcome | None:
    exit_code = _number(value, *EXIT_CODES)
    counts = _counts(value)
    outcome = _own_outcome(value, exit_code, counts)
    if outcome is None or counts is None:
        inside = next(filter(None, (_classify(value.get(name), depth + 1) for name in INSIDE)), None)
        if inside is not None:
            outcome = outcome or inside.outcome
            exit_code = inside.exit_code if exit_code is None else exit_code
            if counts is None and inside.passed is not None and inside.failed is not None:
                counts = inside.passed, inside.failed
    return None if outcome is None else Outcome(outcome, exit_code, *(counts or (None, None)))


def _classify_text(text: str, depth: int) -> Outcome | None:
    if text[:1] == "{" and len(text) <= JSON_CHARS:
        try:
            return _classify(msgspec.json.decode(text), depth + 1)
        except (msgspec.DecodeError, RecursionError):
            pass
    counts = count_tests(text)
    return None if counts is None else Outcome(_ok(not counts[1]), None, *counts)


def _own_outcome(value: Mapping[Any, Any], exit_code: int | None, counts: tuple[int, int] | None) -> str | None:
    """The outcome of a mapping itself, by the rules of the module."""
    words = {word.strip().lower() for word in map(value.get, STATUSES) if isinstance(word, str)}
    errors = [value[name] for name in ERRORS if name in value]
    if value.get("timed_out") is True or exit_code == TIMEOUT_EXIT or _name_a_timeout(words, errors):
        return "timeout"
    if exit_code is not None:
        return _ok(not exit_code)
    flags = _flags(value)
    if flags or any(errors):
        return _ok(all(flags) and not any(errors))
    if words & (ERROR_WORDS | OK_WORDS):
        return _ok(not words & ERROR_WORDS)
    if counts is not None:
        return _ok(not counts[1])
    return "ok" if errors else None


def _ok(good: bool) -> str:
    return "ok" if good else "error"


def _flags(value: Mapping[Any, Any]) -> list[bool]:
    """Whether each of `FLAGS` that a mapping has is that of success."""
    return [value[name] is good for name, good in FLAGS.items() if isinstance(value.get(name), bool)]


def _name_a_timeout(words: set[str], errors: list[Any]) -> bool:
    codes = {error for error in errors if isinstance(error, str)}
    return bool((words | codes) & TIMEOUT_WORDS) or any(isinstance(error, TimeoutError) for error in errors)


def _counts(value: Mapping[Any, Any]) -> tuple[int, int] | None:
    """(passed, failed) of a mapping."""
    passed, failed = _number(value, "passed"), _number(value, "failed", "failures")
    return None if passed is None and failed is None else (passed or 0, failed or 0)


def _number(value: Mapping[Any, Any], *names: str) -> int | None:
    """The first whole number among these fields."""
    numbers = (value.get(name) for name in names)
    return next((one for one in numbers if isinstance(one, int) and not isinstance(one, bool)), None)
