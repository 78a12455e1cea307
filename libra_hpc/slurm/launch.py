"""A launch: one attempt of a run, told to whatever starts it (sbatch, the local launcher, a dry run) as one value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from libra_hpc.config.job import Component
from libra_hpc.config.run import RunConfig
from libra_hpc.telemetry.rundir import RunDir

from .fit import present_components
from .interpreter import compute_python


@dataclass(frozen=True)
class Launch:
    """What is started: one node agent per node of every component of ``config``, in rank order."""

    config: RunConfig
    run: RunDir
    attempt: int
    """1 for the first submission of a run."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables the agents get, beside those that every agent gets."""
    interpreter: str = ""
    """Interpreter on the nodes; empty: that of the run file (`compute_python`)."""
    arguments: Sequence[str] | None = None
    """What the interpreter is given instead of the agent's own arguments."""

    @property
    def python(self) -> str:
        """Interpreter that starts the agents."""
        return self.interpreter or compute_python(self.config)

    @property
    def components(self) -> list[tuple[str, Component]]:
        """Components that have nodes, with their names, in rank order."""
        return present_components(self.config)

    @property
    def ranks(self) -> int:
        """How many agents there are."""
        return sum(component.nodes for _, component in self.components)

    @property
    def agent_arguments(self) -> list[str]:
        """Arguments of the interpreter that start a node agent."""
        agent = ["-m", "libra_hpc.runtime.agent", "--run", str(self.run.path), "--attempt", str(self.attempt)]
        return agent if self.arguments is None else list(self.arguments)

    @property
    def variables(self) -> dict[str, str]:
        """Variables the agents get, whatever starts them."""
        return {**interface_variables(self.config.slurm.interface), **self.environment, "PYTHONUNBUFFERED": "1"}


def interface_variables(interface: str) -> dict[str, str]:
    """What makes every library of the agents and their engines listen on one network interface.

    PyPI's mpich is built for UCX and libfabric and takes UCX unless told otherwise.  Without the equals sign NCCL would
    take the name for a prefix.
    """
    if not interface:
        return {}
    plain = dict.fromkeys(("UCX_NET_DEVICES", "FI_TCP_IFACE", "GLOO_SOCKET_IFNAME"), interface)
    return {**plain, "NCCL_SOCKET_IFNAME": f"={interface}"}
