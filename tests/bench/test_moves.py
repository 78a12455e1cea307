"""What `bench.moves` measures: bytes of a join, and its table."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.moves import FIRST, MEMORY, SECOND, WAIT, measure, medians, table, write_model


@pytest.mark.engine
def test_a_join_moves_all_weights_or_nothing_where_the_node_has_them(tmp_path: Path) -> None:
    parameters = write_model(tmp_path / "model", 0)
    found = measure(tmp_path / "model", tmp_path / "run", rounds=1, tokens=16)
    assert [one["  received, MB"] for one in found["local"]] == [0]
    assert [one["  received, MB"] for one in found["owners"]] == [2 * parameters / 1e6]
    for one in (one for ways in found.values() for one in ways):
        assert one["to training, s"] >= one[WAIT] * 0.5 > 0 < one["to rollout, s"]


def test_a_model_has_about_the_parameters_that_were_asked_for(tmp_path: Path) -> None:
    assert write_model(tmp_path / "model", 220e6) == pytest.approx(220e6, rel=0.05)


def test_the_table_has_the_first_step_over_a_later_one_and_memory_per_parameter() -> None:
    one = {WAIT: 50.0, SECOND: 100.0, FIRST: 200.0, MEMORY[0]: 20_000, MEMORY[1]: 14_000}
    lines = table({"local": medians([one, one], parameters=1000, empty=2000)})
    assert dict(map(tuple, lines)) == {
        WAIT: "50.00",
        SECOND: "100.00",
        FIRST: "2.50",
        MEMORY[0]: "18.00",
        MEMORY[1]: "12.00",
    }
