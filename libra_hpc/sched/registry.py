"""Scheduling policies by the name used in the run file."""

from __future__ import annotations

from collections.abc import Callable

from libra_hpc.errors import invalid
from libra_hpc.sched.cmlfq import CausalMlfq
from libra_hpc.sched.least_loaded import LeastLoaded
from libra_hpc.sched.protocol import Policy

_POLICIES: dict[str, Callable[[int], Policy]] = {
    "cmlfq": lambda seed: CausalMlfq(),
    "least_loaded": lambda seed: LeastLoaded(),
}


def policy_names() -> tuple[str, ...]:
    """Every name `make_policy` knows."""
    return tuple(sorted(_POLICIES))


def make_policy(name: str, seed: int = 0) -> Policy:
    """A fresh policy.  ``seed`` is for policies that draw random numbers; the ones here are deterministic.

    Raises `UserError` for an unknown name.
    """
    make = _POLICIES.get(name)
    if make is None:
        raise invalid("rollout.policy", name, "unknown scheduling policy", policy_names())
    return make(seed)
