"""What an owner gives, and what his users must not lose: the options of `libra-hpc lend serve`, checked."""

from __future__ import annotations

import re
from typing import NamedTuple

import msgspec

from libra_hpc.errors import invalid

SECONDS = {"ms": 1e-3, "s": 1.0}
MIB = {"MiB": 1, "GiB": 1024, "MB": 1e6 / 2**20, "GB": 1e9 / 2**20}
SLO_VALID = "ttft=TIME,tpot=TIME with ms or s, such as ttft=500ms,tpot=150ms"
MEMORY_VALID = "a size with MiB or GiB, such as 30GiB"


class Slo(NamedTuple):
    """Seconds that a user may wait for the first token, and for each further one."""

    ttft_s: float
    tpot_s: float

    @classmethod
    def parse(cls, text: str) -> Slo:
        """Parse ``ttft=500ms,tpot=150ms``; raises `UserError`."""
        found: dict[str, float] = {}
        for part in text.split(","):
            name, _, time = part.strip().partition("=")
            if name not in ("ttft", "tpot"):
                raise invalid("--slo", text, f"{name!r} is no limit of a server", SLO_VALID)
            if name in found:
                raise invalid("--slo", text, f"{name} occurs twice", SLO_VALID)
            found[name] = _seconds(text, name, time.strip())
        if missing := {"ttft", "tpot"} - set(found):
            raise invalid("--slo", text, f"{missing.pop()} is missing", SLO_VALID)
        return cls(found["ttft"], found["tpot"])


def _seconds(text: str, name: str, time: str) -> float:
    match = re.fullmatch(r"(\d+\.?\d*)([a-zA-Z]*)", time)
    if match is None or match[2] not in SECONDS:
        raise invalid(
            "--slo", text, f"{name} has no unit of time" if match and not match[2] else "malformed", SLO_VALID
        )
    seconds = float(match[1]) * SECONDS[match[2]]
    if seconds <= 0:
        raise invalid("--slo", text, f"{name} is not longer than 0", SLO_VALID)
    return seconds


def memory_mib(text: str) -> int:
    """MiB of ``30GiB``; empty: 0.  Raises `UserError`."""
    match = re.fullmatch(r"(\d+\.?\d*) ?([a-zA-Z]*)", text) if text else None
    if text and (match is None or match[2] not in MIB or float(match[1]) <= 0):
        raise invalid("--memory", text, "no unit" if match and not match[2] else "malformed", MEMORY_VALID)
    return int(float(match[1]) * MIB[match[2]]) if match else 0


class LendTerms(msgspec.Struct, frozen=True):
    """What one lender gives, and when."""

    ttft_s: float
    tpot_s: float
    hours: str = ""
    """Text for `libra_hpc.annexes.lend.hours.Hours.parse`."""
    memory_mib: int = 0
    """Memory of each GPU for the guest in MiB; 0: as the run has it."""
    tp: int = 0
    """GPUs of an engine; 0: as the run has it."""
    engines: int = 1
    headroom: float = 0.0
    """See `GateConfig.headroom`."""
    weights_mb_s: float = 0.0
    """Most bandwidth (MB/s) for new weights; 0: no limit."""

    @property
    def slo(self) -> str:
        return f"{self.ttft_s * 1000:g}/{self.tpot_s * 1000:g} ms"
