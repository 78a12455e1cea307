"""Scheduling policies by the name used in the run file and on the command line; a policy's module is imported when it is made."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from libra_hpc.errors import invalid
from libra_hpc.sched.protocol import Policy

if TYPE_CHECKING:
    from libra_hpc.sim.baselines.oracle import Foresight

_BASELINES = "libra_hpc.sched.baselines"
_SIMULATED = "libra_hpc.sim.baselines"
_POLICIES: dict[str, tuple[str, str]] = {
    "autellix": (f"{_BASELINES}.autellix", "Autellix"),
    "cmlfq": ("libra_hpc.sched.cmlfq", "CausalMlfq"),
    "la_mlfq": (f"{_BASELINES}.la_mlfq", "LaMlfq"),
    "least_loaded": (f"{_BASELINES}.least_loaded", "LeastLoaded"),
    "least_requests": (f"{_BASELINES}.least_loaded", "LeastRequests"),
    "length_aware": (f"{_BASELINES}.length_aware", "LengthAware"),
    "libra": (f"{_BASELINES}.libra", "Libra"),
    "oracle": (f"{_SIMULATED}.oracle", "Oracle"),
    "round_robin": (f"{_BASELINES}.round_robin", "RoundRobin"),
    "seer": (f"{_BASELINES}.seer", "Seer"),
    "sticky": (f"{_BASELINES}.least_loaded", "Sticky"),
    "tail_batching": (f"{_SIMULATED}.tail_batching", "TailBatching"),
}

SIMULATOR_ONLY = {"oracle": "it knows the future", "tail_batching": "it aborts what a live run has started"}
"""Policies that no run file may name, and why."""


def policy_names(live: bool = True) -> tuple[str, ...]:
    """Names in alphabetical order: those a run file may use, or all that the simulator knows."""
    return tuple(name for name in _POLICIES if not (live and name in SIMULATOR_ONLY))


def check_policy(name: str, live: bool = True, field: str = "rollout.policy") -> None:
    """Raise `UserError` for a name that is unknown, or that needs the simulator where there is none (``live``)."""
    if name not in _POLICIES:
        raise invalid(field, name, "unknown policy", policy_names(live))
    if live and name in SIMULATOR_ONLY:
        raise invalid(field, name, f"this policy runs in the simulator only: {SIMULATOR_ONLY[name]}", policy_names(live))


def make_policy(name: str, seed: int = 0, *, live: bool = True, field: str = "rollout.policy", foresight: Foresight | None = None, **options: Any) -> Policy:
    """A fresh policy.

    ``options`` are keyword arguments of its class (thresholds, say).  ``foresight`` is what the oracle is made with; the others do not get it.  ``seed`` is
    for policies that draw random numbers; the ones here are deterministic.  Raises `UserError` as `check_policy` does.
    """
    check_policy(name, live, field)
    module, class_name = _POLICIES[name]
    if name == "oracle":
        options["foresight"] = foresight
    made: Policy = getattr(importlib.import_module(module), class_name)(**options)
    return made
