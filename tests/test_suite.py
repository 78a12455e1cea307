"""The tests themselves: no file is so long that nobody reads it."""

from __future__ import annotations

from pathlib import Path

LONGEST = 400
TO_BE_SPLIT = {"cli/test_mistakes.py", "cli/test_verbs.py", "coordinator/test_coordinator.py"}
TESTS = Path(__file__).parent


def test_no_file_of_tests_is_long() -> None:
    lengths = {str(path.relative_to(TESTS)): len(path.read_text().splitlines()) for path in TESTS.rglob("*.py")}
    assert {name for name, length in lengths.items() if length > LONGEST} <= TO_BE_SPLIT
