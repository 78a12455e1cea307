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
from libra_hpc.slurm.devcluster.cluster import Cluster, ClusterInfo
from libra_hpc.slurm.devcluster.packages import ensure_packages
from libra_hpc.slurm.site_commands import clean_environment

# How long an example takes says how busy the machine is, not whether the code is right.
settings.register_profile("libra", deadline=None)
settings.load_profile("libra")
# The profile of the machine that runs the tests must not change what they see.
os.environ["LIBRA_HPC_SITE"] = "none"


def pytest_itemcollected(item: pytest.Item) -> None:
    """`make test` runs the tests on the cluster, which are those with this mark, in a process of their own."""
    if "cluster" in getattr(item, "fixturenames", ()):
        item.add_marker(pytest.mark.cluster)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """A test that is a coroutine runs in an event loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    asyncio.run(pyfuncitem.obj(**arguments))
    return True


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
