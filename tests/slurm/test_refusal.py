"""What a refusal of sbatch means: one key where it can mean one alone, else nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from libra_hpc.config.load import validate
from libra_hpc.errors import invalid
from libra_hpc.slurm.fit import with_resources
from libra_hpc.slurm.queue.query import Partition
from libra_hpc.slurm.refusal import refusal

A800 = Partition("a800", True, "up", 4, 4, 64, 1_000_000, {"a800": 8}, 86400)
CPU = Partition("cpu", False, "up", 2, 2, 64, 256_000, {}, None)
CONFIG = "Requested node configuration is not available"
GRES = "Invalid generic resource (gres) specification"
POLICY = "Job violates accounting/QOS policy (job submit limit, user's size and/or time limits)"

TRAIN = {
    "gpus": "components.train.gpus = 9: nodes of partition a800 have 8 GPUs (Slurm: ",
    "cpus": "components.train.cpus = 65: nodes of partition a800 have 64 CPUs (Slurm: ",
    "mem": "components.train.mem = '2T': nodes of partition a800 have 1000000 MB (Slurm: ",
    "gpu_type": "components.train.gpu_type = 'A800': nodes of partition a800 have none (Slurm: ",
}


def refused(reason: str, slurm: dict[str, Any], cluster: list[Partition], **components: Any) -> str:
    config = with_resources(validate({"slurm": slurm, "components": components}), cluster)
    mistake = refusal(config, reason, cluster)
    return str(invalid(*mistake)) if mistake else ""


@pytest.mark.parametrize(
    ("reason", "slurm", "train", "sentence"),
    [
        (CONFIG, {}, {"gpus": 9}, TRAIN["gpus"]),
        (CONFIG, {}, {"cpus": 65}, TRAIN["cpus"]),
        ("Memory specification can not be satisfied", {}, {"mem": "2T"}, TRAIN["mem"]),
        (GRES, {}, {"gpus": 1, "gpu_type": "A800"}, TRAIN["gpu_type"]),
        (CONFIG, {}, {"nodes": 5}, "components.train.nodes = 5: partition a800 has 4 such nodes and components before"),
        (CONFIG, {}, {"partition": "cpu", "gpus": 1}, "components.train.gpus = 1: nodes of partition cpu have 0 GPUs"),
        ("Invalid partition name specified", {}, {"partition": "a80"}, "components.train.partition = 'a80': no such"),
        ("Requested time limit is invalid", {"time_limit": "2-0"}, {}, "slurm.time_limit = '2-0': partition a800 all"),
        # Two keys are possible, so none is named.
        (CONFIG, {}, {"gpus": 9, "cpus": 65}, ""),
        (CONFIG, {}, {}, ""),
        (GRES, {}, {"gpus": 1, "gpu_type": "a800"}, ""),
        (f"AssocMaxSubmitJobLimit; {POLICY}", {"qos": "long"}, {}, ""),
        ("QOSMaxGRESPerUser", {"qos": "long"}, {"gpus": 1}, ""),
        ("Invalid account or account/partition combination", {"account": "a"}, {"partition": "a800"}, ""),
        # Sentences of sites' own plugins.
        ("lua: timelimit exceeds that of QOS long", {"qos": "long"}, {}, "slurm.time_limit = '01:00:00': Slurm refus"),
        (f"QOSMaxWallDurationPerJobLimit; {POLICY}", {}, {}, "slurm.time_limit = '01:00:00': Slurm refuses it (QOSMa"),
        # https://doc.dhpc.tudelft.nl/delftblue: memory is a share of the CPUs.
        ("lua: use --mem-per-cpu", {}, {"mem": "8G"}, "slurm.mem_option = '--mem': Slurm refuses it (lua: use --mem-"),
        ("lua: a memory request is not allowed", {}, {}, "slurm.mem_option = '--mem': Slurm refuses it (lua: a memory"),
        ("lua: memory: at most 4G", {}, {"mem": "8G"}, "components.train.mem = '8G': Slurm refuses it (lua: memory: "),
        (
            "lua: ask for GPUs by --gpus-per-node",
            {},
            {"gpus": 1},
            "slurm.gpu_option = '--gres=gpu:{type}:{gpus}': Slur",
        ),
        # https://docs.nersc.gov/jobs: cpu or gpu is a constraint.
        (
            "lua: Job request does not match: specify -C gpu or -C cpu (constraint)",
            {},
            {},
            "components.*.constraint = ",
        ),
        ("lua: You must specify a project", {}, {}, "slurm.account = ''"),
    ],
)
def test_a_refusal_names_a_key_where_one_alone_is_possible(
    reason: str, slurm: dict[str, Any], train: dict[str, Any], sentence: str
) -> None:
    found = refused(reason, slurm, [A800, CPU], train=train)
    assert found.startswith(sentence) if sentence else not found
    assert reason in found or not sentence


def test_keys_that_nobody_wrote_are_not_named() -> None:
    found = refused(CONFIG, {}, [A800, CPU], train={"gpus": 6}, rollout={"gpus": 6}, one_node=True)
    assert found.startswith("components.one_node = True: its components take 12 GPUs together, and nodes of partition")
    found = refused(GRES, {}, [replace(A800, gpus={})], train={"gpus": 4})
    assert found.startswith("slurm.gpu_option = '--gres=gpu:{type}:{gpus}': no node of this cluster lists GPUs (Slurm")
