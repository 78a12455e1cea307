"""The site profile: where it is looked for, what may stand in it, and that a run file wins over it."""

from __future__ import annotations

from pathlib import Path

import pytest

from libra_hpc.config import site
from libra_hpc.config.load import load_run_file
from libra_hpc.config.site import site_profile
from libra_hpc.errors import UserError


@pytest.fixture(autouse=True)
def nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(site, "SYSTEM", tmp_path / "system.toml")
    monkeypatch.setattr(site, "OWN", tmp_path / "own.toml")


def test_later_places_win_key_by_key_and_the_run_file_wins_over_all(tmp_path: Path) -> None:
    (tmp_path / "system.toml").write_text(
        '[slurm]\naccount = "all"\nqos = "night"\n[compute]\nsetup = ["module load a"]\nenv = { A = "1", B = "1" }\n'
        '[components.hybrid]\npartition = "a800"\n[components.train]\npartition = "a800"\n'
    )
    (tmp_path / "own.toml").write_text('[slurm]\naccount = "mine"\n[compute.env]\nB = "2"\n')
    (tmp_path / "named.toml").write_text('[compute]\nsetup = ["module load b"]\n')
    profile = site_profile({"LIBRA_HPC_SITE": str(tmp_path / "named.toml")})
    assert profile["slurm"] == {"account": "mine", "qos": "night"}
    run_file = tmp_path / "run.toml"
    run_file.write_text('[components.train]\nnodes = 3\n[compute.env]\nA = "3"\n')
    config = load_run_file(run_file, ["slurm.account=other"], profile)
    assert (config.slurm.account, config.slurm.qos) == ("other", "night")
    assert (config.compute.setup, config.compute.env) == (["module load b"], {"A": "3", "B": "2"})
    assert (config.components.train.partition, config.components.train.nodes) == ("a800", 3)
    assert config.components.hybrid.nodes == 0, "a site that has hybrid nodes does not make a run use one"
    run_file.write_text("[components.hybrid]\ngpus = 8\n")
    hybrid = load_run_file(run_file, below=profile).components.hybrid
    assert (hybrid.nodes, hybrid.partition) == (1, "a800")


def test_without_a_profile_nothing_changes(tmp_path: Path) -> None:
    assert site_profile({}) == {}
    (tmp_path / "own.toml").write_text("[algorithm]\neta = 9\n")
    assert site_profile({"LIBRA_HPC_SITE": "none"}) == {}


def test_a_profile_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no such file; valid: a site profile, or 'none'"):
        site_profile({"LIBRA_HPC_SITE": str(tmp_path / "absent.toml")})
