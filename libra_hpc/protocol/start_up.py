"""MPICH's PMI-1 start-up protocol: what one MPI process asks its agent, and gets of the others."""

from __future__ import annotations

import zlib
from collections.abc import Iterable


class KeyValueSpace:
    """What one MPI process of ``size`` has put and may get; does no I/O.

    ``name``: of their world, unique for ever, as MPICH names its shared memory after it.
    """

    def __init__(self, size: int, name: str) -> None:
        self._own: dict[str, str] = {}
        # No two share memory: (vector,(first node, nodes, ranks per node)).
        self._values = {"PMI_process_mapping": f"(vector,(0,{size},1))"}
        self._replies = {
            "init": "cmd=response_to_init pmi_version=1 pmi_subversion=1 rc=0",
            # By these MPI splits long values over several keys; they are those of MPICH's own launcher.
            "get_maxes": "cmd=maxes kvsname_max=256 keylen_max=64 vallen_max=1024",
            "get_appnum": "cmd=appnum appnum=0",
            "get_my_kvsname": f"cmd=my_kvsname kvsname={name}",
            "get_universe_size": f"cmd=universe_size size={size}",
            "put": "cmd=put_result rc=0 msg=success",
            "get": "cmd=get_result rc=-1 msg=key_not_found value=unknown",
            "finalize": "cmd=finalize_ack",
        }

    def put(self) -> bytes:
        """What the process has put since the last barrier, compressed."""
        own, self._own = self._own, {}
        return zlib.compress("\n".join(map(" ".join, own.items())).encode())

    def take(self, others: Iterable[bytes]) -> None:
        """Let the process get what others have put."""
        for one in others:
            self._values |= dict(line.split(" ", 1) for line in zlib.decompress(one).decode().splitlines())

    def answer(self, line: str) -> str:
        """The reply to a line of the process; a barrier and an unknown command have none."""
        fields = dict(part.split("=", 1) for part in line.split() if "=" in part)
        command, key = fields.get("cmd", ""), fields.get("key", "")
        if command == "put":
            self._values[key] = self._own[key] = fields.get("value", "")
        if command == "get" and key in self._values:
            return f"cmd=get_result rc=0 msg=success value={self._values[key]}"
        return self._replies.get(command, "")
