"""Shared by the whole suite: one embedded cluster, started when the first test asks for it, and the lanes of
`make test`."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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


ON_SLURM = (
    "tests/cluster/",
    "tests/chaos/test_campaign.py",
    "tests/chaos/test_slurm.py",
    "tests/cli/test_calibrate_train.py::test_a_replica_is_measured_in_a_job",
    "tests/cli/test_mistakes.py::test_what_only_sbatch_knows",
    "tests/cli/test_site_verbs.py",
    "tests/slurm/test_doctor.py::test_the_embedded_cluster",
    "tests/slurm/test_examples.py::test_slurm_accepts",
)
"""How the tests on the embedded cluster begin.  They run in one process: there is one cluster, whose job ids name
MPICH's shared memory, and some of them need it free."""


def lane(nodeid: str) -> str:
    """Name of the group of tests that pytest-xdist runs in one process: those on the cluster, or those of a file."""
    return "cluster" if nodeid.startswith(ON_SLURM) else nodeid.partition("::")[0]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Of `make test`; the ``loadgroup`` of pytest-xdist 3.8 groups nothing under pytest 9."""
    from xdist.scheduler import LoadScopeScheduling

    class Lanes(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return lane(nodeid)

    return Lanes(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if "cluster" in getattr(item, "fixturenames", ()) and lane(item.nodeid) != "cluster":
            raise pytest.UsageError(f"{item.nodeid} uses the cluster: add it to ON_SLURM in tests/conftest.py")
    if hasattr(config, "workerinput"):
        # The longest lane starts first.
        items.sort(key=lambda item: lane(item.nodeid) != "cluster")


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
