"""Scheduling policies by their name in the run file; the module of a policy is imported on first use."""

from __future__ import annotations

import importlib

from libra_hpc.errors import invalid

from .protocol import Policy

_BASELINES = "libra_hpc.policies.scheduling.baselines"
_POLICIES: dict[str, tuple[str, str]] = {
    "autellix": (f"{_BASELINES}.autellix", "Autellix"),
    "cmlfq": ("libra_hpc.policies.scheduling.cmlfq.causal_mlfq", "CausalMlfq"),
    "cmlfq_cost": (f"{_BASELINES}.cmlfq_cost", "CmlfqCost"),
    "la_mlfq": (f"{_BASELINES}.la_mlfq", "LaMlfq"),
    "least_loaded": (f"{_BASELINES}.least_loaded", "LeastLoaded"),
    "least_requests": (f"{_BASELINES}.least_loaded", "LeastRequests"),
    "length_aware": (f"{_BASELINES}.length_aware", "LengthAware"),
    "libra": (f"{_BASELINES}.libra", "Libra"),
    "round_robin": (f"{_BASELINES}.round_robin", "RoundRobin"),
    "seer": (f"{_BASELINES}.seer", "Seer"),
    "sticky": (f"{_BASELINES}.least_loaded", "Sticky"),
    "tp_sticky": (f"{_BASELINES}.tp_sticky", "TpSticky"),
}

SIMULATOR_ONLY = {"oracle": "it knows the future", "tail_batching": "it aborts what a live run has started"}
"""Policies that no run file may name, and why."""


def policy_names() -> tuple[str, ...]:
    """Names a run file may use, in alphabetical order."""
    return tuple(_POLICIES)


def check_policy(name: str) -> None:
    """Raise `UserError` if a run file may not use this name."""
    if name in SIMULATOR_ONLY:
        why = f"this policy runs in the simulator only: {SIMULATOR_ONLY[name]}"
        raise invalid("rollout.policy", name, why, policy_names())
    if name not in _POLICIES:
        raise invalid("rollout.policy", name, "unknown policy", policy_names())


def make_policy(name: str) -> Policy:
    """A new policy; raises `UserError` like `check_policy`."""
    check_policy(name)
    module, class_name = _POLICIES[name]
    made: Policy = getattr(importlib.import_module(module), class_name)()
    return made
