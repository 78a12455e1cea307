"""Shared by the whole suite: tests that are coroutines, and one embedded cluster, started when a test asks for it."""

from __future__ import annotations

import asyncio
import inspect
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from libra_hpc.errors import OperationError
from libra_hpc.planning import simulated_plan
from libra_hpc.slurm.devcluster.cluster import Cluster, ClusterInfo
from libra_hpc.slurm.devcluster.packages import ensure_packages
from libra_hpc.slurm.site_commands import clean_environment

# How long an example takes says how busy the machine is, not whether the code is right.
settings.register_profile("libra", deadline=None)
settings.load_profile("libra")
# The profile of the machine that runs the tests must not change what they see.
os.environ["LIBRA_HPC_SITE"] = "none"


SHARED = "slurm and vllm"
"""The tests of this group run one after the other, on one worker of `make test`.

The job ids of two embedded clusters would name the same shared memory of MPICH, and two vLLM engines are as many as a
small machine has memory for.
"""


def pytest_itemcollected(item: pytest.Item) -> None:
    """Marks the tests that use the embedded Slurm, and groups what belongs to one worker of `make test`."""
    if not isinstance(item, pytest.Function):
        return
    if "cluster" in item.fixturenames:
        item.add_marker(pytest.mark.cluster)
    scopes = {definition[-1].scope for definition in item._fixtureinfo.name2fixturedefs.values()}
    if item.get_closest_marker("cluster") or item.get_closest_marker("vllm"):
        item.add_marker(pytest.mark.xdist_group(SHARED))
    elif "module" in scopes:
        item.add_marker(pytest.mark.xdist_group(str(item.path)))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest group begins first."""
    items.sort(key=lambda item: not any(SHARED in mark.args for mark in item.iter_markers("xdist_group")))


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
    """A plan is simulated on as few batches as of large runs: for tests of what is made from a plan, which takes some
    ten seconds otherwise."""
    monkeypatch.setattr(simulated_plan, "TURNS", 0)


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
    try:
        yield Cluster(home).up()
    finally:
        Cluster(home).down()
        if before is None:
            del os.environ["LIBRA_HPC_CLUSTER"]
        else:
            os.environ["LIBRA_HPC_CLUSTER"] = before
        shutil.rmtree(home)


@pytest.fixture(scope="session")
def slurm_env(cluster: ClusterInfo) -> dict[str, str]:
    """Environment of Slurm's commands on the suite's cluster."""
    return {**clean_environment(os.environ), **cluster.environment}
