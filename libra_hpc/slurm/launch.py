"""`Launch`: what sbatch, the local launcher or a dry run needs to start one attempt of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from libra_hpc.config.node_groups import rank_components
from libra_hpc.config.run import RunConfig
from libra_hpc.facts.rundir import RunDir

from .interpreter import compute_python
from .job_request import JobRequest


@dataclass(frozen=True)
class Launch:
    """One node agent per node of every component, in rank order."""

    request: JobRequest
    run: RunDir
    attempt: int
    """1 for the first submission of a run."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Further environment variables of the agents."""
    interpreter: str = ""
    """Interpreter on the nodes; empty: that of the run file (`compute_python`)."""
    arguments: Sequence[str] | None = None
    """Arguments of the interpreter instead of the agent's own; None: the agent's own."""
    after: str = ""
    """Slurm job that must have ended, in whatever way, before this one starts; empty: none."""

    @property
    def config(self) -> RunConfig:
        return self.request.config

    @property
    def python(self) -> str:
        """Interpreter that starts the agents."""
        return self.interpreter or compute_python(self.config)

    @property
    def ranks(self) -> int:
        """How many agents there are."""
        return len(rank_components(self.config))

    @property
    def agent_arguments(self) -> list[str]:
        """Arguments of the interpreter that make it a node agent."""
        agent = ["-m", "libra_hpc.agent.agent", "--run", str(self.run.path), "--attempt", str(self.attempt)]
        return agent if self.arguments is None else list(self.arguments)

    @property
    def variables(self) -> dict[str, str]:
        """Variables the agents get, whatever starts them."""
        return agent_variables(self.config, self.environment)


def agent_variables(config: RunConfig, further: Mapping[str, str]) -> dict[str, str]:
    """Variables of a process on the nodes; with ``slurm.interface`` MPI, gloo and NCCL listen on it alone.

    PyPI's mpich uses UCX or libfabric, so both get a variable.  The equals sign keeps NCCL from taking the name as a
    prefix.
    """
    found: dict[str, str] = {}
    if interface := config.slurm.interface:
        found = dict.fromkeys(("UCX_NET_DEVICES", "FI_TCP_IFACE", "GLOO_SOCKET_IFNAME"), interface)
        found["NCCL_SOCKET_IFNAME"] = f"={interface}"
    return {**found, **config.compute.env, **further, "PYTHONUNBUFFERED": "1"}
