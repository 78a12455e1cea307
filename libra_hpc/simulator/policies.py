"""Policies a simulation can run: those of a run file, and those of `libra_hpc.simulator.baselines`."""

from __future__ import annotations

from libra_hpc.errors import invalid
from libra_hpc.policies.scheduling.protocol import Policy
from libra_hpc.policies.scheduling.registry import SIMULATOR_ONLY, make_policy, policy_names
from libra_hpc.simulator.baselines.oracle import Foresight, Oracle
from libra_hpc.simulator.baselines.tail_batching import TailBatching

ORACLE = Oracle.name


def simulated_policy_names() -> tuple[str, ...]:
    """All policy names, in alphabetical order."""
    return tuple(sorted((*policy_names(), *SIMULATOR_ONLY)))


def parse_policies(text: str, field: str = "--policy") -> list[str]:
    """Policy names of a comma-separated list, each once, in the order given; raises `UserError` for an unknown one."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise invalid(field, text, "no policy is named", "one or more policies, separated by commas")
    known = simulated_policy_names()
    for name in names:
        if name not in known:
            raise invalid(field, name, "unknown policy", known)
    return list(dict.fromkeys(names))


def make_simulated_policy(name: str, foresight: Foresight) -> Policy:
    """A new policy; only the oracle uses ``foresight``."""
    if name == ORACLE:
        return Oracle(foresight)
    return TailBatching() if name == TailBatching.name else make_policy(name)
