"""Who may import whom: the table of docs/architecture.md, held against the imports."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

from .sources import ROOT, imports, name, sources

FREE = {"errors", "files", "user_file", "compiled", "checksum"}
"""Modules beside the rooms that every room may import."""
ABOVE = {"api"}
"""Stands above all rooms, and above the verbs."""
GROUPS = {"policies", "annexes"}
"""Folders whose own folders are the rooms."""
ROW = re.compile(r"^\| `(?P<room>[\w/]+)`.*? \|.*\| (?P<rooms>[^|]+) \|$", re.MULTILINE)


def table() -> dict[str, set[str]]:
    """Folders in the order of the table, with the rooms each may import."""
    rows = ROW.finditer((ROOT / "docs/architecture.md").read_text().partition("## Rooms")[2])
    return {row["room"]: set(re.findall(r"[\w/]+", row["rooms"])) for row in rows}


def rooms() -> dict[str, set[str]]:
    """The table without the folders that may import everything."""
    found = {room.removeprefix("libra_hpc/"): may for room, may in table().items() if room.startswith("libra_hpc/")}
    return {room: may for room, may in found.items() if may != {"all"}}


def room_of(parts: tuple[str, ...]) -> str:
    """Room of a module: ``policies/pool`` of ``("libra_hpc", "policies", "pool", "states")``."""
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
    inner = {path.parent for group in GROUPS for path in (ROOT / "libra_hpc" / group).glob("*/__init__.py")}
    expected = {folder.name for folder in folders} - GROUPS | {f"{one.parent.name}/{one.name}" for one in inner}
    assert set(rooms()) | ABOVE == expected


def test_rooms_import_what_the_table_allows_and_the_table_allows_no_more() -> None:
    for room, may in rooms().items():
        found = list(leaving(room))
        assert not [(path, other) for path, other in found if other not in may], room
        assert may <= {other for _, other in found}, f"{room}: the table allows what nobody needs"


def test_no_arrow_runs_upwards() -> None:
    seen: set[str] = set()
    for room, may in rooms().items():
        assert may <= seen, f"{room} stands above {sorted(may - seen)} in the table"
        seen.add(room)


def test_the_product_imports_no_annex() -> None:
    found = [(path, other) for room in rooms() for path, other in leaving(room) if other.startswith("annexes/")]
    assert not found


def test_a_wheel_has_every_room() -> None:
    folders = {".".join(path.parent.parts) for path in map(Path, map(name, sources("libra_hpc")))}
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    assert folders == {one for one in packages if one.partition(".")[0] == "libra_hpc"}
