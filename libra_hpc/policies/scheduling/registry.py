"""Scheduling policies by their name in the run file; the module of a policy is imported on first use."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

from libra_hpc.errors import invalid
from libra_hpc.user_file import FORM, load_class

from .protocol import Policy

_POLICIES: dict[str, tuple[str, str]] = {
    "cmlfq": ("causal_mlfq", "CausalMlfq"),
    "least_loaded": ("rules", "LeastLoaded"),
    "sticky": ("rules", "Sticky"),
}
"""Module, below this folder, and class."""
MEMBERS = ("name", "key", "route", "finished", "forget")
"""What a class has as a `Policy`."""
FIELD = "rollout.policy"


def policy_names() -> tuple[str, ...]:
    """The library's policies, in alphabetical order."""
    return tuple(_POLICIES)


def check_policy(name: str) -> None:
    """Raise `UserError` unless ``name`` is one of `policy_names`, or a file and class without constructor arguments."""
    if name not in _POLICIES:
        make_policy(name)


def policy_class(name: str, field: str = FIELD) -> type[Any]:
    """The class of a name, or of ``path/to/file.py:ClassName``; ``field`` is named in a `UserError`."""
    if name in _POLICIES:
        module, class_name = _POLICIES[name]
        found: type[Any] = getattr(importlib.import_module(f"{__package__}.{module}"), class_name)
        return found
    if ":" not in name:
        why = "unknown policy (other published rules are files in bench/policies of the sources)"
        raise invalid(field, name, why, [*_POLICIES, FORM])
    members = f"class with {', '.join(MEMBERS[:-1])} and {MEMBERS[-1]}"
    return load_class(field, name, members, lambda found: all(hasattr(found, member) for member in MEMBERS))


def make_policy(name: str, field: str = FIELD) -> Policy:
    """A new policy; raises `UserError` like `check_policy`."""
    found = policy_class(name, field)
    try:
        made: Policy = found()
    except (Exception, SystemExit) as error:
        raise invalid(field, name, f"{found.__name__} cannot be made without arguments ({error})") from error
    for member in MEMBERS[1:]:
        asked = list(inspect.signature(getattr(Policy, member)).parameters)[1:]
        try:
            inspect.signature(getattr(made, member)).bind(*asked)
        except (TypeError, ValueError) as error:
            raise invalid(field, name, f"its {member} is called with {', '.join(asked)} ({error})") from error
    return made
