"""The tests themselves: files that somebody reads, and groups that stay on one worker."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

LONGEST = 400
TESTS = Path(__file__).parent


def test_no_file_of_tests_is_long() -> None:
    lengths = {str(path.relative_to(TESTS)): len(path.read_text().splitlines()) for path in TESTS.rglob("*.py")}
    assert {name for name, length in lengths.items() if length > LONGEST} == set()


@pytest.mark.xdist_group("together")
@pytest.mark.skipif("PYTEST_XDIST_WORKER" not in os.environ, reason="one process runs all tests")
def test_xdist_sees_the_groups_of_tests(request: pytest.FixtureRequest) -> None:
    assert request.node.nodeid.endswith("@together"), "two embedded Slurms would run at the same time"
