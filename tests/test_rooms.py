"""Who may import whom: the table of docs/architecture.md, held against the imports."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
FREE = {"errors", "files", "compiled"}
"""Modules beside the rooms that every room may import."""
GROUPS = {"policies"}
"""Folders whose own folders are the rooms."""
ROW = re.compile(r"^\| `libra_hpc/(?P<room>[\w/]+)` \|.*\| (?P<rooms>[^|]+) \|$", re.MULTILINE)


def room_of(parts: tuple[str, ...]) -> str:
    """Room of a dotted name below `libra_hpc`: ``policies/costs`` of ``("policies", "costs", "lengths")``."""
    return "/".join(parts[: 2 if parts[0] in GROUPS else 1])


def table() -> dict[str, set[str]]:
    """Rooms in the order of the table, with those each may import."""
    text = (ROOT / "docs/architecture.md").read_text()
    return {row["room"]: set(re.findall(r"[\w/]+", row["rooms"])) for row in ROW.finditer(text)}


def imported(path: Path) -> Iterator[tuple[str, ...]]:
    """Dotted names below `libra_hpc` that a file imports; the last part may be a class."""
    package = path.relative_to(ROOT).with_suffix("").parts[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            names = [".".join((*base, *filter(None, [node.module]), alias.name)) for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        for name in names:
            parts = tuple(name.split("."))
            if parts[0] == "libra_hpc" and len(parts) > 1:
                yield parts[1:]


def imports(room: str) -> Iterator[tuple[str, str]]:
    """(file, room it imports from) for everything that leaves a room."""
    for path in sorted((ROOT / "libra_hpc" / room).rglob("*.py")):
        for parts in imported(path):
            if (other := room_of(parts)) not in {room, *FREE}:
                yield str(path.relative_to(ROOT)), other


def test_every_room_is_in_the_table_once() -> None:
    folders = {path.parent for path in (ROOT / "libra_hpc").glob("*/__init__.py")}
    inner = {path.parent for path in (ROOT / "libra_hpc").glob("policies/*/__init__.py")}
    rooms = {folder.name for folder in folders} - GROUPS | {f"policies/{folder.name}" for folder in inner}
    assert set(table()) == rooms


def test_rooms_import_what_the_table_allows_and_the_table_allows_no_more() -> None:
    for room, allowed in table().items():
        found = list(imports(room))
        assert not [(path, other) for path, other in found if other not in allowed], room
        assert allowed <= {other for _, other in found}, f"{room}: the table allows what nobody needs"


def test_no_arrow_runs_upwards() -> None:
    seen: set[str] = set()
    for room, allowed in table().items():
        assert allowed <= seen, f"{room} stands above {sorted(allowed - seen)} in the table"
        seen.add(room)
