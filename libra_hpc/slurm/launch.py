"""`Launch`: what sbatch, the local launcher or a dry run needs to start one attempt of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from libra_hpc.config.run import RunConfig
from libra_hpc.facts.rundir import RunDir

from .fit import HetGroup, het_groups, rank_components, with_resources
from .interpreter import compute_python


@dataclass(frozen=True)
class Launch:
    """One node agent per node of every component of ``config``, in rank order."""

    config: RunConfig
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
    def python(self) -> str:
        """Interpreter that starts the agents."""
        return self.interpreter or compute_python(self.config)

    @property
    def groups(self) -> list[HetGroup]:
        """The nodes that are requested, in rank order."""
        return het_groups(with_resources(self.config, ()))

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
        own = {**interface_variables(self.config.slurm.interface), **self.config.compute.env}
        return {**own, **self.environment, "PYTHONUNBUFFERED": "1"}


def interface_variables(interface: str) -> dict[str, str]:
    """Variables that make MPI, gloo and NCCL listen on one network interface.

    PyPI's mpich uses UCX or libfabric, so both get a variable.  The equals sign keeps NCCL from taking the name as a
    prefix.
    """
    if not interface:
        return {}
    plain = dict.fromkeys(("UCX_NET_DEVICES", "FI_TCP_IFACE", "GLOO_SOCKET_IFNAME"), interface)
    return {**plain, "NCCL_SOCKET_IFNAME": f"={interface}"}
