"""The tables of a report: decisions, moves, layouts, faults, attempts and nodes.  Every cell is plain text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from libra_hpc.facts import series
from libra_hpc.facts.events import EVENTS, cause_of, in_words, place_of
from libra_hpc.facts.rundir import RunDir
from libra_hpc.facts.series import duration
from libra_hpc.facts.starts import RunStart
from libra_hpc.facts.status import LENDER_HEADS, because, gone, lender_rows, lenders_of
from libra_hpc.facts.summary import MOVE_HEADS, Summary, move_rows, seconds_text

MOST_ROWS = 300
"""Most rows of a table; the events of the run have the rest."""


class PageTable(NamedTuple):
    caption: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    left_out: int = 0
    """Rows that the page does not show."""


def decisions(log: Sequence[series.Record]) -> PageTable:
    """The planner's decisions, the oldest first; a hold that was repeated is one row."""
    begin = log[0]["t"] if log else 0.0
    rows: list[list[str]] = []
    for event in log:
        if event["kind"] == "held" and rows:
            rows[-1][1] = f"hold, {1 + int(series.number(event, 'looks', 0.0))} times"
        elif event["kind"] == "decision":
            rows.append(_decision(event, event["t"] - begin))
    # Of too many, the holds go first.
    holds = [row for row in rows if row[1].startswith("hold")]
    dropped = {id(row) for row in holds[: max(0, len(rows) - MOST_ROWS)]}
    kept = [row for row in rows if id(row) not in dropped]
    return _cut("The planner's decisions", ("at", "action", "reason", "predicted"), kept, len(dropped))


def _decision(event: series.Record, at_s: float) -> list[str]:
    action = str(event.get("action", "hold"))
    predicted = series.known(series.number(event, "predicted_gain_s"))
    return [
        duration(at_s),
        _action(action, event),
        because(str(event.get("reason", "")), action),
        seconds_text(predicted),
    ]


def moves(summary: Summary) -> PageTable:
    return _cut("Moves of nodes", MOVE_HEADS, move_rows(summary.moves))


def changed_layouts(summary: Summary) -> PageTable:
    rows = [
        (
            str(each.step),
            each.layout,
            seconds_text(each.before_s),
            seconds_text(each.after_s),
            seconds_text(each.break_s),
        )
        for each in summary.layouts
    ]
    return _cut("Repartitions", ("after step", "layout", "step before", "step since", "break"), rows)


def lenders(run: RunDir, over: bool) -> PageTable:
    found = gone(lenders_of(run)) if over else lenders_of(run)
    return _cut("Lenders and guests of the last start", LENDER_HEADS, lender_rows(found))


def faults(log: Sequence[series.Record]) -> PageTable:
    """What went wrong and what followed; empty where an attempt only ended well."""
    begin = log[0]["t"] if log else 0.0
    rows = [
        (duration(event["t"] - begin), in_words(event["kind"]), place_of(event) or "-", cause_of(event) or "-")
        for event in log
        if event["kind"] in EVENTS and EVENTS[event["kind"]].fault and not _harmless(event)
    ]
    return _cut("Failures and restarts", ("at", "what", "where", "why"), rows)


def attempts(begun: Sequence[RunStart]) -> PageTable:
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


def nodes(log: Sequence[series.Record]) -> PageTable:
    found: dict[int, tuple[str, str, str]] = {}
    for event in log:
        if event["kind"] == "agent_joined" and isinstance(event.get("rank"), int):
            found[event["rank"]] = (str(event["rank"]), str(event.get("component", "")), str(event.get("host", "")))
    return _cut("Nodes of the last start", ("rank", "component", "host"), [found[rank] for rank in sorted(found)])


def _cut(caption: str, heads: Sequence[str], rows: Sequence[Sequence[str]], left_out: int = 0) -> PageTable:
    """A table with the newest rows."""
    shown = rows[-MOST_ROWS:]
    return PageTable(caption, heads, shown, left_out + len(rows) - len(shown))


def _action(action: str, event: series.Record) -> str:
    if not action.startswith("to_"):
        return action
    ranks = event.get("nodes")
    ranks = ranks if isinstance(ranks, list) and ranks else [event.get("node")]
    return f"node{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))} to {action.removeprefix('to_')}"


def _harmless(event: series.Record) -> bool:
    return event["kind"] == "job_finished" and event.get("state") == "completed"
