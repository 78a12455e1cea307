"""Classes and functions of a user's Python file, named as ``path/to/file.py:ClassName``."""

from __future__ import annotations

import importlib.util
import inspect
import os
import sys
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

from .errors import invalid

FORM, FUNCTION_FORM = "path/to/file.py:ClassName", "path/to/file.py:function"
FILE_MODULE = "libra_hpc_user_file_"
"""Prefix of the module name of a user's file."""


def file_of(name: str) -> Path | None:
    """The file of a name; None for a name of the library."""
    path, separator, _ = name.rpartition(":")
    return Path(path) if separator else None


def placed(field: str, path: str) -> str:
    """A path for processes that start in another folder, with ``~`` and variables expanded; an empty one stays so."""
    found = os.path.expanduser(os.path.expandvars(path))
    if "$" in found:
        raise invalid(field, path, "a variable in it is not set here", "a path, or variables that are set")
    return found and str(Path(found).absolute())


def absolute(field: str, name: str) -> str:
    """A name for processes that start in another folder; one without a file is returned as it is."""
    path, _, class_name = name.rpartition(":")
    return f"{placed(field, path)}:{class_name}" if path.endswith(".py") else name


def load_file(path: str | Path) -> ModuleType:
    """Import a Python file once, as a module named by its absolute path; modules of its folder can be imported."""
    file = Path(path).resolve()
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))  # last: a random.py beside it replaces none that others import
    name = f"{FILE_MODULE}{zlib.crc32(str(file).encode()):08x}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError("not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def load_class(field: str, name: str, what: str, fits: Callable[[type], bool]) -> type[Any]:
    """The class of that name; raises `UserError` unless its file imports and it ``fits``, which makes it a ``what``."""
    module, class_name = _module(field, name)
    found = getattr(module, class_name, None)
    if inspect.isclass(found) and fits(found):
        return found
    fitting = [n for n, c in vars(module).items() if inspect.isclass(c) and fits(c) and not inspect.isabstract(c)]
    raise invalid(field, class_name, f"{module.__file__} has no such {what}", fitting)


def load_function(field: str, name: str, known: Iterable[str] = ()) -> Callable[..., Any]:
    """The function of that name; raises `UserError` unless it is one. ``known``: names that need no file."""
    if ":" not in name:
        raise invalid(field, name, "unknown", [*known, FUNCTION_FORM])
    module, wanted = _module(field, name)
    found = getattr(module, wanted, None)
    if inspect.isfunction(found):
        return found
    functions = [n for n, f in vars(module).items() if inspect.isfunction(f) and f.__module__ == module.__name__]
    raise invalid(field, wanted, f"{module.__file__} has no such function", functions)


def _module(field: str, name: str) -> tuple[ModuleType, str]:
    """The file's module, and the name within it."""
    path, wanted = name.rsplit(":", 1)
    if not os.path.isfile(path):
        raise invalid(field, name, f"no file {path!r}", FORM)
    try:
        return load_file(path), wanted
    except (Exception, SystemExit) as error:
        raise invalid(field, name, f"{path} does not import ({type(error).__name__}: {error})") from error
