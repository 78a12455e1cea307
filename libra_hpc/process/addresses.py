"""Addresses by which the processes of a run reach each other, and sockets that listen there."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import random
import socket
from collections.abc import Sequence
from functools import partial

import psutil

VIRTUAL = ("lo", "docker", "br-", "veth", "virbr", "cni", "flannel")
"""Interfaces by prefix that never lead to another node."""

PORTS = range(24_000, 25_000)
"""A firewall can let them through; a listener has another one where all are taken.  Half: a port is sooner that of a
process of another run, while callers still know the old one; double: nothing."""


def loopback() -> str:
    """The address by which processes of this machine reach each other; that of IPv6 where IPv4 has none."""
    with contextlib.suppress(OSError):
        socket.create_server(("127.0.0.1", 0)).close()
        return "127.0.0.1"
    return "::1"


def own_addresses(interface: str = "") -> list[str]:
    """Addresses of this machine, or of one ``interface``, that others may reach; the one its name resolves to first."""
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
