"""The life of an embedded cluster: start, repair, stop, and two callers at once."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from libra_hpc.annexes.devcluster.cluster import Cluster, ClusterInfo
from libra_hpc.annexes.devcluster.daemons import command_line
from libra_hpc.slurm.queue.command import call, clean_environment
from libra_hpc.slurm.queue.query import JobState, job, partitions

pytestmark = pytest.mark.cluster


@pytest.fixture
def own(slurm_packages: None) -> Iterator[Cluster]:
    """A cluster of this test alone."""
    home = Path(tempfile.mkdtemp(prefix="libra-", dir="/tmp"))
    cluster = Cluster(home)
    yield cluster
    cluster.down()
    shutil.rmtree(home)


def environment(info: ClusterInfo) -> dict[str, str]:
    return {**clean_environment(os.environ), **info.environment}


def running(info: ClusterInfo) -> list[str]:
    """Daemons of ``info`` that still run."""
    return [name for name, pid in info.pids.items() if command_line(pid)]


def submit_sleep(info: ClusterInfo, marker: Path) -> str:
    script = f"#!/bin/bash\n#SBATCH -p cpu --output=/dev/null\nsrun sh -c 'echo $PPID $$ >{marker}; exec sleep 600'\n"
    path = marker.with_suffix(".sbatch")
    path.write_text(script)
    job_id = call(["sbatch", "--parsable", str(path)], environment(info)).strip()
    while not (marker.exists() and len(marker.read_text().split()) == 2):
        time.sleep(0.05)
    return job_id


def test_partitions_of_the_suites_cluster(slurm_env: dict[str, str]) -> None:
    found = {partition.name: partition for partition in partitions(slurm_env)}
    assert {name: partition.nodes for name, partition in found.items()} == {"a800": 6, "spot": 6, "cpu": 2}
    assert found["a800"].default
    assert found["a800"].gpus == {"a800": 8}
    assert found["cpu"].gpus == {}
    assert found["a800"].max_seconds is None


def test_every_listening_port_is_on_the_hosts_own_address(cluster: ClusterInfo) -> None:
    address = socket.gethostbyname(socket.gethostname())
    if not address.startswith("127."):
        pytest.skip("this machine's name resolves to an address of the network")
    listening = [
        line.split()[1] for line in Path("/proc/net/tcp").read_text().splitlines()[1:] if line.split()[3] == "0A"
    ]
    ours = {
        int(port, 16): host
        for host, port in (entry.split(":") for entry in listening)
        if int(port, 16) in cluster.ports.values()
    }
    assert ours.keys() == set(cluster.ports.values())
    assert {host[-2:] for host in ours.values()} == {"7F"}


def test_down_ends_jobs_and_daemons_and_up_goes_on_counting(own: Cluster, tmp_path: Path) -> None:
    info = own.up()
    first = submit_sleep(info, tmp_path / "job")
    stopped = own.down()
    assert len(stopped) == len(info.pids) == 10
    assert running(info) == []
    assert [pid for pid in (tmp_path / "job").read_text().split() if command_line(int(pid))] == []
    assert own.info() is None
    assert own.down() == []

    again = own.up()
    assert again.ports == info.ports
    assert job(environment(again), first).state is JobState.CANCELLED
    assert int(call(["sbatch", "--parsable", "-o", "/dev/null", "--wrap", "true"], environment(again))) > int(first)


def test_up_repairs_what_was_killed_and_jobs_live_on(own: Cluster, tmp_path: Path) -> None:
    info = own.up()
    job_id = submit_sleep(info, tmp_path / "job")
    # slurmctld saves a new job within some seconds; a kill before that would lose it, as in any Slurm.
    submitted = (tmp_path / "job").stat().st_mtime
    saved = own.home / "state" / "job_state"
    while not saved.exists() or saved.stat().st_mtime <= submitted:
        time.sleep(0.1)
    victims = ("munged", "slurmctld", "slurmd a800-1")
    for name in victims:
        os.kill(info.pids[name], signal.SIGKILL)
    messages: list[str] = []
    repaired = own.up(messages.append)
    assert messages == ["starting 3 of 10 daemons of the embedded Slurm"]
    assert {name for name in info.pids if info.pids[name] != repaired.pids[name]} == set(victims)
    assert job(environment(repaired), job_id).state is JobState.RUNNING
    assert own.up(messages.append) == repaired
    assert len(messages) == 1


def test_ports_taken_by_others_are_given_up(own: Cluster) -> None:
    info = own.up()
    own.down()
    with socket.socket() as intruder:
        intruder.bind((socket.gethostbyname(socket.gethostname()), info.ports["cpu-0"]))
        intruder.listen()
        assert info.ports["cpu-0"] not in own.up().ports.values()


def test_two_callers_start_one_cluster(own: Cluster) -> None:
    found: list[ClusterInfo] = []
    threads = [threading.Thread(target=lambda: found.append(Cluster(own.home).up())) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found[0] == found[1]
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    assert [pid for pid in pids if command_line(pid)[1:] == ["-f", str(own.conf)]] == [found[0].pids["slurmctld"]]
