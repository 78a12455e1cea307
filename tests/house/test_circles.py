"""No circle of imports, neither between the modules of a room nor between its folders."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import pytest

from .sources import hold, imports, modules, name, sources

pytestmark = pytest.mark.xdist_group("circles")
"""One worker reads all sources for both."""


def arrows() -> Iterator[tuple[Path, Path]]:
    """(file, file it imports), at whatever level of the file the import stands; packages have nothing to import."""
    for path in sources():
        for parts, one in imports(path):
            origin = modules().get((*parts, one)) or modules()[parts]
            if origin.name != "__init__.py":
                yield path, origin


def circles(pairs: Iterable[tuple[Path, Path]]) -> set[frozenset[Path]]:
    """Largest sets whose members all reach each other."""
    graph: dict[Path, set[Path]] = defaultdict(set)
    for source, target in pairs:
        graph[source].add(target)
    reached = {one: reach(graph, one) for one in tuple(graph)}
    found = (frozenset(two for two in reached[one] if one in reached.get(two, ())) for one in reached)
    return {members for members in found if len(members) > 1}


def reach(graph: Mapping[Path, set[Path]], start: Path) -> set[Path]:
    """What a node reaches along arrows."""
    seen: set[Path] = set()
    waiting = [start]
    while waiting:
        new = graph.get(waiting.pop(), set()) - seen
        seen |= new
        waiting += new
    return seen


def shown(members: Iterable[Path]) -> str:
    return ", ".join(sorted(map(name, members)))


def test_modules_import_in_no_circle() -> None:
    hold("circles", map(shown, circles(arrows())))


def test_folders_import_in_no_circle() -> None:
    pairs = ((source.parent, target.parent) for source, target in arrows())
    hold("folder circles", map(shown, circles((one, two) for one, two in pairs if one != two)))
