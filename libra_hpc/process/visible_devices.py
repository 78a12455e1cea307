"""Which devices a child engine may see: pure."""

from __future__ import annotations

from collections.abc import Mapping

VARIABLE = "CUDA_VISIBLE_DEVICES"
MAX_STARTS = 3
"""Starts of an engine that never became ready: once may be an accident of the node, thrice is the configuration."""


def engine_environment(base: Mapping[str, str], device: str, first: int, count: int, threads: int) -> dict[str, str]:
    """Environment of an engine on devices ``first .. first + count - 1`` of those this node was given.

    On the CPU every device is hidden, so that a library that finds one by itself does not use it.
    """
    out = {**base, "OMP_NUM_THREADS": str(threads)}
    if device == "cpu":
        return {**out, VARIABLE: ""}
    given = [name for name in base.get(VARIABLE, "").split(",") if name] or [str(i) for i in range(first + count)]
    return {**out, VARIABLE: ",".join(given[first : first + count])}
