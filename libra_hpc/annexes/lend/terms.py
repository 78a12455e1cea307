"""What an owner gives, and what his users must not lose: the options of `libra-hpc lend serve`, checked."""

from __future__ import annotations

import re

import msgspec

from libra_hpc.errors import invalid

SECONDS = {"ms": 1e-3, "s": 1.0}
MIB = {"MiB": 1, "GiB": 1024, "MB": 1e6 / 2**20, "GB": 1e9 / 2**20}
SLO_VALID = "ttft=TIME with ms or s, such as ttft=500ms"
MEMORY_VALID = "a size with MiB or GiB, such as 30GiB"


def first_token_s(text: str) -> float:
    """Seconds of ``ttft=500ms``, which a user may wait for the first token; raises `UserError`."""
    if "tpot" in text:
        raise invalid("--slo", text, "nothing follows tpot: a guest steps only while nobody is served", SLO_VALID)
    match = re.fullmatch(r"ttft=(\d+\.?\d*)(ms|s)", text.strip())
    if match is None or not float(match[1]):
        raise invalid("--slo", text, "malformed" if text else "not given", SLO_VALID)
    return float(match[1]) * SECONDS[match[2]]


def memory_mib(text: str) -> int:
    """MiB of ``30GiB``; empty: 0.  Raises `UserError`."""
    match = re.fullmatch(r"(\d+\.?\d*) ?([a-zA-Z]*)", text) if text else None
    if text and (match is None or match[2] not in MIB or float(match[1]) <= 0):
        raise invalid("--memory", text, "no unit" if match and not match[2] else "malformed", MEMORY_VALID)
    return int(float(match[1]) * MIB[match[2]]) if match else 0


class LendTerms(msgspec.Struct, frozen=True):
    """What one lender gives, and when."""

    ttft_s: float
    """See `GateConfig.ttft_s`."""
    hours: str = ""
    """Text for `libra_hpc.annexes.lend.hours.Hours.parse`."""
    memory_mib: int = 0
    """Memory of each GPU for the guest in MiB; 0: as the run has it."""
    tp: int = 0
    """GPUs of an engine; 0: as the run has it."""
    engines: int = 1
    weights_mb_s: float = 0.0
    """Most bandwidth (MB/s) for new weights; 0: no limit."""
