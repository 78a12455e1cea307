"""The log of Layouts: a replay has what every node was to be and was, whatever happened to the nodes."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from libra_hpc.facts.layout_log import layout_line, replay
from libra_hpc.facts.rundir import RunDir
from tests.policies.pool.test_reconcile import UNITS, Run, disturb

from .synthetic import layout_lines, write


@settings(max_examples=50, deadline=None)
@given(data=st.data(), units=UNITS)
def test_a_replay_has_every_state_of_every_node(data: st.DataObject, units: dict[int, tuple[int, ...]]) -> None:
    """Moves, crashes and losses of nodes in two starts."""
    lines, played = list[dict[str, Any]](), list[tuple[float, int, dict[int, str]]]()
    for _ in range(2):
        run, logged = Run(units, "rollout"), 0
        for _ in range(data.draw(st.integers(1, 40))):
            if run.layout.number > logged:
                lines.append(layout_line(float(len(lines)), run.published.since(logged), {}))
                logged = run.layout.number
                states = {rank: str(node.state) for rank, node in run.pool.nodes.items()}
                played.append((lines[-1]["t"], logged, states))
            disturb(run, data, 4, 5)
    with TemporaryDirectory() as folder:
        write(RunDir(folder).layouts, *lines)
        found = [*replay(RunDir(folder))]
    assert [
        (t, number, {rank: row.state for rank, row in layout.rows.items()}) for t, number, layout, _ in found
    ] == played


def test_ways_hold_until_they_change_and_a_missing_line_shows_until_the_ranks_start_again(tmp_path: Path) -> None:
    run, first = RunDir(tmp_path), [*layout_lines((1.0, {1: "starting"}), (2.0, {1: "train"}), (3.0, {1: "lost"}))]
    write(run.layouts, {**first[0], "ways": {"1": "mpi"}}, first[2], *layout_lines((4.0, {1: "starting"})))
    found = [(one.number, one.layout.number, one.layout.rows[1].state, one.ways) for one in replay(run)]
    assert found == [(1, 1, "starting", {1: "mpi"}), (3, 1, "starting", {1: "mpi"}), (1, 1, "starting", {})]
