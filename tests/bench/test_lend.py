"""The harm table: its traffic, and the figures of its lines."""

from __future__ import annotations

import statistics
from collections import Counter
from types import SimpleNamespace

import pytest

from bench.lend import COLUMNS, high, table
from bench.lend_traffic import traffic


@pytest.mark.parametrize("kind", ["code", "conversation"])
def test_the_load_is_the_one_that_was_asked_for(kind: str) -> None:
    found = traffic(kind, 3, 200.0, 0.2, 0.05)
    assert found == traffic(kind, 3, 200.0, 0.2, 0.05)
    assert found != traffic(kind, 4, 200.0, 0.2, 0.05)
    assert len(found) == 200.0 * 0.2 / 0.05
    assert all(0.0 <= one.arrival <= 200.0 for one in found)
    assert [one.arrival for one in found] == sorted(one.arrival for one in found)


def test_code_comes_in_bursts_and_conversation_does_not() -> None:
    ratios = {}
    for kind in ("code", "conversation"):
        counts = Counter(int(one.arrival) for one in traffic(kind, 1, 400.0, 0.2, 0.05))
        seconds = [counts[second] for second in range(400)]
        ratios[kind] = statistics.pvariance(seconds) / statistics.fmean(seconds)
    assert ratios["code"] > 4.0
    assert ratios["conversation"] < 2.0


def test_the_high_quantile_lies_between_the_nearest_two() -> None:
    assert high([1.0]) == 1.0
    assert high([float(number) for number in range(101)]) == 99.0


def played(way: str, ttft: list[float], rate: float) -> dict[str, object]:
    tpot = [0.01] * len(ttft)
    fields = {"busy": 0.2, "rollout_rate": rate, "longest": 0.05}
    return {"row": "code 20%", "seed": 0, "way": way, "ttft": ttft, "tpot": tpot, **fields}


def test_ratios_are_to_both_plays_alone() -> None:
    found = [
        played("alone", [0.1, 0.1], 0.0),
        played("alone again", [0.2, 0.2], 0.0),
        played("no gate", [0.4, 0.4], 1000.0),
        played("idle", [0.2, 0.3], 800.0),
    ]
    lines = table(SimpleNamespace(ttft_ms=250.0, tpot_ms=40.0), found)  # type: ignore[arg-type]
    by_way = {line[1]: dict(zip(COLUMNS, line, strict=True)) for line in lines}
    assert [by_way[way]["x"] for way in ("alone", "alone again", "no gate")] == ["0.50", "1.00", "2.00"]
    assert [by_way[way]["over TTFT"] for way in ("alone", "no gate", "idle")] == ["0.0%", "100.0%", "50.0%"]
    assert [by_way[way]["rollout"] for way in ("alone", "no gate", "idle")] == ["-", "1.00", "0.80"]
