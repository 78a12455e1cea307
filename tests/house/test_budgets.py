"""Nobody adds lines without noticing: each room has a budget in the table of docs/architecture.md."""

from __future__ import annotations

import pytest

from .sources import ROOT, sources
from .test_rooms import table

LIBRARY, CHECKS, PAGES = 70_759, 65_144, 33_641
"""Lines of the library with its verbs, lines of tests and benchmarks, and words of README and user pages."""
BUDGETS = {room: row.lines for room, row in table().items()}


def lines(*folders: str) -> int:
    """Lines of Python."""
    return sum(len(path.read_text().splitlines()) for path in sources(*folders))


@pytest.mark.parametrize("room", BUDGETS)
def test_a_room_fills_its_budget_and_no_more(room: str) -> None:
    budget, used = BUDGETS[room], lines(room)
    assert used <= budget, "remove lines, or raise the budget and say in the commit what for"
    assert budget - used <= 0.1 * used + 50, "lower the budget to what is used"


def test_the_library_stays_small() -> None:
    assert lines("libra_hpc", "cli") <= LIBRARY


def test_tests_and_benchmarks_stay_small() -> None:
    assert lines("tests", "bench") <= CHECKS


def test_user_pages_stay_short() -> None:
    pages = [ROOT / "README.md", *(page for page in (ROOT / "docs").glob("*.md") if page.name != "architecture.md")]
    assert sum(len(page.read_text().split()) for page in pages) <= PAGES
