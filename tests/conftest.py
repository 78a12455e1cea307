"""Shared by the whole suite: one embedded cluster, started when the first test asks for it, and the lanes of
`make test`."""

from __future__ import annotations

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
from libra_hpc.slurm.site import clean_environment

# How long an example takes says how busy the machine is, not whether the code is right.
settings.register_profile("libra", deadline=None)
settings.load_profile("libra")
# The profile of the machine that runs the tests must not change what they see.
os.environ["LIBRA_HPC_SITE"] = "none"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Group the tests for pytest-xdist, which runs a group in one process.

    - Tests on the embedded cluster -> one group: there is one cluster, and its jobs wait for each other.
    - Other tests that start engines -> one group: engines are the largest processes of the suite.
    - Any other test -> the group of its file, which keeps what the file shares.
    - The first two are the longest, so they start first.
    """
    if not hasattr(config, "workerinput"):
        return
    groups = {item: group(item) for item in items}
    items.sort(key=lambda item: groups[item] not in ("cluster", "engine"))
    for item in items:
        item.add_marker(pytest.mark.xdist_group(groups[item]))


def group(item: pytest.Item) -> str:
    """Name of the group in which a test runs."""
    if "cluster" in getattr(item, "fixturenames", ()):
        return "cluster"
    file = f"{item.path.parent.name}/{item.path.stem}"
    return next((name for name in ("cluster", "engine") if item.get_closest_marker(name)), file)


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
