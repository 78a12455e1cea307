"""From a task's name (built-in, or ``path/to/file.py:ClassName``) to its class; every mistake is one sentence."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import zlib
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from libra_hpc.errors import UserError, invalid

if TYPE_CHECKING:
    from .base import Task
    from .tokenizer import TaskTokenizer

BUILTIN = {
    "arithmetic": ("libra_hpc.tasks.arithmetic", "Arithmetic"),
    "keychain": ("libra_hpc.tasks.keychain", "KeyChain"),
}
"""Built-in tasks: name -> (module, class)."""

FILE_MODULE = "libra_hpc_task_file_"
"""Prefix of the module name of a user's file."""


def load_file(path: str | Path) -> ModuleType:
    """Import a user's Python file once, as a module named by its absolute path."""
    file = Path(path).resolve()
    name = f"{FILE_MODULE}{zlib.crc32(str(file).encode()):08x}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise invalid("task.name", str(path), "is not a Python file", "path/to/file.py:ClassName")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def task_class(name: str) -> type[Task]:
    """Find a task's class; raises `UserError` for an unknown name, a bad file, or a class that is no task."""
    from .base import Task

    if ":" not in name:
        if name not in BUILTIN:
            raise invalid("task.name", name, "no such task", [*BUILTIN, "path/to/file.py:ClassName"])
        module_name, class_name = BUILTIN[name]
        module = importlib.import_module(module_name)
    else:
        path, class_name = name.rsplit(":", 1)
        if not Path(path).is_file():
            raise invalid("task.name", name, f"no file {path!r}", "path/to/file.py:ClassName")
        try:
            module = load_file(path)
        except UserError:
            raise
        except Exception as error:
            raise invalid("task.name", name, f"{path} does not import ({type(error).__name__}: {error})") from error
    found = getattr(module, class_name, None)
    if not (inspect.isclass(found) and issubclass(found, Task)):
        tasks = [
            n
            for n, c in vars(module).items()
            if inspect.isclass(c) and issubclass(c, Task) and not inspect.isabstract(c)
        ]
        raise invalid("task.name", class_name, f"{module.__file__} has no such Task class", tasks)
    if inspect.isabstract(found):
        raise invalid(
            "task.name", name, f"{class_name!r} does not define {', '.join(sorted(found.__abstractmethods__))}"
        )
    return found


def check_options(found: type[Task], options: Mapping[str, Any]) -> None:
    """Raise `UserError` for an option that the constructor lacks."""
    parameters = inspect.signature(found).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return
    valid = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)][1:]
    for key in options:
        if key not in valid:
            raise invalid("task.options", key, f"{found.__name__} has no such option", valid)


def build_task(name: str, options: Mapping[str, Any], seed: int, tokenizer: TaskTokenizer) -> Task:
    """Construct a task; ``options`` may have a ``seed``. Raises `UserError` for bad names or options."""
    found = task_class(name)
    check_options(found, options)
    try:
        return found(tokenizer, **{"seed": seed, **options})
    except (TypeError, ValueError, AttributeError) as error:
        raise invalid("task.options", dict(options), f"{found.__name__} does not accept them ({error})") from error
