"""From a task's name (built in, or with a colon: a file's class, a data set) to its class; a mistake is a sentence."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from libra_hpc.config.learn import AGENT, GYM, MIXTURE, VERIFIERS
from libra_hpc.errors import UserError, invalid
from libra_hpc.user_file import FORM, load_class

if TYPE_CHECKING:
    from .base import Task, TaskMaker
    from .tokenizer import TaskTokenizer

TASKS = {
    "data": ("libra_hpc.tasks.data_task", "DataTask"),
    AGENT: ("libra_hpc.endpoint.agent_task", "AgentTask"),
    VERIFIERS: ("libra_hpc.endpoint.verifiers_task", "VerifiersTask"),
}
_CLASSES = {**TASKS, MIXTURE: ("libra_hpc.tasks.mixture", "Mixture")}
"""Names of a run file that need no file."""
GYM_TASK = ("libra_hpc.chat.gym_task", "GymTask")
"""Module and class of the data sets of `reasoning-gym`."""


def unknown_task(field: str, name: str) -> UserError:
    """The mistake of a name that no task has and that names no file."""
    why = "unknown task" if name else "neither a task nor rows (task.data) are given"
    return invalid(field, name, why, [*TASKS, f"{GYM}:NAME", FORM])


def task_class(name: str) -> type[Task] | type[TaskMaker]:
    """Find a task's class; raises `UserError` for an unknown name, a bad file, or a class that is no task."""
    from .base import Task, TaskMaker

    if name.startswith(f"{GYM}:"):
        found = importlib.import_module(GYM_TASK[0]).gym_class(name)
    elif ":" in name:
        found = load_class("task.name", name, "Task class", lambda one: issubclass(one, (Task, TaskMaker)))
    elif name in _CLASSES:
        module_name, class_name = _CLASSES[name]
        found = getattr(importlib.import_module(module_name), class_name)
    else:
        raise unknown_task("task.name", name)
    if inspect.isabstract(found):
        raise invalid(
            "task.name", name, f"{found.__name__!r} does not define {', '.join(sorted(found.__abstractmethods__))}"
        )
    return found


def check_options(found: type[Task] | type[TaskMaker], options: Mapping[str, Any]) -> None:
    """Raise `UserError` for an option that the constructor lacks."""
    parameters = inspect.signature(found).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return
    valid = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)][1:]
    kinds = {p.name: getattr(p.annotation, "__name__", p.annotation) for p in parameters}
    for key, value in options.items():
        if key not in valid:
            raise invalid("task.options", key, f"{found.__name__} has no such option", valid)
        wanted = {"int": (int,), "float": (int, float), "bool": (bool,), "str": (str,)}.get(str(kinds[key]))
        if wanted and (not isinstance(value, wanted) or (isinstance(value, bool) and bool not in wanted)):
            raise invalid(f"task.options.{key}", value, f"{found.__name__} takes {kinds[key]}")


def build_task(
    name: str, options: Mapping[str, Any], seed: int, tokenizer: TaskTokenizer, *, chat: Mapping[str, Any] | None = None
) -> Task:
    """Construct a task; ``options`` may have a ``seed``. Raises `UserError` for bad names or options."""
    from .base import TaskMaker

    found = task_class(name)
    check_options(found, options)
    try:
        made = found(tokenizer, **{"seed": seed, **options})  # type: ignore[call-arg]
        return made.make(chat or {}) if isinstance(made, TaskMaker) else made
    except (TypeError, ValueError, AttributeError) as error:
        raise invalid("task.options", dict(options), f"{found.__name__} does not accept them ({error})") from error
