"""The A800 run files: good by every check, planned, and accepted by the embedded cluster with its six A800 nodes."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from bench.tabulate import hf_config
from libra_hpc.config.load import load_run_file
from libra_hpc.config.node_groups import het_groups, rank_components
from libra_hpc.config.run import RunConfig
from libra_hpc.facts.rundir import RunDir
from libra_hpc.models.shapes import ModelShape, model_shape
from libra_hpc.planning.initial import initial_plan
from libra_hpc.preflight.checks import check_run
from libra_hpc.preflight.host_memory_needs import check_hosts, host_needs, node_rooms
from libra_hpc.slurm.fit import doubts, with_resources
from libra_hpc.slurm.launch import Launch, job_request
from libra_hpc.slurm.queue.query import Partition, partitions
from libra_hpc.slurm.submit import expected_start
from tests.preflight.test_checks import write_model

pytestmark = pytest.mark.usefixtures("few_batches")
EXAMPLES = Path(__file__).parents[2] / "examples"
FILES = {
    "README-8": "qwen3-4b",
    "a800-8": "qwen3-4b",
    "a800-8-borrow": "qwen3-4b",
    **{f"a800-48-{model}": model for model in ("qwen3-8b", "qwen3-14b", "qwen3-32b", "qwen3-30b-a3b")},
}

ONE_TB = Partition("gpu", True, "up", 6, 6, 128, 1_000_000, {"a800": 8}, None)


def model_folder(folder: Path, shape: ModelShape) -> Path:
    """A policy of that shape."""
    return write_model(folder, hf_config(shape) | {"rms_norm_eps": 1e-6, "rope_theta": 1e6})


def resolved(name: str, folder: Path) -> RunConfig:
    model = model_folder(folder / "policy", model_shape(FILES[name]))
    file = EXAMPLES / f"{name}.toml"
    if name == "README-8":
        file = folder / "run.toml"
        file.write_text((EXAMPLES.parent / "README.md").read_text().split("```toml\n")[1].split("```")[0])
    config = load_run_file(file, [f"model.path={model}", f"run.dir={folder}"])
    rooms = node_rooms(config, [ONE_TB])
    return initial_plan(config, rooms=rooms).config if config.components.split == "auto" else config


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.nightly] * name.startswith("a800-48-qwen3-8b")) for name in FILES]
)
def test_an_a800_file_is_good_and_uses_every_gpu(name: str, tmp_path: Path) -> None:
    config = resolved(name, tmp_path)
    shape, memory = check_run(config)
    assert shape is not None
    assert not [line for line in memory.warnings if "not checked" in line]
    assert check_hosts(host_needs(config, shape, [ONE_TB])) == []
    groups = het_groups(config)
    assert sum(group.component.nodes * group.component.gpus for group in groups) == int(name.split("-")[1])
    assert rank_components(config)[:2] == ["planner", "train"]


@pytest.mark.cluster
@pytest.mark.parametrize("name", ["a800-8", "a800-48-qwen3-14b"])
def test_slurm_accepts_it(name: str, tmp_path: Path, slurm_env: Mapping[str, str]) -> None:
    known = partitions(slurm_env)
    config = with_resources(resolved(name, tmp_path), known)
    assert doubts(config, known) == []
    run = RunDir.create(tmp_path, config.run.name)
    start = expected_start(Launch(job_request(config), run, 1), slurm_env)
    assert start is not None
    assert start < time.time() + 60.0, "the cluster is free"
