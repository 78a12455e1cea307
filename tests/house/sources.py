"""What the tests of the house read: the sources, their syntax trees, and the exceptions of each rule."""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterable
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("libra_hpc", "cli")
EXCEPTIONS: dict[str, dict[str, str]] = tomllib.loads(Path(__file__).with_name("exceptions.toml").read_text())
"""Rule -> what breaks it -> why that is right or whose change will mend it."""


@cache
def sources(*tops: str) -> tuple[Path, ...]:
    """Python files below folders of the repository; those of `PACKAGES` if none is named."""
    return tuple(path for top in tops or PACKAGES for path in sorted((ROOT / top).rglob("*.py")))


@cache
def syntax(path: Path) -> ast.Module:
    """Syntax tree of a file."""
    return ast.parse(path.read_text())


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """All nodes of a file's syntax tree."""
    return tuple(ast.walk(syntax(path)))


def name(path: Path) -> str:
    """Path from the repository's root."""
    return str(path.relative_to(ROOT))


@cache
def modules() -> dict[tuple[str, ...], Path]:
    """Dotted name, as parts, -> file of a module or package; `cli` is a name like any other."""
    parts = {path: path.relative_to(ROOT).with_suffix("").parts for path in sources()}
    return {found[:-1] if found[-1] == "__init__" else found: path for path, found in parts.items()}


@cache
def imports(path: Path) -> list[tuple[tuple[str, ...], str]]:
    """(module, name imported from it) for every import of a file from `PACKAGES`, at whatever level it stands."""
    package, found = path.relative_to(ROOT).with_suffix("").parts[:-1], []
    for node in nodes(path):
        if isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            parts = (*base, *(node.module.split(".") if node.module else ()))
            found += [(parts, alias.name) for alias in node.names]
        elif isinstance(node, ast.Import):
            found += [(tuple(alias.name.split(".")), "") for alias in node.names]
    found = [(("cli", *parts[1:]) if parts[:1] == ("libra_hpc_cli",) else parts, one) for parts, one in found]
    return [(parts, one) for parts, one in found if parts[:1] and parts[0] in PACKAGES]


def hold(rule: str, found: Iterable[str]) -> None:
    """Fail for what breaks a rule and is no exception, and for an exception that nothing needs."""
    broken, listed = set(found), set(EXCEPTIONS.get(rule, {}))
    assert not broken - listed, f"{rule}: {sorted(broken - listed)}"
    assert not listed - broken, f"{rule}: exceptions that nothing needs: {sorted(listed - broken)}"
