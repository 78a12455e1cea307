"""What ``nvidia-smi topo -m`` prints of a node: network adapters beside its GPUs, and the CPUs of each GPU.

- Some adapters share a PCIe switch with a GPU and others with none -> NCCL uses those that do (``NCCL_IB_HCA``).  The
  others often belong to storage or management.
- The job has all CPUs of the NUMA node of a process's GPUs -> the process stays on them.
- The machine names no difference, or does not answer -> nothing is chosen.

And the addresses of a node, with sockets that listen there.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import random
import re
import shutil
import socket
import subprocess
from collections.abc import Mapping, Sequence
from functools import cache, partial
from typing import NamedTuple

HCA = "NCCL_IB_HCA"
TIMEOUT_S = 20.0
"""Without a persistent driver the first answer takes several seconds."""
_PLACE, _CPUS = re.compile(r"(GPU|NIC)\d+"), re.compile(r"\d[\d,-]*")
BESIDE = ("PIX", "PXB")
"""A path over PCIe switches alone."""
VIRTUAL = ("lo", "docker", "br-", "veth", "virbr", "cni", "flannel")
"""Interfaces by prefix that never lead to another node."""

PORTS = range(24_000, 25_000)
"""A firewall can let them through; a listener has another one where all are taken.  Half: a port is sooner that of a
process of another run, while callers still know the old one; double: nothing."""


class NodeTopology(NamedTuple):
    adapters: str = ""
    """A value of `HCA`; empty: NCCL's own choice."""
    cpus: dict[str, str] = {}
    """List of CPUs such as ``0-47,96-143``, by number of the GPU."""


def parse_topology(text: str) -> NodeTopology:
    """Adapters and CPUs from the output of ``nvidia-smi topo -m``."""
    lines = [line.split() for line in re.sub(r"\x1b\[\d*m", "", text).splitlines()]
    heading = next((line for line in lines if line[:1] == ["GPU0"]), [])
    columns = [word for word in heading if _PLACE.fullmatch(word)]
    rows = [line for line in lines if line and _PLACE.fullmatch(line[0]) and line[0].startswith("GPU")][1:]
    gpus = {line[0][3:]: dict(zip((*columns, "CPU"), line[1:], strict=False)) for line in rows}
    names = dict(re.findall(r"^\s*(NIC\d+): (\S+)$", text, re.MULTILINE))
    return NodeTopology(
        _adapters(list(gpus.values()), names),
        {gpu: row["CPU"] for gpu, row in gpus.items() if _CPUS.fullmatch(row.get("CPU", ""))},
    )


def _adapters(gpus: Sequence[Mapping[str, str]], names: Mapping[str, str]) -> str:
    """``gpus``: the path to every place in the node."""
    near = [nic for nic in names if any(gpu.get(nic) in BESIDE for gpu in gpus)]
    without = [gpu for gpu in gpus if not any(gpu.get(nic) in BESIDE for nic in near)]
    return "" if without or len(near) in (0, len(names)) else "=" + ",".join(names[nic] for nic in near)


@cache
def node_topology() -> NodeTopology:
    """Return the topology of this node; asks once."""
    command = ["nvidia-smi", "topo", "-m"]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=TIMEOUT_S)
    except (OSError, subprocess.SubprocessError):
        return NodeTopology()
    return parse_topology(done.stdout) if done.returncode == 0 else NodeTopology()


def beside_gpus(argv: Sequence[str], gpus: str, topology: NodeTopology, allowed: set[int]) -> list[str]:
    """``argv``, kept on the CPUs of its GPUs where these have the same and all are ``allowed``.

    ``gpus``: their numbers with commas between them, as in ``CUDA_VISIBLE_DEVICES``.
    """
    lists = {topology.cpus.get(gpu, "") for gpu in gpus.split(",")}
    cpus = lists.pop()
    if lists or not cpus or not _numbers(cpus) <= allowed or shutil.which("taskset") is None:
        return list(argv)
    return ["taskset", "--cpu-list", cpus, *argv]


def _numbers(cpus: str) -> set[int]:
    ends = ([int(end) for end in part.split("-")] for part in cpus.split(","))
    return {number for first, *last in ends for number in range(first, (last or [first])[0] + 1)}


def loopback() -> str:
    """The address by which processes of this machine reach each other; that of IPv6 where IPv4 has none."""
    with contextlib.suppress(OSError):
        socket.create_server(("127.0.0.1", 0)).close()
        return "127.0.0.1"
    return "::1"


def own_addresses(interface: str = "") -> list[str]:
    """Addresses of this machine, or of one ``interface``, that others may reach; the one its name resolves to first."""
    # A login node has none.
    import psutil

    found = []
    up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    for name, entries in psutil.net_if_addrs().items():
        if name != interface if interface else name not in up or name.startswith(VIRTUAL):
            continue
        for entry in entries:
            if (
                entry.family in (socket.AF_INET, socket.AF_INET6)
                and not ipaddress.ip_address(entry.address.partition("%")[0]).is_link_local
            ):
                found.append(entry.address)
    named: set[str] = set()
    with contextlib.suppress(OSError):
        named = {str(info[4][0]) for info in socket.getaddrinfo(socket.gethostname(), None)}
    return sorted(found, key=lambda address: (address not in named, ":" in address))


def listen(addresses: Sequence[str], backlog: int) -> socket.socket:
    """A socket for callers at the one address, or at all of this machine; raises `OSError`."""
    address = addresses[0] if len(addresses) == 1 else ""
    both = not address and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if ":" in address or both else socket.AF_INET
    serve = partial(socket.create_server, family=family, backlog=backlog, dualstack_ipv6=both)
    for port in random.sample(PORTS, len(PORTS)):
        try:
            return serve((address, port))
        except OSError as error:
            # An address that is not there, or no descriptor: another port changes nothing.
            if error.errno != errno.EADDRINUSE:
                raise
    return serve((address, 0))
