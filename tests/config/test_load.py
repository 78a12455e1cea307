"""Run files and overrides: what loads, and the one sentence for what does not."""

from __future__ import annotations

from pathlib import Path

import pytest

from libra_hpc.config.load import load_run_file, validate
from libra_hpc.config.run import RunConfig
from libra_hpc.errors import UserError


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(text)
    return path


def test_an_empty_file_is_all_defaults(tmp_path: Path) -> None:
    assert load_run_file(write(tmp_path, "")) == RunConfig()


def test_resolved_configuration_loads_back() -> None:
    config = validate({"algorithm": {"eta": 3}, "slurm": {"extra": ["--constraint=nvlink"]}})
    assert validate(config.as_data()).as_data() == config.as_data()


@pytest.mark.parametrize(("written", "meant"), [("true", "full"), ("false", "none"), ('"selective"', "selective")])
def test_recompute_may_be_a_boolean_as_in_older_files(tmp_path: Path, written: str, meant: str) -> None:
    config = load_run_file(write(tmp_path, f"[train]\nrecompute = {written}\n"))
    assert config.train.recompute == meant
    assert load_run_file(write(tmp_path, ""), [f"train.recompute={written}"]) == config


def test_overrides_apply_in_order_and_keep_toml_types(tmp_path: Path) -> None:
    path = write(tmp_path, "[algorithm]\neta = 1\n")
    numbers = ["algorithm.eta=2", "algorithm.eta = 4", "optimizer.lr=1", "task.options.depth=3"]
    config = load_run_file(path, [*numbers, "planner.enabled=false", 'slurm.extra=["--exclusive"]'])
    assert config.algorithm.eta == 4
    assert config.optimizer.lr == 1.0
    assert config.planner.enabled is False
    assert config.slurm.extra == ["--exclusive"]
    assert config.task.options == {"depth": 3}


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("slurm.time_limit=00:30:00", "00:30:00"),
        ('slurm.time_limit="00:30:00"', "00:30:00"),
        ("slurm.time_limit=30", "30"),
        ("slurm.time_limit=1-2", "1-2"),
    ],
)
def test_text_fields_take_overrides_verbatim(tmp_path: Path, override: str, value: str) -> None:
    assert load_run_file(write(tmp_path, ""), [override]).slurm.time_limit == value


def test_deep_nesting_is_a_sentence_and_no_traceback(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not valid TOML: it is nested too deeply"):
        load_run_file(write(tmp_path, "[task.options]\nx = " + "[" * 20_000))
    data: dict[str, object] = {}
    for _ in range(5_000):
        data = {"options": data}
    with pytest.raises(UserError, match="nested too deeply"):
        validate({"task": data})
