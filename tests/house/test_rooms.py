"""Who may import whom: the table of docs/architecture.md, held against the imports."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from .sources import ROOT, imports, name, sources

FREE = {"errors", "files", "user_file", "compiled", "checksum"}
"""Modules beside the rooms that every room may import."""
ABOVE = {"api"}
"""Stands above all rooms, and above the verbs."""
GROUPS = {"policies"}
"""Folders whose own folders are the rooms."""
ROW = re.compile(r"^\| `(?P<room>[\w/]+)`.*? \|.*\| (?P<rooms>[^|]+) \| (?P<lines>[\d,]+) \|$", re.MULTILINE)


class Row(NamedTuple):
    """One line of the table."""

    imports: set[str]
    lines: int


def table() -> dict[str, Row]:
    """Folders in the order of the table, with the rooms each may import and its budget of lines."""
    rows = ROW.finditer((ROOT / "docs/architecture.md").read_text())
    return {
        row["room"]: Row(set(re.findall(r"[\w/]+", row["rooms"])), int(row["lines"].replace(",", ""))) for row in rows
    }


def rooms() -> dict[str, Row]:
    """The table without the folders that may import everything."""
    found = {room.removeprefix("libra_hpc/"): row for room, row in table().items() if room.startswith("libra_hpc/")}
    return {room: row for room, row in found.items() if row.imports != {"all"}}


def room_of(parts: tuple[str, ...]) -> str:
    """Room of a module: ``policies/costs`` of ``("libra_hpc", "policies", "costs", "lengths")``."""
    return "/".join(parts[1 : 3 if parts[1] in GROUPS else 2])


def leaving(room: str) -> Iterator[tuple[str, str]]:
    """(file, room it imports from) for everything that leaves a room."""
    for path in sources(f"libra_hpc/{room}"):
        for parts, one in imports(path):
            other = room_of((*parts, one)) if parts[0] == "libra_hpc" else parts[0]
            if other not in {room, *FREE}:
                yield name(path), other


def test_every_room_is_in_the_table_once() -> None:
    folders = {path.parent for path in (ROOT / "libra_hpc").glob("*/__init__.py")}
    inner = {path.parent for path in (ROOT / "libra_hpc").glob("policies/*/__init__.py")}
    expected = {folder.name for folder in folders} - GROUPS | {f"policies/{folder.name}" for folder in inner}
    assert set(rooms()) | ABOVE == expected


def test_rooms_import_what_the_table_allows_and_the_table_allows_no_more() -> None:
    for room, row in rooms().items():
        found = list(leaving(room))
        assert not [(path, other) for path, other in found if other not in row.imports], room
        assert row.imports <= {other for _, other in found}, f"{room}: the table allows what nobody needs"


def test_no_arrow_runs_upwards() -> None:
    seen: set[str] = set()
    for room, row in rooms().items():
        assert row.imports <= seen, f"{room} stands above {sorted(row.imports - seen)} in the table"
        seen.add(room)


def test_a_wheel_has_every_room() -> None:
    folders = {".".join(path.parent.parts) for path in map(Path, map(name, sources("libra_hpc")))}
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    assert folders <= set(packages)
