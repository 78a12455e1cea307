"""Sections about the job itself: identity, Slurm, and the node components."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from libra_hpc.process.deadlines import DeadlineSettings

from .base import Section


class RunSection(Section):
    """``[run]``: identity and length of the run."""

    name: str = Field("run", pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$", max_length=64)
    """Name of the run; the run directory is ``<dir>/<name>-<number>``."""
    dir: str = "runs"
    """Parent of run directories, on a file system all nodes share."""
    seed: int = Field(0, ge=0)
    """Seed of the data order and of sampling."""
    steps: int = Field(100, ge=1)
    """Optimizer steps (global batches) to train."""
    share: Literal["private", "group", "all"] = "private"
    """Who may read the run directory: its owner (mode 0700), the owner's group too (0750), or everybody (0755)."""
    engine: Literal["real", "twin"] = "real"
    """``twin``: a rehearsal; every process above the engines is the real one, engines, trainers and tools are simulated as ``[twin]`` says."""


class SlurmSection(Section):
    """``[slurm]``: how the job is queued."""

    executor: Literal["auto", "slurm", "local"] = "auto"
    """``slurm``: sbatch; ``local``: mpiexec on this machine; ``auto``: slurm when a controller answers, else an error that names both ways."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Which wheels and collective backend the engines use."""
    time_limit: str = "01:00:00"
    """Slurm time limit, ``[days-]hours:minutes:seconds``."""
    account: str = ""
    qos: str = ""
    mpi: str = "pmi2"
    """``srun --mpi`` plugin that matches the installed MPI (PyPI mpich: pmi2)."""
    python: str = ""
    """Interpreter on the compute nodes, for instance ``/shared/libra/bin/python``; empty: the one that submits."""
    interface: str = Field("", pattern=r"^[A-Za-z0-9_.:@-]*$", max_length=15)
    """Network interface that MPI and torch's collectives listen on, for instance ``ib0``; empty: what each of them chooses
    (docs/ports.md)."""
    restarts: int = Field(3, ge=0)
    """How often all ranks restart inside the allocation from the newest checkpoint, after the planner or a leader died."""
    extra: list[str] = []
    """Further sbatch options, verbatim, for every component (``--constraint=nvlink``)."""


class Component(Section):
    """One component of the heterogeneous job."""

    nodes: int = Field(1, ge=0)
    """Nodes; 0 leaves the component out."""
    partition: str = ""
    """Slurm partition; empty: the cluster's default."""
    gpus: int = Field(0, ge=0)
    """GPUs per node."""
    gpu_type: str = ""
    """GRES type, for instance ``a800``; empty: any."""
    cpus: int = Field(1, ge=1)
    """CPUs per node."""
    mem: str = Field("2G", pattern=r"^[0-9]+[KMGT]?$")
    """Memory per node."""
    constraint: str = ""


class ComponentsSection(Section):
    """``[components.*]``: which nodes do what at the start."""

    split: Literal["explicit", "auto"] = "explicit"
    """``auto``: the nodes of train, hybrid and rollout together are a pool, which `libra-hpc submit` divides by the planner's best plan."""
    planner: Component = Component()
    train: Component = Component()
    hybrid: Component = Component()
    rollout: Component = Component()


class DeadlinesSection(Section):
    """``[deadlines]``: how long a part of a run may make no progress before it is ended and started again (`libra_hpc.process.deadlines`)."""

    floor_s: float = Field(60.0, gt=0)
    """No deadline is shorter, in seconds."""
    first_s: float = Field(900.0, gt=0)
    """The deadline of an operation that was not measured yet, in seconds: a first step compiles, a first start loads from a cold file system."""
    factor: float = Field(10.0, gt=1)
    """A measured operation may take this many times the longest of its last durations."""

    restarts: int = Field(5, ge=1)
    """How often one engine, replica or environment host may be started again within five minutes; once more fails the run."""
    storage_s: float = Field(900.0, gt=0)
    """How long the run directory may take no writes, in seconds; then the run saves if it can, and stops."""

    @property
    def settings(self) -> DeadlineSettings:
        """As the runtime takes them."""
        return DeadlineSettings(self.floor_s, self.first_s, self.factor)
