"""What `bench.moves` measures: bytes of a join, and its table."""

from __future__ import annotations

from pathlib import Path

import pytest

import bench.harness
from bench.moves import Round, measure, medians, show, write_model


@pytest.mark.engine
def test_a_join_moves_all_weights_or_nothing_where_the_node_has_them(tmp_path: Path) -> None:
    parameters = write_model(tmp_path / "model", 0)
    found = measure(tmp_path / "model", tmp_path / "run", rounds=1, tokens=16)
    assert [one.received for one in found["local"]] == [0]
    assert [one.received for one in found["owners"]] == [2 * parameters]
    assert all(one.to_training_s >= one.wait_s * 0.5 > 0 < one.to_rollout_s for ways in found.values() for one in ways)


def test_a_model_has_about_the_parameters_that_were_asked_for(tmp_path: Path) -> None:
    assert write_model(tmp_path / "model", 220e6) == pytest.approx(220e6, rel=0.05)


def test_the_table_fits_80_columns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench.harness, "RESULTS", tmp_path)

    def way(seconds: float, received: int) -> dict[str, float]:
        one = Round(
            to_training_s=seconds,
            to_training_cpu_s=seconds,
            received=received,
            wait_s=seconds,
            first_s=200.0,
            second_s=100.0,
            to_rollout_s=seconds,
            to_rollout_cpu_s=seconds,
            free_s=seconds,
            training_bytes=18_000,
            standby_bytes=12_000,
        )
        return medians([one], parameters=1000, empty=0)

    ways = {"local": way(50.0, 0), "owners": way(125.0, 123_456_000_000)}
    show(ways, "A node moves", [])
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    (training,) = [line for line in lines if "to training, s" in line]
    assert training.replace("│", "").split()[-2:] == ["50.00", "125.00"]
    assert any("in training" in line and "18.00" in line for line in lines)
