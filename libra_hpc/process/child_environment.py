"""The environment of what a run starts: devices, proxies, and who meets whom by MPI.

- A proxy of the site is not asked for this machine, nor for nodes of the run: clients of agents take it from their
  environment, and it would refuse, or reach somebody else's 127.0.0.1.
- Variables by which an MPI finds its launcher reach nothing that a run starts.
- On the CPU an engine sees no device, and gives memory back that it has freed.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping

VARIABLE = "CUDA_VISIBLE_DEVICES"
NO_PROXY = ("no_proxy", "NO_PROXY")
"""Where a variable of both spellings is set, a client reads either one."""
LOOPBACK = ("127.0.0.1", "localhost", "::1")
HOSTS_BYTES = 1 << 16
"""Most bytes of names of the run's nodes: about 2,000 nodes.  No program starts with a variable of twice that."""
LAUNCHER = (
    *("PMI_", "PMIX_", "PMI2_", "PALS_", "MPIR_CVAR_PMI_", "HYDRA_", "HYDI_"),
    *("MPI_LOCAL", "OMPI_COMM_", "OMPI_UNIVERSE_"),
)
"""Prefixes of variables by which an MPI finds its launcher, set by that, by Slurm, or by a module of the site: an MPI
process of a run would take them for its own."""
MAPPED = {"MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
"""glibc's least bytes of memory that is returned as soon as it is free. By default 32 MiB after the first tensors: a
trainer's activations of 8,192 tokens in 135M parameters leave 5 GB of holes. Half: as much memory. Four times: layers
of small models leave holes, too."""


def direct(base: Mapping[str, str], hosts: Iterable[str] = ()) -> dict[str, str]:
    """`NO_PROXY` with this machine and ``hosts``, behind what ``base`` has in either spelling."""
    fit = f"{','.join((*LOOPBACK, *hosts))},"[:HOSTS_BYTES].rpartition(",")[0]
    given = {name: base.get(name) or next((base[one] for one in NO_PROXY if base.get(one)), "") for name in NO_PROXY}
    named = {name: f"{text},{fit}".replace(" ", "").split(",") for name, text in given.items()}
    # Clients know an asterisk only where it stands alone.
    return {name: "*" if given[name] == "*" else ",".join(filter(None, dict.fromkeys(named[name]))) for name in named}


def clean_own(hosts: Iterable[str] = ()) -> None:
    """Make the environment of this process that of all that it starts; it has met the others of the run, ``hosts``."""
    for name in [name for name in os.environ if name.startswith(LAUNCHER)]:
        del os.environ[name]
    os.environ.update(direct(os.environ, hosts))


def own_devices(base: Mapping[str, str], first: int, count: int) -> str:
    """The ``count`` devices from ``first`` on of those that ``base`` shows, as the value of `VARIABLE`."""
    given = [name for name in base.get(VARIABLE, "").split(",") if name] or [str(i) for i in range(first + count)]
    return ",".join(given[first : first + count])


def engine_environment(base: Mapping[str, str], device: str, first: int, count: int, threads: int) -> dict[str, str]:
    """Environment of an engine on devices ``first .. first + count - 1`` of those this node was given.

    On the CPU every device is hidden, so that a library that finds one by itself does not use it.
    """
    out = {**base, "OMP_NUM_THREADS": str(threads)}
    if device == "cpu":
        return {**MAPPED, **out, VARIABLE: ""}
    return {**out, VARIABLE: own_devices(base, first, count)}
