"""Requests no state of the cluster could ever meet, each named by its field."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from libra_hpc.config.load import validate
from libra_hpc.config.node_groups import memory_mb
from libra_hpc.config.run import RunConfig
from libra_hpc.errors import UserError
from libra_hpc.slurm.fit import check_fit, with_resources
from libra_hpc.slurm.queue.query import Partition

CLUSTER = [
    Partition(
        name="a800",
        default=True,
        state="up",
        nodes=4,
        idle=0,
        cpus=64,
        memory_mb=512000,
        gpus={"a800": 8},
        max_seconds=7200,
    ),
    Partition(
        name="cpu", default=False, state="up", nodes=2, idle=2, cpus=32, memory_mb=64000, gpus={}, max_seconds=None
    ),
    Partition(
        name="old", default=False, state="drain", nodes=9, idle=0, cpus=8, memory_mb=16000, gpus={}, max_seconds=None
    ),
]


def fit(components: dict[str, Any], **slurm: Any) -> None:
    check_fit(validate({"components": components, "slurm": slurm}), CLUSTER)


def test_a_job_that_fits_a_busy_cluster() -> None:
    fit(
        {
            "planner": {"partition": "cpu"},
            "train": {"nodes": 2, "gpus": 8, "gpu_type": "a800"},
            "hybrid": {"nodes": 1},
            "rollout": {"nodes": 1, "gpus": 4},
        }
    )


@pytest.mark.parametrize(
    ("components", "message"),
    [
        (
            {"train": {"partition": "a80"}},
            r"components\.train\.partition = 'a80': no such partition; valid: a800, cpu, old \(did you mean 'a800'\?\)",
        ),
        (
            {"train": {"partition": "old"}},
            r"components\.train\.partition = 'old': the partition takes no jobs: drain; valid: a800, cpu",
        ),
        (
            {"train": {"nodes": 5}},
            (
                r"components\.train\.nodes = 5: partition a800 has 4 nodes and components before it take 1; valid: at"
                r" most 3"
            ),
        ),
        (
            {"hybrid": {"nodes": 2}},
            (
                r"components\.rollout\.nodes = 1: partition a800 has 4 nodes and components before it take 4; valid: at"
                r" most 0"
            ),
        ),
        ({"rollout": {"cpus": 65}}, r"components\.rollout\.cpus = 65: .* 64 CPUs"),
        ({"rollout": {"mem": "1T"}}, r"components\.rollout\.mem = '1T': .* 512000 MB"),
        ({"train": {"gpus": 9}}, r"components\.train\.gpus = 9: .* 8 GPUs"),
        ({"train": {"gpus": 1, "gpu_type": "h100"}}, r"components\.train\.gpu_type = 'h100': .*valid: a800"),
        ({"planner": {"partition": "cpu", "gpus": 1}}, r"components\.planner\.gpus = 1: .* 0 GPUs"),
        (
            {"planner": {"partition": "cpu", "gpus": 1, "gpu_type": "a800"}},
            r"components\.planner\.gpu_type = 'a800': .*no typed GPUs",
        ),
    ],
)
def test_what_never_fits(components: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        fit(components)


def test_of_several_partitions_one_is_enough_and_the_request_fits_each() -> None:
    small = replace(CLUSTER[0], name="h20", default=False, nodes=9, cpus=48, memory_mb=400000, gpus={"h20": 16})
    cluster = [*CLUSTER, small]

    def config(**train: Any) -> RunConfig:
        return validate({"components": {"train": train, "rollout": {"partition": "cpu"}}})

    check_fit(config(partition="a800,h20", nodes=9), cluster)
    check_fit(config(partition="old,h20", gpus=16), cluster)
    check_fit(config(partition="cpu,a800", gpus=1), cluster)
    train = with_resources(config(partition="a800,h20", gpus=8), cluster).components.train
    assert (train.cpus, train.mem) == (24, "200000M")
    for wrong, message in (
        (config(partition="a800,b"), r"partition = 'b': no such partition; valid: a800, cpu, h20, old"),
        (config(partition="a800,"), r"partition = '': no such partition"),
        (config(partition="a800,h20", nodes=10), r"nodes = 10: partition a800 has 4 nodes; valid: at most 4"),
        (config(partition="old"), r"partition = 'old': the partition takes no jobs: drain"),
    ):
        with pytest.raises(UserError, match=message):
            check_fit(wrong, cluster)


def test_memory_units() -> None:
    assert [memory_mb(text) for text in ("2048K", "2", "2M", "2G", "1T")] == [2, 2, 2, 2048, 1048576]


def test_cpus_and_memory_are_the_share_that_the_gpus_have_of_their_node() -> None:
    data = {
        "planner": {"partition": "cpu"},
        "train": {"partition": "a800", "gpus": 8},
        "rollout": {"partition": "a800", "gpus": 2, "gpu_type": "a800", "mem": "9G"},
        "hybrid": {"partition": "unknown", "gpus": 4},
    }
    parts = with_resources(validate({"components": data}), CLUSTER).components
    node = next(part for part in CLUSTER if part.name == "a800")
    assert (parts.planner.cpus, parts.planner.mem) == (1, "2G")
    assert (parts.train.cpus, parts.train.mem) == (node.cpus, "0")
    assert (parts.rollout.cpus, parts.rollout.mem) == (node.cpus // 4, "9G")
    assert (parts.hybrid.cpus, parts.hybrid.mem) == (4, "0")


def test_a_time_limit_leaves_time_before_the_notice() -> None:
    with pytest.raises(UserError, match=r"the run begins to save slurm.notice_s = 120 s before it"):
        fit({}, time_limit="00:02:00", notice_s=120.0)
    fit({}, time_limit="00:02:00")
    fit({}, time_limit="00:02:00", notice_s=60.0)


def test_what_waits_for_nodes_or_a_partition_is_said_and_not_refused() -> None:
    config = validate({"components": {"train": {"nodes": 2}, "rollout": {"nodes": 1}}})
    assert check_fit(config, CLUSTER) == []
    assert check_fit(config, [replace(CLUSTER[0], out=1)]) == [
        "partition a800: 1 of its 4 nodes are drained or down; the job waits until 4 are in service"
    ]
    assert check_fit(config, [replace(CLUSTER[0], state="down")]) == [
        "partition a800 is down; the job waits until it is up"
    ]
