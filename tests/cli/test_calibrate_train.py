"""`libra-hpc calibrate train`: a real replica is measured, here or in a job, and `plan` takes the factor."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from libra_hpc.annexes.devcluster.cluster import ClusterInfo
from libra_hpc.models.step_times.train_speed import load_speed

from .conftest import Cli

CONFIG = {
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 128,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "dtype": "float32",
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model folder without weights."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def arguments(model: Path, out: Path, *more: str) -> list[str]:
    quick = ["--seconds", "1", "--micro-tokens", "128", "--name", "a800"]
    return ["calibrate", "train", "--model", str(model), "-o", str(out), *quick, *more]


@pytest.mark.nightly
def test_a_replica_without_weights_is_measured_here(cli: Cli, model: Path, tmp_path: Path) -> None:
    pytest.importorskip("megatron")
    out = tmp_path / "speed.json"
    done = cli(*arguments(model, out, "--tp", "2", "--here"))
    assert done.code == 0, done.err
    speed = load_speed(out)
    assert (speed.device, speed.model, speed.layout) == ("a800", "tiny", "TP2·PP1·DP1")
    assert [sample.context for sample in speed.samples] == [16, 64, 128]
    assert speed.factor > 1.0, "a CPU is slower than the device it is compared with"
    assert f"planner.train_speed={out}" in " ".join(done.out.split())


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_a_replica_is_measured_in_a_job(
    cluster: ClusterInfo, cli: Cli, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("megatron")
    site = tmp_path / "site.toml"
    node = 'partition = "a800"\ngpus = 1\ncpus = 1\nmem = "4G"\nextra = ["--comment=speed"]\n'
    site.write_text(f'[run]\ndir = "{tmp_path / "runs"}"\n[components.train]\n{node}')
    monkeypatch.setenv("LIBRA_HPC_SITE", str(site))
    out = tmp_path / "speed.json"
    done = cli(*arguments(model, out, "--json"))
    assert done.code == 0, done.err
    assert "on a train node" in done.err
    assert json.loads(done.out)["factor"] == load_speed(out).factor
    assert not list((tmp_path / "runs").iterdir()), "nothing is left of a job that succeeded"


def test_a_refusal_of_slurm_is_one_sentence(
    cluster: ClusterInfo, cli: Cli, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "site.toml"
    site.write_text(f'[run]\ndir = "{tmp_path / "runs"}"\n[components.train]\npartition = "nowhere"\n')
    monkeypatch.setenv("LIBRA_HPC_SITE", str(site))
    done = cli(*arguments(model, tmp_path / "speed.json"))
    assert done.code == 2
    assert "nowhere" in done.err
    assert done.err.count("\n") == 1
    assert not (tmp_path / "speed.json").exists()
