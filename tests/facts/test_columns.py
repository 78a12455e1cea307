"""Numbers and events are declared once: what is written is declared, and what is declared is shown."""

from __future__ import annotations

import ast
import fnmatch
import io
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from rich.console import Console

import libra_hpc
from libra_hpc.config.run import RunConfig
from libra_hpc.facts import columns
from libra_hpc.facts.columns import Number
from libra_hpc.facts.events import EVENTS
from libra_hpc.facts.rundir import read_lines
from libra_hpc.facts.status import decode_status
from libra_hpc.facts.summary import render_summary, summarise
from libra_hpc.facts.view import status_screen
from libra_hpc.pictures.report_page import Standing, page
from tests.coordinator.test_coordinator import Scene, run_until_over, trains
from tests.docs import columns_page
from tests.protocol.step_reports import step_report

ROOT = Path(__file__).parents[2]
SOURCE = Path(libra_hpc.__file__).parent
WRITERS = {"event", "_event", "log", "_log", "_log_part"}
"""Functions that write an event; the kind is an argument of theirs."""
PUT_IN = {"_log_part": {"rank", "part"}}
"""Fields that such a function adds."""


class Written(NamedTuple):
    """One place in the source that writes events."""

    where: str
    kind: str
    """With ``*`` for what the place puts in."""
    fields: frozenset[str]
    whole: bool
    """Whether these are all fields."""


def shown(renderable: object) -> str:
    out = io.StringIO()
    Console(file=out, width=100).print(renderable)
    return out.getvalue()


def test_a_declared_column_is_shown_everywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    probe = Number("probe", "g", "A test").shown(columns.ALWAYS, columns.mean, "probes: {:.1f} grams")
    for table in ("COORDINATOR", "COLUMNS"):
        monkeypatch.setattr(columns, table, [*getattr(columns, table), probe])
    scene = Scene(tmp_path)
    for step, value in ((1, 2.0), (2, 5.0)):
        scene.deliver((1, step_report(step, probe=value, step_s=1.0)))
    scene.deliver((1, trains(done=2)))
    run_until_over(scene)
    run = scene.run
    run.write_json(run.config, RunConfig().as_data())
    assert [line["probe"] for line in read_lines(run.metrics)] == [2.0, 5.0]
    status = decode_status(run.status.read_bytes())
    assert status.numbers["probe"] == 3.5
    assert "probes        3.5 grams" in shown(status_screen(status, now=status.updated_at))
    facts = summarise(run)
    assert columns.as_json(facts)["probe"] == 3.5
    assert "3.5 grams" in shown(render_summary(run, facts, "completed"))
    assert '<dt>probes</dt><dd class="value">3.5</dd><dd class="more">grams</dd>' in page(
        run, Standing("completed", "", over=True), 1_800_000_000.0
    )
    assert "`probe`, in g: A test." in columns_page.page().replace("\n  ", " ")


def test_every_name_is_declared_once() -> None:
    names = [one.name for one in (*columns.COLUMNS, *columns.LIVE, *columns.COUNTED)]
    assert len(names) == len(set(names))


def test_the_page_in_docs_is_the_one_the_tables_make() -> None:
    command = "python -m tests.docs.columns_page > docs/columns.md"
    assert (ROOT / "docs/columns.md").read_text() == columns_page.page(), f"the tables have changed; run: {command}"


def test_every_event_that_is_written_is_declared_with_its_fields_and_none_is_unused() -> None:
    written = [found for path in sorted(SOURCE.rglob("*.py")) for found in events_of(path)]
    by_kind: dict[str, list[Written]] = {}
    for one in written:
        kinds = fnmatch.filter(EVENTS, one.kind)
        assert kinds, f"{one.where}: {one.kind} is not declared in facts/events.py"
        for kind in kinds:
            by_kind.setdefault(kind, []).append(one)
    assert set(EVENTS) == set(by_kind), "declared, and written nowhere"
    for kind, places in by_kind.items():
        declared, fields = set(EVENTS[kind].fields.split()), set().union(*(place.fields for place in places))
        assert fields <= declared, (kind, places)
        assert fields == declared or not all(place.whole for place in places), (kind, declared - fields)


def events_of(path: Path) -> Iterator[Written]:
    """Calls that write an event, and events written as dictionaries."""
    tree = ast.parse(path.read_text())
    constants = module_constants(tree)
    for node in ast.walk(tree):
        where = f"{path.relative_to(SOURCE)}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.Call) and name_of(node.func) in WRITERS:
            named = {keyword.arg for keyword in node.keywords if keyword.arg}
            for argument in node.args[:2]:
                for kind in kinds_in(argument, constants):
                    fields = named | PUT_IN.get(name_of(node.func), set())
                    whole = all(keyword.arg for keyword in node.keywords)
                    yield Written(where, kind, frozenset(fields), whole)
        elif isinstance(node, ast.Dict):
            keys = [key.value if isinstance(key, ast.Constant) else None for key in node.keys]
            if {"t", "kind"} <= set(keys):
                for kind in kinds_in(node.values[keys.index("kind")], constants):
                    fields = {str(key) for key in keys if key} - {"t", "kind"}
                    yield Written(where, kind, frozenset(fields), None not in keys)


def kinds_in(node: ast.expr, constants: dict[str, str]) -> list[str]:
    """Kinds that an argument can be; none where it is no text of the source."""
    if isinstance(node, ast.IfExp):
        return kinds_in(node.body, constants) + kinds_in(node.orelse, constants)
    if isinstance(node, ast.JoinedStr):
        return ["".join(str(part.value) if isinstance(part, ast.Constant) else "*" for part in node.values)]
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return [node.value]
    return [constants[node.id]] if isinstance(node, ast.Name) and node.id in constants else []


def name_of(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def module_constants(tree: ast.Module) -> dict[str, str]:
    """Texts that a module assigns, or imports, by a name in capitals."""
    found = dict[str, str]()
    for node in tree.body:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Constant(value=str(text))):
                found[name] = text
    return found
