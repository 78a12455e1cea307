"""Section about the compute nodes: how a process of the run starts there."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from .section import Section, Valid

VariableName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
ShellLine = Annotated[str, Field(pattern=r"^[^\r\n\x00]+$")]
Folder = Annotated[str, Field(pattern=r"^[^\r\n\x00,]+$")]


class ComputeSection(Section):
    """``[compute]``: how a process starts on a compute node. It is the same for every run of a site, so it belongs
    in the site profile."""

    python: str = ""
    """Interpreter on the compute nodes, for instance ``/shared/libra/bin/python``. Empty: the one that submits; in a
    container ``python3``."""
    container: Literal["none", "apptainer", "pyxis"] = "none"
    """What starts the interpreter inside ``image``: ``apptainer exec``, or Slurm's Pyxis plugin."""
    image: str = ""
    """Container image: a file for Apptainer, a file or ``registry#name`` for Pyxis, which unpacks it once for each run
    and node. ``envs`` has recipes (docs/site.md)."""
    binds: Annotated[list[Folder], Valid("a list of folders, each FOLDER or FOLDER:PLACE")] = []
    """Further folders that the container sees, for instance ``/shared`` or ``/data:/mnt``. It always sees /dev/shm,
    ``local_dir``, and the folders of the run, its model, its task and other files of the run file."""
    setup: Annotated[list[ShellLine], Valid("a list of shell lines")] = []
    """Shell lines that the batch script executes before the agents start, for instance ``module load cuda/12.8``. The
    first command that fails ends the start, and is the cause in `libra-hpc status`."""
    env: Annotated[dict[VariableName, ShellLine], Valid("a table of variables, NAME = 'text'")] = {}
    """Variables of every agent and its engines, for instance ``NCCL_IB_HCA = "mlx5"``. ``$NAME`` and ``${NAME}`` are
    expanded where the job starts, ``$$`` is a dollar sign: ``HF_HOME = "/lustre/$USER/hf"``."""
    shm_share: float = Field(0.5, gt=0, le=1)
    """Share of a node's memory that /dev/shm has; Linux gives it half."""
    local_dir: Annotated[str, Valid("an absolute folder; $VARIABLES are those of the node")] = Field(
        "", pattern=r"^(/([A-Za-z0-9_./-]|\$\w+|\$\{\w+\})*)?$"
    )
    """Node-local folder for temporary files (``TMPDIR``) and caches of compilers (Triton, inductor, vLLM, CUDA), for
    instance ``/scratch/$USER``, made where it does not exist; empty: the cluster's. One that outlives the job saves the
    next one minutes of compilation."""
