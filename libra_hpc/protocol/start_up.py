"""MPICH's PMI-1 start-up protocol: the state of one world, by which its ranks find each other."""

from __future__ import annotations

from dataclasses import dataclass, field

MAXES = "cmd=maxes kvsname_max=256 keylen_max=64 vallen_max=1024"
"""Limits by which MPI libraries split long values over several keys; those of MPICH's own launcher."""


@dataclass
class KeyValueSpace:
    """State of the start-up protocol of one world; does no I/O."""

    size: int
    name: str
    """Unique on this machine for ever: MPICH names its shared memory after it."""
    mapping: str
    """Which ranks share a machine's memory: (vector,(first node, nodes, ranks per node))."""
    values: dict[str, str] = field(default_factory=dict)
    waiting: set[int] = field(default_factory=set)
    """Ranks inside the barrier."""

    def __post_init__(self) -> None:
        self.values["PMI_process_mapping"] = self.mapping

    def answer(self, rank: int, line: str) -> dict[int, str]:
        """Replies by rank to one line from ``rank``; an unknown command gets none."""
        fields = dict(part.split("=", 1) for part in line.split() if "=" in part)
        key = fields.get("key", "")
        match fields.get("cmd"):
            case "init":
                reply = "cmd=response_to_init pmi_version=1 pmi_subversion=1 rc=0"
            case "get_maxes":
                reply = MAXES
            case "get_appnum":
                reply = "cmd=appnum appnum=0"
            case "get_my_kvsname":
                reply = f"cmd=my_kvsname kvsname={self.name}"
            case "get_universe_size":
                reply = f"cmd=universe_size size={self.size}"
            case "put":
                self.values[key] = fields.get("value", "")
                reply = "cmd=put_result rc=0 msg=success"
            case "get" if key in self.values:
                reply = f"cmd=get_result rc=0 msg=success value={self.values[key]}"
            case "get":
                reply = "cmd=get_result rc=-1 msg=key_not_found value=unknown"
            case "finalize":
                reply = "cmd=finalize_ack"
            case "barrier_in":
                self.waiting.add(rank)
                if len(self.waiting) < self.size:
                    return {}
                released, self.waiting = self.waiting, set()
                return dict.fromkeys(released, "cmd=barrier_out")
            case _:
                return {}
        return {rank: reply}
