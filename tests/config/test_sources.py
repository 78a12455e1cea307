"""The source of every value, and a written run file that gives the same configuration again."""

from __future__ import annotations

from pathlib import Path

import pytest

from libra_hpc.config.load import load_run_file
from libra_hpc.config.run import RunConfig
from libra_hpc.config.site import SiteProfile
from libra_hpc.config.sources import DEFAULTS, as_toml, queued_sources, run_file_sources, values

SITE = SiteProfile(
    {
        "slurm": {"account": "rl", "mpi": "pmix"},
        "compute": {"env": {"A": "1"}},
        "components": {"hybrid": {"partition": "a800"}},
    },
    dict.fromkeys(("slurm.account", "slurm.mpi", "compute.env", "components.hybrid.partition"), Path("/etc/site.toml")),
)
RUN_FILE = """
[run]
dir = "r\\u00fcns \\"a\\" \\\\ \\n \\u0000"
[slurm]
mpi = "pmi2"
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


def test_every_value_names_the_layer_it_comes_from(run_file: Path) -> None:
    found = run_file_sources(run_file, ["rollout.tp=4", "components.train={nodes=2}"], SITE)
    assert found == {
        "slurm.account": "site profile /etc/site.toml",
        "components.hybrid.partition": "site profile /etc/site.toml",
        "compute.env": "site profile /etc/site.toml, run file",
        **dict.fromkeys(("run.dir", "slurm.mpi", "slurm.extra", "task.options", "optimizer.lr"), "run file"),
        **dict.fromkeys(("rollout.tp", "components.train.nodes"), "-o"),
    }


def test_a_section_of_hybrid_nodes_is_the_source_of_their_number(run_file: Path) -> None:
    found = run_file_sources(run_file, ["components.hybrid.gpus=8"], SITE)
    assert found["components.hybrid.nodes"] == "-o"
    run_file.write_text("[components.hybrid]\ngpus = 8\n")
    assert run_file_sources(run_file, [], SITE)["components.hybrid.nodes"] == "run file"


@pytest.mark.parametrize("everything", [False, True], ids=["set", "all"])
def test_a_written_run_file_loads_to_the_same_configuration_with_and_without_its_site(
    everything: bool, run_file: Path, tmp_path: Path
) -> None:
    config = load_run_file(run_file, ["rollout.tp=[2]"], SITE.values)
    sources = run_file_sources(run_file, ["rollout.tp=[2]"], SITE)
    written = tmp_path / "written.toml"
    written.write_text(as_toml(config, values(config) if everything else sources, sources), encoding="utf-8")
    assert load_run_file(written) == config
    assert load_run_file(written, (), SITE.values) == config
    assert ("[deadlines]" in written.read_text()) == everything
    assert max(len(line) for line in written.read_text().splitlines() if not line.startswith("options")) <= 80


def test_a_site_with_hybrid_nodes_makes_no_run_use_one(tmp_path: Path) -> None:
    (tmp_path / "empty.toml").write_text("")
    config = load_run_file(tmp_path / "empty.toml", (), SITE.values)
    written = tmp_path / "written.toml"
    written.write_text(as_toml(config, SITE.sources))
    assert load_run_file(written) == config
    assert config.components.hybrid.nodes == 0


def test_the_default_configuration_is_an_empty_run_file() -> None:
    assert as_toml(RunConfig(), ()) == ""
    assert list(DEFAULTS) == list(values(RunConfig()))


def test_a_queued_run_names_what_its_run_file_does_not_say(run_file: Path) -> None:
    run_file.write_text('[model]\npath = "./model"\n[rollout]\ntp = 2\n[algorithm]\neta = 1\n')
    config = load_run_file(run_file, ["model.path=/shared/model", "rollout.tp=4", "slurm.account=rl"])
    assert queued_sources(config, run_file) == {
        "model.path": "run file",
        "algorithm.eta": "run file",
        "rollout.tp": "submit",
        "slurm.account": "submit",
    }
