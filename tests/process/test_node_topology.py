"""Adapters and CPUs beside GPUs, from an answer in the form of NVIDIA's drivers since 535."""

from __future__ import annotations

from pathlib import Path

from libra_hpc.process.node_topology import NodeTopology, beside_gpus, parse_topology

A800 = Path(__file__).with_name("topology-a800.txt").read_text()
"""Eight A800 on two sockets, an adapter beside each, and one (mlx5_4) for storage."""
FIRST, SECOND = "0-47,96-143", "48-95,144-191"
ARGV = ["python", "-m", "x"]


def test_adapters_that_share_a_switch_with_a_gpu_are_chosen_and_each_gpu_has_its_cpus() -> None:
    found = parse_topology(A800)
    assert found.adapters == "=mlx5_0,mlx5_1,mlx5_2,mlx5_3,mlx5_5,mlx5_6,mlx5_7,mlx5_8"
    assert found.cpus == {str(gpu): FIRST if gpu < 4 else SECOND for gpu in range(8)}


def test_nothing_is_chosen_where_the_machine_names_no_difference() -> None:
    assert parse_topology(A800.replace("PXB", "NODE").replace("PIX", "NODE")).adapters == "", "none is near"
    beside = A800.replace("\tNODE\tSYS\tSYS\tSYS\tSYS\t0-47", "\tPIX\tSYS\tSYS\tSYS\tSYS\t0-47")
    assert parse_topology(beside).adapters == "", "all are near"
    far = A800.replace("\tNODE\tNODE\tNODE\tPIX\t48", "\tNODE\tNODE\tNODE\tNODE\t48")
    assert parse_topology(far).adapters == "", "a GPU would be without one"
    one = "\tGPU0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\nGPU0\t X \t0-15\t0\t\tN/A\n"
    assert parse_topology(one) == NodeTopology("", {"0": "0-15"})
    assert parse_topology("No devices were found\n") == parse_topology("") == NodeTopology()


def test_a_process_stays_on_the_cpus_of_its_gpus_where_the_job_has_them() -> None:
    topology, all_cpus = parse_topology(A800), set(range(192))
    kept = ["taskset", "--cpu-list", SECOND, *ARGV]
    assert beside_gpus(ARGV, "5", topology, all_cpus) == beside_gpus(ARGV, "4,7", topology, all_cpus) == kept
    for gpus, allowed in (("3,4", all_cpus), ("5", set(range(96))), ("GPU-8f6c", all_cpus), ("", all_cpus)):
        assert beside_gpus(ARGV, gpus, topology, allowed) == ARGV
    assert beside_gpus(ARGV, "0", NodeTopology(), all_cpus) == ARGV
