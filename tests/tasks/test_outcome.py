"""Outcomes come from structure: exit codes, exceptions, flags, test counts; words decide nothing."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra_hpc.protocol.env import Signal
from libra_hpc.tasks.base import ToolResult
from libra_hpc.tasks.tool_outcome import Outcome, classify, count_tests, signal_of

WORDS = (
    "0 errors",
    "0 errors, 2 warnings",
    "error: none found",
    "no failures, 3 warnings",
    "Traceback is a word",
    "",
    "{not json",
)
FINE = (
    *(*WORDS, 0, None, 3.5, ["error"], {}, {"output": "0 errors"}, {"ok": True, "output": "failed before"}),
    *({"error": None}, {"error": ""}, {"errors": []}, {"errors": 0}, {"exception": False}),
    *({"status": "success", "error": None}, {"success": True}, {"status": "weird"}, {"status": "Completed "}),
    *({"result": "timeout"}, {"data": {"status": "success"}}),
    {"is_error": False, "content": [{"type": "text", "text": "error"}]},
)
FAILED = (
    *(ValueError("x"), {"error": "no such file"}, {"exception": KeyError("x")}, {"traceback": "..."}),
    *({"errors": ["a"]}, {"errors": 3}, {"is_error": True}, {"isError": True, "content": []}, {"success": False}),
    *({"ok": False, "status": "ok"}, {"status": "FAILED"}, {"state": "killed"}, {"outcome": "error"}),
    *({"status": "success", "error": "but"}, {"result": {"error": "deep"}}),
    *({"data": {"response": {"status": "failure"}}}, '{"status": "error"}', {"output": '{"success": false}'}),
)
OUT_OF_TIME = (
    *(TimeoutError(), {"status": "timeout"}, {"status": "timed_out", "error": "killed"}, {"timed_out": True}),
    *({"error": TimeoutError()}, {"error": "timeout"}, {"result": {"state": "deadline_exceeded"}}),
)


@pytest.mark.parametrize(
    ("outcome", "value"),
    [(name, value) for name, values in (("ok", FINE), ("error", FAILED), ("timeout", OUT_OF_TIME)) for value in values],
)
def test_fields_of_a_result_and_exceptions_decide_and_words_do_not(outcome: str, value: Any) -> None:
    assert classify(value) == Outcome(outcome)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"exit_code": 1, "output": "all fine"}, Outcome("error", 1)),
        ({"exit_code": 0, "output": "error: 0 errors"}, Outcome("ok", 0)),
        ({"returncode": -9}, Outcome("error", -9)),
        ({"return_code": 0, "error": "left over", "status": "failed"}, Outcome("ok", 0)),
        ({"exit_code": None, "status": "success"}, Outcome("ok")),
        ({"exit_code": True}, Outcome("ok")),
        ({"exit_code": 124, "output": ""}, Outcome("timeout", 124)),
        ({"result": {"exit_code": 2}}, Outcome("error", 2)),
        ({"status": "success", "result": {"exit_code": 2}}, Outcome("ok", 2)),
    ],
)
def test_exit_codes(value: Any, expected: Outcome) -> None:
    assert classify(value) == expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("12 passed, 0 errors", Outcome("ok", None, 12, 0)),
        ("collected 3\n\n=== 1 failed, 2 passed, 1 warning in 0.12s ===\n", Outcome("error", None, 2, 1)),
        ("=== 2 errors in 0.50s ===", Outcome("error", None, 0, 2)),
        ("5 passed, 1 xfailed, 2 skipped in 61.00s (0:01:01)", Outcome("ok", None, 6, 0)),
        ("..F\nRan 3 tests in 0.001s\n\nFAILED (failures=1, errors=1)\n", Outcome("error", None, 1, 2)),
        ("...\nRan 3 tests in 0.001s\n\nOK\n", Outcome("ok", None, 3, 0)),
        ({"exit_code": 1, "stdout": "1 failed, 2 passed in 0.1s"}, Outcome("error", 1, 2, 1)),
        ({"exit_code": 0, "stdout": "1 failed, 2 passed in 0.1s"}, Outcome("ok", 0, 2, 1)),
        ({"passed": 3, "failed": 0}, Outcome("ok", None, 3, 0)),
        ({"passed": 3, "failures": 1}, Outcome("error", None, 3, 1)),
        ({"passed": 3}, Outcome("ok", None, 3, 0)),
        ({"passed": True}, Outcome("ok")),
        ({"status": "success", "output": "2 failed, 1 passed in 0.1s"}, Outcome("ok", None, 1, 2)),
        # A result of the sandbox keeps its outcome, but for an exit code, which is a fact.
        (ToolResult("timeout", "12 passed", 1.0), Outcome("timeout", None, 12, 0)),
        (ToolResult("error", "ValueError: 0 errors", 1.0), Outcome("error")),
        (ToolResult("error", "3 passed in 0.1s", 1.0, 1), Outcome("error", 1, 3, 0)),
        (ToolResult("ok", "2 failed in 0.1s", 1.0, 0), Outcome("ok", 0, 0, 2)),
        (ToolResult("ok", {"exit_code": 1}, 1.0), Outcome("error", 1)),
        (ToolResult("ok", 7, 1.0), Outcome("ok")),
    ],
)
def test_test_counts(value: Any, expected: Outcome) -> None:
    assert classify(value) == expected


ORDINARY = "I passed 3 of 4; 3 apples; 0 errors; 2 passed the exam; Ran 3 tests; errors=3"


@pytest.mark.parametrize("text", [*ORDINARY.split("; "), "7 passed\n" + "x" * 3000])
def test_ordinary_text_is_no_test_summary(text: str) -> None:
    assert count_tests(text) is None


def test_the_last_summary_counts() -> None:
    assert count_tests("1 failed in 0.1s\nagain\n1 passed in 0.1s\nbye") == (1, 0)


def test_the_signal() -> None:
    tests = ToolResult("ok", "1 failed, 2 passed in 0.1s", 2.5)
    assert signal_of("pytest", tests, 40) == Signal("pytest", "error", 40, 2.5, None, 2, 1)
    assert signal_of("sh", {"returncode": 3}, 7, 0.5) == Signal("sh", "error", 7, 0.5, 3)
    assert signal_of("look", "text", 7) == Signal("look", "ok", 7, 0.0)


FIELDS = ["exit_code", "error", "status", "passed", "failed", "result", "success", "x"]
plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=30),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(FIELDS), inner, max_size=4),
    max_leaves=12,
)


@given(plain)
def test_any_plain_value_has_an_outcome(value: Any) -> None:
    found = classify(value)
    assert found.outcome in ("ok", "error", "timeout")
    assert (found.passed is None) == (found.failed is None)
