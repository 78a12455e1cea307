"""How a tool call went, from the structure of its answer and never from its words.

Schedulers learn from outcomes, so "0 errors" must not count as an error, nor ``{"exit_code": 1, "output": "..."}`` as
fine.  A task declares the outcome where it knows better (``miss``, ``dead``); `classify` is the default for all others.
The first of these that a mapping has decides:

1. a timeout: a status or error code of `TIMEOUT_WORDS`, ``timed_out: true``, a `TimeoutError`, exit code 124 (that of
   timeout(1));
2. an exit code (`EXIT_CODES`): 0 is ok, anything else an error;
3. an error as a value (`ERRORS`: not None, not false, not empty), or a flag (``is_error``, ``success``, ``ok``);
4. a status word (`STATUSES`), if it is one of the known words of success and failure;
5. test counts: any failed test is an error;
6. an error field that is there and holds nothing: ok;
7. what is inside (`INSIDE`), to `MAX_DEPTH` = 4 mappings deep; text that is a JSON object counts as one.

Everything else is ok: a tool that answered did its work.  Of text only a test runner's closing line is read, and of it
only the counts (`count_tests`).
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
    {
        "error",
        "errored",
        "failure",
        "failed",
        "fail",
        "exception",
        "crashed",
        "killed",
        "aborted",
        "cancelled",
        "canceled",
    }
)
OK_WORDS = frozenset(
    {"ok", "success", "successful", "succeeded", "passed", "pass", "done", "completed", "complete", "finished"}
)
FLAGS = {"is_error": False, "isError": False, "success": True, "ok": True}
"""Boolean fields and their value when all is well."""
TIMEOUT_EXIT = 124
MAX_DEPTH = 4
SUMMARY_CHARS = 2_000
"""End of a text that is searched for a test runner's closing line."""
JSON_CHARS = 1 << 20
"""Longest text that is read as a JSON object."""

_PYTEST = re.compile(r"(?:=+ )?((?:\d+ [a-z]+, )*\d+ [a-z]+)( in [\d.]+ ?s(?: \([\d:]+\))?)?(?: =+)?")
_PYTEST_WORDS = {
    "passed",
    "xfailed",
    "xpassed",
    "failed",
    "error",
    "errors",
    "skipped",
    "deselected",
    "warning",
    "warnings",
    "rerun",
}
_COUNT = re.compile(r"(\d+) ([a-z]+)")
_UNITTEST = re.compile(r"Ran (\d+) tests? in [\d.]+s")
_UNITTEST_FAILED = re.compile(r"(?:failures|errors)=(\d+)")


class Outcome(NamedTuple):
    """What `classify` found."""

    outcome: str
    """``ok`` | ``error`` | ``timeout``"""
    exit_code: int | None = None
    passed: int | None = None
    failed: int | None = None
    """Tests; those that could not run count as failed."""


def classify(result: Any) -> Outcome:
    """Classify a tool's answer: a `ToolResult`, an exception, or any plain value."""
    if not isinstance(result, ToolResult):
        return _classify(result, 0) or Outcome("ok")
    inner = _classify(result.value, 0) or Outcome(result.outcome)
    if result.outcome != "ok" or result.exit_code is not None:
        # The call failed, or its process ended with a known code: what it printed has no say in that.
        return inner._replace(outcome=result.outcome, exit_code=result.exit_code)
    return inner


def signal_of(tool: str, result: Any, payload_tokens: int, seconds: float | None = None) -> Signal:
    """The signal of a call of ``tool`` whose answer adds ``payload_tokens`` to the context.

    ``seconds`` are those of the `ToolResult` when not given, 0.0 for any other value.
    """
    found = classify(result)
    if seconds is None:
        seconds = result.seconds if isinstance(result, ToolResult) else 0.0
    return Signal(tool, found.outcome, payload_tokens, seconds, found.exit_code, found.passed, found.failed)


def count_tests(text: str) -> tuple[int, int] | None:
    """(passed, failed) of the last closing line of a test runner at the end of a text; None without one.

    It is a whole line: pytest's ``=== 3 failed, 12 passed in 0.5s ===`` (rules and time may be absent when tests passed
    or failed), or unittest's ``Ran 12 tests in 0.1s`` with the ``OK`` or ``FAILED (failures=1, errors=2)`` below it.
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
            verdict = next((line for line in lines[i + 1 :] if line), "")
            failed = sum(map(int, _UNITTEST_FAILED.findall(verdict)))
            return max(0, int(unittest[1]) - failed), failed
    return None


def _classify(value: Any, depth: int) -> Outcome | None:
    """The outcome of one value; None when nothing in it says how the call went."""
    if isinstance(value, BaseException):
        return Outcome("timeout" if isinstance(value, TimeoutError) else "error")
    if isinstance(value, str):
        return _classify_text(value, depth)
    if not isinstance(value, Mapping) or depth >= MAX_DEPTH:
        return None
    exit_code = next((code for code in (_whole(value.get(name)) for name in EXIT_CODES) if code is not None), None)
    counts = _counts(value)
    said = _said(value, exit_code, counts)
    if said is None or counts is None:
        inside = next(filter(None, (_classify(value.get(name), depth + 1) for name in INSIDE)), None)
        if inside is not None:
            said, exit_code = said or inside.outcome, inside.exit_code if exit_code is None else exit_code
            counts = counts or _pair(inside.passed, inside.failed)
    return None if said is None else Outcome(said, exit_code, *(counts or (None, None)))


def _classify_text(text: str, depth: int) -> Outcome | None:
    if text[:1] == "{" and len(text) <= JSON_CHARS:
        try:
            return _classify(msgspec.json.decode(text), depth + 1)
        except (msgspec.DecodeError, RecursionError):
            pass
    counts = count_tests(text)
    return None if counts is None else Outcome("error" if counts[1] else "ok", None, *counts)


def _said(value: Mapping[Any, Any], exit_code: int | None, counts: tuple[int, int] | None) -> str | None:
    """What a mapping itself says, in the order of the module."""
    words = {word.strip().lower() for word in (value.get(name) for name in STATUSES) if isinstance(word, str)}
    errors = [value[name] for name in ERRORS if name in value]
    codes = {error for error in errors if isinstance(error, str)}
    flags = [value[name] is good for name, good in FLAGS.items() if isinstance(value.get(name), bool)]
    timed_out = value.get("timed_out") is True or any(isinstance(error, TimeoutError) for error in errors)
    if timed_out or exit_code == TIMEOUT_EXIT or (words | codes) & TIMEOUT_WORDS:
        return "timeout"
    if exit_code is not None:
        return "error" if exit_code else "ok"
    if any(errors) or not all(flags):
        return "error"
    if flags:
        return "ok"
    if words & ERROR_WORDS:
        return "error"
    if words & OK_WORDS:
        return "ok"
    if counts is not None:
        return "error" if counts[1] else "ok"
    return "ok" if errors else None


def _counts(value: Mapping[Any, Any]) -> tuple[int, int] | None:
    """(passed, failed) of a mapping: numbers in ``passed`` / ``failed`` / ``failures`` beside ``errors`` and
    ``total``, or a ``tests`` table or list."""
    tests = value.get("tests")
    if isinstance(tests, Mapping):
        return _counts(tests)
    if isinstance(tests, list) and tests:
        verdicts = [_verdict(test) for test in tests]
        return None if None in verdicts else (verdicts.count(True), verdicts.count(False))
    passed = _whole(value.get("passed"))
    failed = next((n for n in (_whole(value.get(name)) for name in ("failed", "failures")) if n is not None), None)
    if passed is None and failed is None:
        return None
    total = next((n for n in (_whole(tests), _whole(value.get("total"))) if n is not None), None)
    if failed is not None:
        failed += _whole(value.get("errors")) or 0
    elif total is not None:
        failed = max(0, total - (passed or 0))
    if passed is None and total is not None:
        passed = max(0, total - (failed or 0))
    return passed or 0, failed or 0


def _verdict(test: Any) -> bool | None:
    """Whether one entry of a list of tests passed; None when it does not say."""
    if isinstance(test, bool):
        return test
    found = _classify(test, MAX_DEPTH - 1)
    if isinstance(test, Mapping) and isinstance(test.get("passed"), bool):
        return bool(test["passed"])
    return None if found is None else found.outcome == "ok"


def _pair(passed: int | None, failed: int | None) -> tuple[int, int] | None:
    return None if passed is None or failed is None else (passed, failed)


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
