"""A written run file gives the same configuration again."""

from __future__ import annotations

from pathlib import Path

import pytest

from libra_hpc.config.load import load_run_file
from libra_hpc.config.run import RunConfig
from libra_hpc.config.run_file_text import DEFAULTS, as_toml, values
from libra_hpc.config.site import dotted

SITE = {
    "slurm": {"account": "rl", "qos": "night"},
    "compute": {"env": {"A": "1"}},
    "components": {"hybrid": {"partition": "a800"}},
}
RUN_FILE = """
[run]
dir = "r\\u00fcns \\"a\\" \\\\ \\n \\u0000"
[slurm]
qos = "day"
extra = ["--exclusive", "--nice=10"]
[compute.env]
B = "2"
[task.options]
"a b" = [1, 2.5, true, "x"]
table = { inner = { deep = 1e-9 }, none = {} }
[optimizer]
lr = 3e-7
[rollout]
tp = 2
"""


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(RUN_FILE)
    return path


def test_a_written_run_file_loads_to_the_same_configuration_with_and_without_its_site(
    run_file: Path, tmp_path: Path
) -> None:
    config = load_run_file(run_file, ["rollout.tp=[2]"], SITE)
    written = tmp_path / "written.toml"
    written.write_text(as_toml(config, dotted(SITE)), encoding="utf-8")
    assert load_run_file(written).as_data() == config.as_data()
    assert load_run_file(written, (), SITE).as_data() == config.as_data()
    assert "[deadlines]" not in written.read_text()


def test_a_site_with_hybrid_nodes_makes_no_run_use_one(tmp_path: Path) -> None:
    (tmp_path / "empty.toml").write_text("")
    config = load_run_file(tmp_path / "empty.toml", (), SITE)
    written = tmp_path / "written.toml"
    written.write_text(as_toml(config, dotted(SITE)))
    assert load_run_file(written).as_data() == config.as_data()
    assert config.components.hybrid.nodes == 0


def test_the_default_configuration_is_an_empty_run_file() -> None:
    assert as_toml(RunConfig(), ()) == ""
    assert list(DEFAULTS) == list(values(RunConfig()))
