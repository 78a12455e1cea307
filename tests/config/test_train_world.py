"""Processes and replicas of a training world, from the run file."""

from __future__ import annotations

from typing import Any

import pytest

from libra_hpc.config.load import with_values
from libra_hpc.config.node_groups import TrainWorld, core_world, elastic_world
from libra_hpc.config.run import RunConfig
from libra_hpc.models.train_parallel import world_fault

EIGHT_GPUS = {"slurm.device": "cuda", "components.train.gpus": 8}


def runs(world: TrainWorld) -> bool:
    """Whether the processes are a whole number of replicas."""
    return world_fault(world.degrees, world.nodes, world.processes) is None


@pytest.mark.parametrize(
    ("values", "core", "elastic"),
    [
        # (processes of a node, data-parallel replicas)
        ({"train.tp": 2, "components.train.nodes": 3}, (2, 3), (2, 1)),
        ({"train.processes": 4, "train.tp": 2, "components.train.nodes": 3}, (4, 6), (4, 2)),
        ({**EIGHT_GPUS, "components.hybrid.gpus": 4}, (8, 8), (4, 4)),
        ({**EIGHT_GPUS, "train.tp": 2, "train.cp": 3}, (6, 1), (6, 1)),
        ({**EIGHT_GPUS, "components.train.nodes": 4, "train.tp": 8, "train.pp": 2}, (8, 2), (16, 1)),
        # GPUs of which no process sees one.
        ({"components.train.gpus": 8}, (1, 1), (1, 1)),
    ],
)
def test_processes_and_replicas(values: dict[str, Any], core: tuple[int, int], elastic: tuple[int, int]) -> None:
    config = with_values(RunConfig(), values)
    assert [(world.processes, world.dp) for world in (core_world(config), elastic_world(config))] == [core, elastic]
    assert runs(core_world(config))


def test_processes_that_are_no_whole_number_of_replicas_are_seen() -> None:
    config = with_values(RunConfig(), {"train.processes": 4, "train.tp": 4, "train.pp": 2, "components.train.nodes": 3})
    assert not runs(core_world(config))
    assert not runs(elastic_world(config))
