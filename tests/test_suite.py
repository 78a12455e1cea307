"""The tests themselves: no file is so long that nobody reads it."""

from __future__ import annotations

from pathlib import Path

LONGEST = 400
TESTS = Path(__file__).parent


def test_no_file_of_tests_is_long() -> None:
    lengths = {path: len(path.read_text().splitlines()) for path in TESTS.rglob("*.py")}
    assert not {str(path.relative_to(TESTS)): length for path, length in lengths.items() if length > LONGEST}
