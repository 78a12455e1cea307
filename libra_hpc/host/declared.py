"""What a task declares: the place of its tools, and the limits of its calls and steps."""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable, Mapping
from typing import Any

from libra_hpc.errors import invalid
from libra_hpc.tasks.base import Task
from libra_hpc.user_file import FILE_MODULE

from .toolproc import ToolRef


def tool_refs(tools: Mapping[str, Callable[..., Any]]) -> tuple[ToolRef, ...]:
    """Describe declared tools so that another process can import them; raises `UserError` for lambdas and nested
    functions.
    """
    refs = []
    for name, function in tools.items():
        module, qualname = getattr(function, "__module__", None) or "", getattr(function, "__qualname__", "")
        if not module or module == "__main__" or "<" in qualname or not qualname or not callable(function):
            valid = "a function at the top level of a module"
            raise invalid(f"tools[{name!r}]", function, "cannot be run in a tool process", valid)
        if inspect.iscoroutinefunction(function):
            raise invalid(f"tools[{name!r}]", function, "nobody awaits it in a tool process", "a plain function")
        file = inspect.getsourcefile(sys.modules[module]) if module.startswith(FILE_MODULE) else None
        refs.append(ToolRef(name, module, file or "", qualname))
    return tuple(refs)


def tool_limits(task: Task, default_s: float) -> dict[str, float]:
    """Seconds per call of each tool: ``default_s``, or the task's own limit if longer; raises `UserError`."""
    for name, limit_s in task.tool_limits.items():
        if name not in task.tools:
            raise invalid("tool_limits", name, "the task declares no such tool", task.tools)
        _check(f"tool_limits[{name!r}]", limit_s)
    return {name: max(default_s, task.tool_limits.get(name, 0.0)) for name in task.tools}


def step_limit(task: Task, default_s: float) -> float:
    """Seconds per step, in the same way; 0: no limit."""
    _check("step_limit_s", task.step_limit_s)
    return max(default_s, task.step_limit_s)


def busy_limit(task: Task) -> float:
    """Longest time that the task declares for a step or tool call; 0: none."""
    _check("step_limit_s", task.step_limit_s)
    return max(task.step_limit_s, *tool_limits(task, 0.0).values(), 0.0)


def _check(field: str, value: object) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool) or not (0.0 <= value < math.inf):
        raise invalid(field, value, "not a length of time", "a number of seconds >= 0")
