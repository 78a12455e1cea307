"""The tables of a report: decisions, moves, layouts, faults, attempts and nodes.  Every cell is plain text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from libra_hpc.facts import series
from libra_hpc.facts.starts import Start
from libra_hpc.facts.status import because
from libra_hpc.facts.summary import LayoutSummary, MoveSummary, Summary, duration

MOST_ROWS = 300
"""Most rows of a table; the events of the run have the rest."""
FAULTS = {
    "engine_lost": "engine lost",
    "engine_restarted": "engine restarted",
    "engine_error": "engine error",
    "worker_error": "training process error",
    "host_lost": "environment host lost",
    "node_lost": "node lost",
    "node_returned": "node returned",
    "hung": "process hung",
    "slow": "slow",
    "own_stall": "rank 0 was stopped",
    "restart": "restart of all ranks",
    "recovered": "restarted from a checkpoint",
    "experience_kept": "trajectories recovered",
    "experience_refused": "trajectories not recovered",
    "admission_paused": "admission paused",
    "admission_resumed": "admission resumed",
    "prompt_given_up": "prompt given up",
    "update_skipped": "update skipped",
    "checkpoint_failed": "checkpoint failed",
    "checkpoint_damaged": "checkpoint damaged",
    "snapshot_failed": "snapshot failed",
    "export_failed": "export of weights failed",
    "storage_fault": "run directory takes no writes",
    "storage_ok": "run directory takes writes again",
    "weights_stalled": "weights late",
    "weights_corrupt": "weights damaged",
    "weights_not_stored": "weights not stored",
    "repartition_refused": "repartition refused",
    "stop_requested": "stop requested",
    "job_finished": "end of an attempt",
}
"""Kinds of events about what went wrong and what followed, in words."""


class Table(NamedTuple):
    caption: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    left_out: int = 0
    """Rows that the page does not show."""


def decisions(log: Sequence[series.Record], summary: Summary) -> Table:
    """The planner's decisions, the oldest first; a hold that was repeated is one row."""
    begin = log[0]["t"] if log else 0.0
    rows: list[list[str]] = []
    left_moves, layouts = list(summary.moves), iter(summary.layouts)
    for event in log:
        if event["kind"] == "held" and rows:
            rows[-1][1] = f"hold, {1 + int(series.number(event, 'looks', 0.0))} times"
        if event["kind"] == "repartitioned":
            layout = next(layouts, None)
            asked = next((row for row in reversed(rows) if row[1] == "repartition"), None)
            if asked is not None and layout is not None and layout.by == "planner":
                asked[4] = _seconds(_layout_gain(layout))
        if event["kind"] != "decision":
            continue
        action = str(event.get("action", "hold"))
        at_s = event["t"] - begin
        realised = _move_gain(left_moves, at_s, event) if action.startswith("to_") else None
        predicted = event.get("predicted_gain_s")
        rows.append(
            [
                duration(at_s),
                _action(action, event),
                because(str(event.get("reason", "")), action),
                _seconds(predicted if isinstance(predicted, int | float) else None),
                _seconds(realised),
            ]
        )
    # Of too many, the holds go first.
    holds = [row for row in rows if row[1].startswith("hold")]
    dropped = {id(row) for row in holds[: max(0, len(rows) - MOST_ROWS)]}
    kept = [row for row in rows if id(row) not in dropped]
    return _cut("The planner's decisions", ("at", "action", "reason", "predicted", "realised"), kept, len(dropped))


def moves(summary: Summary) -> Table:
    rows = [
        (
            duration(move.at_s),
            f"node {move.rank} to {move.to}",
            "unfinished" if move.seconds is None else f"{move.seconds:.1f} s",
            f"{move.steps_meanwhile} steps, {move.tokens_meanwhile:,} tokens",
            _seconds(move.predicted_gain_s),
            _seconds(move.realised_gain_s),
        )
        for move in summary.moves
    ]
    return _cut("Moves of nodes", ("at", "move", "took", "done meanwhile", "predicted", "realised"), rows)


def changed_layouts(summary: Summary) -> Table:
    rows = [
        (str(each.step), each.by, each.layout, _seconds(each.before_s), _seconds(each.after_s), _seconds(each.break_s))
        for each in summary.layouts
    ]
    return _cut("Repartitions", ("after step", "by", "layout", "step before", "step since", "break"), rows)


def faults(log: Sequence[series.Record]) -> Table:
    """What went wrong and what followed; empty where an attempt only ended well."""
    begin = log[0]["t"] if log else 0.0
    rows = [
        (duration(event["t"] - begin), FAULTS[event["kind"]], _where(event), _what(event))
        for event in log
        if event["kind"] in FAULTS and not _harmless(event)
    ]
    return _cut("Failures and restarts", ("at", "what", "where", "why"), rows)


def attempts(begun: Sequence[Start]) -> Table:
    rows = [
        (
            str(start.attempt),
            duration(start.queued_s) if start.queued_s else "-",
            duration(start.end - start.start),
            str(start.ranks or "-"),
            start.state or "-",
            start.message or "-",
        )
        for start in begun
    ]
    return _cut("Starts", ("attempt", "waited", "ran", "nodes", "ended", "message"), rows)


def nodes(log: Sequence[series.Record]) -> Table:
    found: dict[int, tuple[str, str, str]] = {}
    for event in log:
        if event["kind"] == "agent_joined" and isinstance(event.get("rank"), int):
            found[event["rank"]] = (str(event["rank"]), str(event.get("component", "")), str(event.get("host", "")))
    return _cut("Nodes of the last start", ("rank", "component", "host"), [found[rank] for rank in sorted(found)])


def _cut(caption: str, heads: Sequence[str], rows: Sequence[Sequence[str]], left_out: int = 0) -> Table:
    """A table with the newest rows."""
    shown = rows[-MOST_ROWS:]
    return Table(caption, heads, shown, left_out + len(rows) - len(shown))


def _action(action: str, event: series.Record) -> str:
    if not action.startswith("to_"):
        return action
    ranks = event.get("nodes")
    ranks = ranks if isinstance(ranks, list) and ranks else [event.get("node")]
    return f"node{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))} to {action.removeprefix('to_')}"


def _move_gain(left: list[MoveSummary], at_s: float, event: series.Record) -> float | None:
    """Realised gain of the first move that the decision can have caused; each move belongs to one decision."""
    for move in left:
        if move.rank == event.get("node") and move.at_s >= at_s - series.TOGETHER_S:
            left.remove(move)
            return move.realised_gain_s
    return None


def _layout_gain(layout: LayoutSummary) -> float | None:
    """Seconds that a layout saved in the median step."""
    return None if layout.before_s is None or layout.after_s is None else layout.before_s - layout.after_s


def _where(event: series.Record) -> str:
    parts = [f"node {event['rank']}"] if isinstance(event.get("rank"), int) else []
    parts += [str(event[key]) for key in ("engine", "part", "host") if event.get(key) not in (None, "")]
    return ", ".join(parts) or "-"


def _what(event: series.Record) -> str:
    parts = [str(event[key]) for key in ("state", "reason", "message", "error", "signal") if event.get(key)]
    if event["kind"] == "experience_kept":
        parts.append(f"{event.get('trajectories', 0)} finished, {event.get('unfinished', 0)} unfinished")
    return ": ".join(parts) or "-"


def _harmless(event: series.Record) -> bool:
    return event["kind"] == "job_finished" and event.get("state") == "completed"


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} s"
