"""Shared by the whole suite: tests that are coroutines, and one embedded cluster, started when a test asks for it."""

from __future__ import annotations

import asyncio
import ctypes
import fcntl
import gc
import inspect
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import psutil
import pytest
from hypothesis import settings

from libra_hpc.annexes.devcluster.cluster import Cluster, ClusterInfo
from libra_hpc.annexes.devcluster.packages import ensure_packages
from libra_hpc.errors import OperationError
from libra_hpc.planning import best_plan
from libra_hpc.slurm.queue.command import clean_environment

# How long an example takes says how busy the machine is, not whether the code is right.
settings.register_profile("libra", deadline=None, max_examples=50)
settings.load_profile("libra")
# The profile of the machine that runs the tests must not change what they see.
os.environ["LIBRA_HPC_SITE"] = "none"

ENGINES = pytest.StashKey[IO[str] | None]()
"""The lock of the worker that has vLLM engines, where two of them would fill the memory."""
END_OF_CLUSTER = """
import pathlib, shutil, sys
from libra_hpc.annexes.devcluster.cluster import Cluster
sys.stdin.read()
Cluster(pathlib.Path(sys.argv[1])).down()
shutil.rmtree(sys.argv[1])
"""
ROOM_FOR_TWO = 14 * 2**30
"""Bytes of memory in which two workers may have engines: a run of two engines and a trainer takes 4 GB, an engine of
two processes 3 GB, the workers themselves 3 GB."""
SLURM, VLLM = "slurm", "vllm"
GROUP = re.compile(rf"@({SLURM}|{VLLM}|/[^@]*)$")
"""The end of a test's id that says its group; of one in a module whose fixtures are shared, the module's path."""
"""Groups of tests that run one after the other, on one worker of `make test-all`, beginning with the first test.

The job ids of two embedded clusters would name the same shared memory of MPICH. Tests of the first group that have
vLLM engines too come last there: on a small machine they wait for the end of the second group.
"""


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Names what failed once and passed once, in this call of `make test-all` and in those before it."""
    if "FAILED_ONCE" not in os.environ:
        return
    names = Path(os.environ["FAILED_ONCE"])
    if terminalreporter.config.getoption("lf"):
        with names.open("a") as file:
            file.writelines(f"{report.nodeid}\n" for report in terminalreporter.getreports("passed"))
    if names.exists() and names.read_text():
        terminalreporter.section("failed once, passed once: mend these")
        terminalreporter.write(names.read_text())


def pytest_runtest_teardown() -> None:
    """Boxes make their process a subreaper: orphans of later tests are no children of this one."""
    ctypes.CDLL(None).prctl(36, 0, 0, 0, 0)


def pytest_itemcollected(item: pytest.Item) -> None:
    """Marks the tests that use the embedded Slurm, and groups what belongs to one worker of `make test-all`."""
    if not isinstance(item, pytest.Function):
        return
    if "cluster" in item.fixturenames:
        item.add_marker(pytest.mark.cluster)
    scopes = {definition[-1].scope for definition in item._fixtureinfo.name2fixturedefs.values()}
    if item.get_closest_marker("cluster"):
        item.add_marker(pytest.mark.xdist_group(SLURM))
    elif item.get_closest_marker("vllm"):
        item.add_marker(pytest.mark.xdist_group(VLLM))
    elif "module" in scopes:
        item.add_marker(pytest.mark.xdist_group(str(item.path)))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """What is imported and collected lives to the end, so the garbage collector need not look at it, now or later;
    doing so takes half of the time of collecting."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """What failed is kept without its group, so that ``--last-failed`` finds it where there are no groups."""
    kept: Any = session.config.pluginmanager.get_plugin("lfplugin")
    if kept is not None:
        kept.lastfailed = {GROUP.sub("", test): True for test in kept.lastfailed}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest groups begin first."""

    def place(item: pytest.Item) -> tuple[bool, bool, bool]:
        has_slurm, has_vllm = (item.get_closest_marker(mark) is not None for mark in ("cluster", "vllm"))
        return not has_slurm, has_slurm == has_vllm, has_vllm

    items.sort(key=place)


def shared(factory: pytest.TempPathFactory) -> Path:
    """A folder of this call of pytest that all of its workers have."""
    own = factory.getbasetemp()
    return own.parent if "PYTEST_XDIST_WORKER" in os.environ else own


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """One worker at a time has vLLM engines on a machine without room for two."""
    lock = item.config.stash.setdefault(ENGINES, None)
    small = psutil.virtual_memory().total < ROOM_FOR_TWO
    if small and lock is None and item.get_closest_marker("vllm") and "PYTEST_XDIST_WORKER" in os.environ:
        lock = (shared(item.config._tmp_path_factory) / "engines.lock").open("w")  # type: ignore[attr-defined]
        fcntl.flock(lock, fcntl.LOCK_EX)
        item.config.stash[ENGINES] = lock
    try:
        return (yield)
    finally:
        if lock is not None and not (nextitem and nextitem.get_closest_marker("vllm")):
            # Also the engine of a module has ended.
            lock.close()
            item.config.stash[ENGINES] = None


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """A test that is a coroutine runs in an event loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    asyncio.run(pyfuncitem.obj(**arguments))
    return True


@pytest.fixture
def few_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans are played on a part of few batches: for tests of what is made from a plan."""
    monkeypatch.setattr(best_plan, "MOST", 0)
    monkeypatch.setattr(best_plan, "PLAYED_TURNS", 500)


@pytest.fixture(scope="session")
def slurm_packages() -> None:
    """Skips where Slurm's packages cannot be had; a cluster that has them and does not start is a failure."""
    try:
        ensure_packages(lambda message: None)
    except OperationError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def cluster(slurm_packages: None) -> Iterator[ClusterInfo]:
    """The suite's own embedded cluster, which `Cluster()` and every `libra-hpc` started by a test find through
    ``LIBRA_HPC_CLUSTER``."""
    # Short: Slurm's sockets live below it.
    home = Path(tempfile.mkdtemp(prefix="libra-", dir="/tmp"))
    before = os.environ.get("LIBRA_HPC_CLUSTER")
    os.environ["LIBRA_HPC_CLUSTER"] = str(home)
    # Another process ends the cluster, since this one may be killed.
    end = subprocess.Popen([sys.executable, "-c", END_OF_CLUSTER, home], stdin=subprocess.PIPE, start_new_session=True)
    try:
        yield Cluster(home).up()
    finally:
        end.communicate()
        if before is None:
            del os.environ["LIBRA_HPC_CLUSTER"]
        else:
            os.environ["LIBRA_HPC_CLUSTER"] = before


@pytest.fixture(scope="session")
def slurm_env(cluster: ClusterInfo) -> dict[str, str]:
    """Environment of Slurm's commands on the suite's cluster."""
    return {**clean_environment(os.environ), **cluster.environment}
