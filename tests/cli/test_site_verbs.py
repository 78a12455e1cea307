"""`init` and `doctor` with the suite's cluster."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from libra_hpc.slurm.devcluster.cluster import ClusterInfo

from .conftest import Outcome

pytestmark = pytest.mark.cluster


def test_a_profile_is_written_once_and_used(
    cluster: ClusterInfo, cli: Callable[..., Outcome], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "new" / "site.toml"
    assert cli("init", str(path), "--account", "rl").code == 0
    again = cli("init", str(path))
    assert again.code == 2
    assert "there is a profile already" in again.err
    assert cli("init", "--print").out.count("[components.train]") == 1
    monkeypatch.setenv("LIBRA_HPC_SITE", str(path))
    done = cli("doctor", "--json")
    answer = json.loads(done.out)
    assert str(path) in answer["site_files"]
    assert {finding["subject"]: finding["state"] for finding in answer["findings"]}["MPI plugin"] == "good"
    run_file = tmp_path / "run.toml"
    run_file.write_text("")
    shown = json.loads(cli("config", "show", str(run_file)).out)
    assert shown["slurm"]["account"] == "rl"
    assert shown["components"]["train"]["partition"] == "a800"


def test_doctor_without_slurm_says_so_and_goes_on(
    cli: Callable[..., Outcome], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LIBRA_HPC_CLUSTER", str(tmp_path / "no-cluster"))
    monkeypatch.setenv("PATH", str(tmp_path))
    done = cli("doctor")
    assert done.code == 1
    assert "sbatch" in done.out
    assert "run.dir" in done.out
