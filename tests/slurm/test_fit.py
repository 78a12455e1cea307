"""What sinfo says of a request: its share of a node, and what no node that is listed could meet."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from libra_hpc.config.load import validate
from libra_hpc.config.node_groups import memory_mb
from libra_hpc.config.run import RunConfig
from libra_hpc.errors import invalid
from libra_hpc.slurm.fit import doubts, waits, with_resources
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


def doubted(config: RunConfig, cluster: list[Partition] = CLUSTER) -> list[str]:
    return [str(invalid(*doubt)) for doubt in doubts(config, cluster)]


def test_a_job_that_fits_a_busy_cluster() -> None:
    train = {"nodes": 2, "gpus": 8, "gpu_type": "a800"}
    parts = {"planner": {"partition": "cpu"}, "train": train, "hybrid": {"nodes": 1}, "rollout": {"gpus": 4}}
    assert doubted(validate({"components": parts})) == []


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
                r"components\.train\.nodes = 5: partition a800 has 4 such nodes and components before it take 1;"
                r" valid: at most 3"
            ),
        ),
        (
            {"hybrid": {"nodes": 2}},
            (
                r"components\.rollout\.nodes = 1: partition a800 has 4 such nodes and components before it take 4;"
                r" valid: at most 0"
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
def test_what_no_node_that_is_listed_could_meet(components: dict[str, Any], message: str) -> None:
    (sentence,) = doubted(validate({"components": components}))
    assert re.match(message, sentence)


def test_of_several_partitions_one_is_enough_and_the_request_fits_each() -> None:
    small = replace(CLUSTER[0], name="h20", default=False, nodes=9, cpus=48, memory_mb=400000, gpus={"h20": 16})
    cluster = [*CLUSTER, small]

    def config(**train: Any) -> RunConfig:
        return validate({"components": {"train": train, "rollout": {"partition": "cpu"}}})

    for good in (
        config(partition="a800,h20", nodes=9),
        config(partition="old,h20", gpus=16),
        config(partition="cpu,a800", gpus=1),
    ):
        assert doubted(good, cluster) == []
    train = with_resources(config(partition="a800,h20", gpus=8), cluster).components.train
    assert (train.cpus, train.mem) == (24, "200000M")
    for wrong, message in (
        (config(partition="a800,b"), r"partition = 'b': no such partition; valid: a800, cpu, h20, old"),
        (config(partition="a800,"), r"partition = '': no such partition"),
        (config(partition="a800,h20", nodes=10), r"nodes = 10: partition h20 has 9 such nodes; valid: at most 9"),
        (config(partition="old"), r"partition = 'old': the partition takes no jobs: drain"),
    ):
        assert re.search(message, " ".join(doubted(wrong, cluster)))


def test_of_nodes_of_several_kinds_those_count_that_the_request_fits() -> None:
    # https://docs.alliancecan.ca/wiki/Using_GPUs_with_Slurm: nodes of two, four and eight GPUs in one partition.
    two = replace(CLUSTER[0], nodes=9, cpus=24, memory_mb=100_000, gpus={"p100": 2})
    mixed = [two, replace(two, nodes=2, cpus=48, memory_mb=250_000, gpus={"p100": 4})]

    def config(nodes: int, gpus: int) -> RunConfig:
        planner = {"planner": {"nodes": 0}, "rollout": {"nodes": 0}}
        return validate({"components": {**planner, "train": {"nodes": nodes, "gpus": gpus, "partition": "a800"}}})

    assert with_resources(config(2, 2), mixed).components.train.mem == "100000M"
    assert [with_resources(config(2, gpus), mixed).components.train.cpus for gpus in (2, 4)] == [24, 48]
    assert doubted(config(11, 2), mixed) == []
    few = "components.train.nodes = 3: partition a800 has 2 such nodes; valid: at most 2."
    assert doubted(config(3, 4), mixed) == [few]
    assert "have 4 GPUs" in doubted(config(1, 8), mixed)[0]


def test_a_slice_of_a_gpu_is_none_unless_it_is_named() -> None:
    # https://github.com/silx-kit/jupyterhub_moss/issues/104: GPUs beside slices on one node.
    sliced = [replace(CLUSTER[0], gpus={"a100": 3, "1g.10gb": 28})]
    for train, cpus in (({"gpus": 3}, 64), ({"gpus": 14, "gpu_type": "1g.10gb"}, 32)):
        assert with_resources(validate({"components": {"train": train}}), sliced).components.train.cpus == cpus


def test_where_a_plugin_chooses_the_nodes_nothing_is_doubted() -> None:
    # https://docs.nersc.gov/jobs: a constraint or an account leads to the partition; none is the default.
    config = validate({"components": {"train": {"gpus": 4, "constraint": "gpu"}}})
    assert doubted(config, [replace(part, default=False) for part in CLUSTER]) == []
    assert doubts(config, [replace(CLUSTER[1], default=True), CLUSTER[0]], named=True) == []


def test_nodes_that_are_given_whole_list_no_gpus() -> None:
    # https://docs.tacc.utexas.edu/hpc/frontera: no GRES, every job has its nodes alone.
    listed = [replace(CLUSTER[0], gpus={})]
    components = {"train": {"gpus": 4}, "rollout": {"gpus": 4}}
    (sentence,) = doubted(validate({"components": components}), listed)
    assert sentence.startswith("slurm.gpu_option = '--gres=gpu:{type}:{gpus}': no node of this cluster lists GPUs")
    whole = validate({"components": components, "slurm": {"gpu_option": "none"}})
    assert doubted(whole, listed) == []
    assert with_resources(whole, listed).components.train.cpus == 64


def test_memory_units() -> None:
    assert [memory_mb(text) for text in ("2048K", "2", "2M", "2G", "1T", "none")] == [2, 2, 2, 2048, 1048576, 0]


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


def test_what_waits_for_nodes_or_a_partition_is_said_and_not_refused() -> None:
    config = validate({"components": {"train": {"nodes": 2}, "rollout": {"nodes": 1}}})
    assert waits(config, CLUSTER) == []
    assert waits(config, [replace(CLUSTER[0], out=1)]) == [
        "partition a800: 1 of its 4 nodes are drained or down; the job waits until 4 are in service"
    ]
    assert waits(config, [replace(CLUSTER[0], state="down")]) == [
        "partition a800 is down; the job waits until it is up"
    ]
