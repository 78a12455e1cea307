"""What an owner may write, and at which minutes he lends."""

from __future__ import annotations

import pytest

from libra_hpc.annexes.lend.lender_record import Hours, first_token_s, memory_mib
from libra_hpc.errors import UserError


def test_hours_over_midnight_have_the_night_and_not_the_day() -> None:
    night = Hours.parse("20-08")
    assert [night.has(hour * 60) for hour in (0, 7, 8, 12, 19, 20, 23)] == [True, True, False, False, False, True, True]
    assert str(night) == "20-08"
    day = Hours.parse("08:30-17")
    assert [day.has(minute) for minute in (509, 510, 1019, 1020)] == [False, True, True, False]
    assert str(day) == "08:30-17"


def test_no_hours_and_the_whole_day_are_always() -> None:
    for always in (Hours.parse(""), Hours.parse("0-24")):
        assert always.has(0)
        assert always.has(1439)
    assert Hours.parse("22-24").has(1439)
    assert not Hours.parse("22-24").has(0)


@pytest.mark.parametrize("text", ["20", "20-25", "8-8", "20:60-8", "night", "24-0"])
def test_hours_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(UserError, match=f"--hours = '{text}'"):
        Hours.parse(text)


def test_limits_and_memory_have_units() -> None:
    assert [first_token_s(f"ttft={time}") for time in ("500ms", "2s")] == [0.5, 2.0]
    assert [memory_mib(text) for text in ("", "30GiB", "512MiB", "1.5GiB")] == [0, 30720, 512, 1536]
