"""The embedded cluster's pure parts: its files, and what counts as its own process."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from libra_hpc.annexes.devcluster import packages
from libra_hpc.annexes.devcluster.cluster import Cluster
from libra_hpc.annexes.devcluster.conf import NODES, ClusterFacts, slurm_conf
from libra_hpc.annexes.devcluster.daemons import Daemon, job_processes, step_daemons, stop
from libra_hpc.annexes.devcluster.packages import SlurmTools
from libra_hpc.errors import OperationError, UserError


def test_a_host_name_that_does_not_resolve() -> None:
    ports = {"slurmctld": 100, **dict.fromkeys(NODES, 101)}
    facts = ClusterFacts(home=Path("/h"), host="host", address="", user="me", ports=ports, first_job_id=1)
    text = slurm_conf(facts, SlurmTools(Path("/t")))
    assert "NoInAddrAny" not in text
    assert "SlurmctldHost=host(127.0.0.1)" in text


def test_elsewhere_one_sentence_names_the_way_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LIBRA_HPC_CACHE", str(tmp_path))
    monkeypatch.setattr(platform, "freedesktop_os_release", lambda: {"VERSION_CODENAME": "jammy"})
    with pytest.raises(OperationError, match=r"not Debian 12 \(jammy\); use --executor local"):
        packages.ensure_packages(lambda message: None)
    monkeypatch.setattr(platform, "freedesktop_os_release", lambda: {"VERSION_CODENAME": "bookworm"})
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(OperationError, match=r"lacks apt-get and dpkg-deb; use --executor local"):
        packages.ensure_packages(lambda message: None)


def test_a_failed_download_leaves_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    for name, body in (("apt-get", 'echo "E: Unable to locate package munge"; exit 100'), ("dpkg-deb", "exit 0")):
        (tools / name).write_text(f"#!/bin/sh\n{body}\n")
        (tools / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:/usr/bin:/bin")
    monkeypatch.setenv("LIBRA_HPC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(platform, "freedesktop_os_release", lambda: {"VERSION_CODENAME": "bookworm"})
    messages: list[str] = []
    with pytest.raises(OperationError, match=r"Unable to locate package munge\); use --executor local"):
        packages.ensure_packages(messages.append)
    assert messages == ["reading the package lists"]
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["slurm.lock"]


def test_a_home_too_long_for_sockets(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path / ("x" * 60))
    assert cluster.info() is None
    assert cluster.down() == []
    with pytest.raises(UserError, match="LIBRA_HPC_CLUSTER"):
        cluster.up()


def daemon(tmp_path: Path, pid: int, argv: tuple[str, ...], identity: tuple[str, ...]) -> Daemon:
    (tmp_path / "pid").write_text(str(pid))
    return Daemon(name="d", argv=argv, identity=identity, pid_file=tmp_path / "pid", log=tmp_path / "log")


def test_a_foreign_process_behind_our_pid_file_is_left_alone(tmp_path: Path) -> None:
    with subprocess.Popen(["/bin/sleep", "60"]) as foreign:
        try:
            assert (
                daemon(tmp_path, foreign.pid, ("/x/slurmctld", "-f", "/h/slurm.conf"), ("/h/slurm.conf",)).pid() is None
            )
            assert daemon(tmp_path, foreign.pid, ("/x/sleep", "60", "61"), ("61",)).pid() is None
            assert stop([daemon(tmp_path, foreign.pid, ("/x/slurmctld",), ("60",))]) == []
            assert foreign.poll() is None
            assert daemon(tmp_path, foreign.pid, ("/other/sleep", "60"), ("60",)).pid() == foreign.pid
        finally:
            foreign.kill()


def test_one_that_ignores_sigterm_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("libra_hpc.annexes.devcluster.daemons.TERM_TIMEOUT_S", 0.1)
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code, "mark"], stdout=subprocess.PIPE) as stubborn:
        assert stubborn.stdout is not None
        stubborn.stdout.readline()
        assert stop([daemon(tmp_path, stubborn.pid, (sys.executable,), ("mark",))]) == [f"d ({stubborn.pid})"]
        assert stubborn.wait() == -9


@contextmanager
def ending(started: Iterable[subprocess.Popen[bytes]]) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Processes that are killed at the end."""
    children = list(started)
    try:
        yield children
    finally:
        for child in children:
            child.kill()
            child.wait()


def test_job_processes_need_the_configuration_and_a_node_of_ours() -> None:
    conf = Path("/h/etc/slurm.conf")
    variables = [
        {"SLURM_CONF": str(conf)},
        {"SLURM_CONF": str(conf), "SLURMD_NODENAME": "n9"},
        {"SLURM_CONF": str(conf), "SLURMD_NODENAME": "n1"},
    ]
    with ending(subprocess.Popen(["/bin/sleep", "60"], env={**os.environ, **extra}) for extra in variables) as children:
        assert job_processes(conf, ["n0", "n1"]) == [children[2].pid]


def test_step_daemons_need_our_program_in_our_folder(tmp_path: Path) -> None:
    ours, other = tmp_path / "ours", tmp_path / "other"
    for folder in (ours, other):
        folder.mkdir()
    program = ours / "slurmstepd"
    shutil.copy("/bin/sleep", ours / "slurmstepd-wlm")
    program.symlink_to("slurmstepd-wlm")
    started = [(program, ours), (program, other), (Path("/bin/sleep"), ours)]
    with ending(subprocess.Popen([path, "60"], cwd=folder) for path, folder in started) as children:
        assert step_daemons(program, ours) == [children[0].pid]
        children[0].kill()
        children[0].wait()
        assert step_daemons(program, ours) == []
