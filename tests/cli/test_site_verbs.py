"""`init` and `doctor` with the suite's cluster."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from libra_hpc_cli.check import site_config
from libra_hpc_cli.doctor import on_an_env_node

from libra_hpc.annexes.devcluster.cluster import ClusterInfo
from libra_hpc.config.load import with_values

from .conftest import Cli

pytestmark = pytest.mark.cluster


def test_a_profile_is_written_once_and_used(
    cluster: ClusterInfo, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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
    assert {finding["subject"]: finding["state"] for finding in answer["findings"]}["scheduler"] == "good"
    run_file = tmp_path / "run.toml"
    run_file.write_text("")
    shown = json.loads(cli("config", "show", str(run_file)).out)
    assert shown["slurm"]["account"] == "rl"
    assert shown["components"]["train"]["partition"] == "a800"


def test_doctor_without_slurm_says_so_and_goes_on(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIBRA_HPC_CLUSTER", str(tmp_path / "no-cluster"))
    monkeypatch.setenv("PATH", str(tmp_path))
    done = cli("doctor")
    assert done.code == 1
    assert "sbatch" in done.out
    assert "run.dir" in done.out


@pytest.mark.nightly
@pytest.mark.engine
@pytest.mark.vllm
@pytest.mark.timeout(600)
def test_two_nodes_are_tried_with_mpi_collectives_and_an_engine(
    cluster: ClusterInfo, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("vllm")
    path = tmp_path / "site.toml"
    node = 'partition = "a800"\ngpus = 1\ncpus = 1\nmem = "4G"\n'
    path.write_text(f'[run]\ndir = "{tmp_path / "runs"}"\n[components.train]\n{node}')
    monkeypatch.setenv("LIBRA_HPC_SITE", str(path))
    done = cli("doctor", "--submit", "--json")
    findings = json.loads(done.out)["findings"]
    assert not [finding for finding in findings if finding["state"] == "bad"], findings
    subjects = [finding["subject"].partition(": ")[2] for finding in findings]
    assert [subjects.count(name) for name in ("vllm", "MPI", "meeting", "all-reduce", "vLLM engine")] == [2, 2, 2, 2, 1]
    assert any(finding["found"].startswith("2 ranks") for finding in findings)
    assert not list((tmp_path / "runs").iterdir()), "nothing is left of a job that found no fault"


def test_nodes_that_do_not_answer_are_said_with_their_logs(
    cluster: ClusterInfo, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "site.toml"
    path.write_text(f'[run]\ndir = "{tmp_path / "runs"}"\n[compute]\nsetup = ["exit 3"]\n')
    monkeypatch.setenv("LIBRA_HPC_SITE", str(path))
    done = cli("doctor", "--submit", "--json", "--nodes", "1")
    assert done.code == 1
    last = json.loads(done.out)["findings"][-1]
    assert (last["subject"], last["state"]) == ("node 0", "bad")
    assert "FAILED" in last["found"]


def test_boxes_are_tried_on_a_node_of_each_partition(
    cluster: ClusterInfo, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "site.toml"
    path.write_text(f'[run]\ndir = "{tmp_path / "runs"}"\n')
    monkeypatch.setenv("LIBRA_HPC_SITE", str(path))
    done = cli("env", "probe", "--partition", "cpu", "--partition", "nope", "--json")
    rows = [(row["where"], row["sandbox"], row["works"]) for row in json.loads(done.out)]
    assert rows == [("cpu", "bwrap", True), ("cpu", "apptainer", False), ("cpu", "none", True), ("nope", "-", False)]
    assert "nope" in json.loads(done.out)[-1]["why"]
    there = with_values(site_config(), {"components.env.partition": "cpu"})
    assert on_an_env_node(there, "bwrap")[:2] == ("box of env nodes", "good"), "doctor --submit does the same"
    nowhere = with_values(there, {"components.env.partition": "nope"})
    assert (on_an_env_node(nowhere, "bwrap").state, "nope" in on_an_env_node(nowhere, "bwrap").found) == ("bad", True)
    assert not list((tmp_path / "runs").iterdir()), "nothing is left of the job"
