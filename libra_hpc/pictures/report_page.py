"""The report of a run: one HTML page with its key figures, tables, charts, faults, decisions and configuration.

- The page asks for nothing outside itself and has no script; its policy (CSP) forbids both to a browser.
- Every text of the run is escaped by the template; cells of tables are plain text.
- Values that may be secrets are hidden wherever they stand (`without_secrets`): a report is for others.
"""

from __future__ import annotations

import datetime
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from typing import Any, NamedTuple

from libra_hpc.config.load import flat
from libra_hpc.config.reference import as_records, tables
from libra_hpc.config.run_file_text import HIDDEN, without_secrets
from libra_hpc.facts import series
from libra_hpc.facts.columns import rows_of
from libra_hpc.facts.events import EVENTS, cause_of, in_words, place_of
from libra_hpc.facts.rundir import RunDir
from libra_hpc.facts.series import duration
from libra_hpc.facts.starts import RunStart, job_gpus, job_seconds, starts
from libra_hpc.facts.status import LENDER_HEADS, because, dry_run, failed_line, gone, lender_rows, lenders_of
from libra_hpc.facts.summary import MOVE_HEADS, Summary, move_rows, reward_text, seconds_text, summarise

from .report_charts import charts, node_stages
from .svg_chart import MOST_POINTS, legend, svg, template

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


SHORTEST_HIDDEN = 8
"""Characters of a hidden value from which it is hidden in all other texts too: ``math`` is no secret."""
DIGITS = 3
"""Decimals of a reward."""


class Standing(NamedTuple):
    """How the run stands, which its own files may not know."""

    state: str
    cause: str
    over: bool
    """Whether its end is known."""


class Figure(NamedTuple):
    """One key figure."""

    name: str
    value: str
    note: str = ""


def page(run: RunDir, ending: Standing, now: float) -> str:
    """The page as HTML; ``now``: epoch seconds at which it is written."""
    config = run.resolved()
    recorded, summary = series.read(run), summarise(run)
    rows, log, *_ = recorded
    begun = starts(rows, log)
    hidden = sorted(set(_secrets(config)), key=len, reverse=True)

    def cleaned(value: Any) -> Any:
        """A text of the run without the hidden values; pieces of the template are none."""
        for text in hidden if type(value) is str else ():
            value = value.replace(text, HIDDEN)
        return value

    eta = _get(config, "algorithm.eta", None)
    stages = node_stages(run, recorded)
    drawn = charts(rows, log, starts=begun, eta=eta if isinstance(eta, int) else None, stages=stages)
    return template("report.html.j2", finalize=cleaned).render(
        run=run.name,
        title=run.name + dry_run(summary.speedup),
        state=ending.state,
        cause=ending.cause,
        over=ending.over,
        written=when(now),
        version=metadata.version("libra-hpc"),
        heading=_heading(run, config, recorded, begun=begun, ending=ending),
        figures=_figures(config, summary, begun) if rows else [],
        averaged=math.ceil(len(rows) / MOST_POINTS),
        charts=drawn if rows else [],
        svg=svg,
        legend=legend,
        evaluations=[result.words() for result in summary.evaluations],
        decisions=decisions(log),
        others=[moves(summary), changed_layouts(summary), lenders(run, ending.over)],
        faults=faults(log),
        failed=failed_line(summary.failures),
        attempts=attempts(begun),
        nodes=nodes(log),
        changed=_changed(config),
        environment=_environment(run, config),
    )


def when(t: float) -> str:
    """A time for readers anywhere."""
    return datetime.datetime.fromtimestamp(t, datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")


def _heading(
    run: RunDir, config: Mapping[str, Any], recorded: series.Recorded, *, begun: Sequence[RunStart], ending: Standing
) -> list[tuple[str, str]]:
    job = run.read_json(run.job)
    model = str(_get(config, "model.path", "")) or str(_get(config, "planner.model", ""))
    hosts = {str(event.get("host", "")) for event in recorded.log if event["kind"] == "agent_joined"}
    submitted = series.number(job, "submitted_at", 0.0)
    facts = [
        ("model", model or "-"),
        ("task", str(_get(config, "task.name", "")) or "-"),
        (
            "cluster",
            str(job.get("cluster") or job.get("executor") or "-")
            + (f", {len(hosts)} host{'' if len(hosts) == 1 else 's'}" if hosts else ""),
        ),
        ("submitted", when(submitted) if submitted else "-"),
    ]
    if begun:
        facts.append(("started", when(recorded.by_clock(begun[0].start))))
        facts.append(("ended" if ending.over else "last news", when(recorded.by_clock(begun[-1].end))))
    return facts


def _figures(config: Mapping[str, Any], summary: Summary, begun: Sequence[RunStart]) -> list[Figure]:
    spent_s, gpus = job_seconds(begun), job_gpus(config)
    queued_s = sum(start.queued_s for start in begun)
    used = gpus or max((start.ranks for start in begun), default=0)
    steps = _get(config, "run.steps", 0)
    simulated = _get(config, "run.engine", "real") == "simulated"
    found = [
        *(
            Figure("reward", reward_text(change).plain, "means of the first and last fifth")
            for change in summary.rewards
        ),
        Figure("steps", f"{summary.steps:,}" + (f" of {steps:,}" if isinstance(steps, int) and steps else "")),
        Figure(
            "time with nodes",
            duration(spent_s),
            f"{duration(queued_s)} in the queue between attempts" if queued_s else "",
        ),
        Figure(
            "GPU hours" if gpus else "node hours",
            f"{used * spent_s / 3600:,.2f}",
            f"{used} {'GPUs' if gpus else 'nodes without GPUs'}"
            + (", a dry run: engines are simulated" if simulated else ""),
        ),
    ]
    for label, (first, *others) in rows_of("ended", summary.numbers).items():
        note = ", ".join([first.words.replace("{}", "").strip(), *map(str, others)])
        found.append(Figure(label, first.value, note))
    if summary.accuracy is not None:
        seconds = f"expected {summary.accuracy.expected_s:.2f} s a step, measured {summary.accuracy.measured_s:.2f} s"
        found.append(Figure("error of the planner", f"{summary.accuracy.error:.0%}", seconds))
    return found


def _changed(config: Mapping[str, Any]) -> PageTable:
    rows = []
    for record in as_records(tables()):
        value = _get(config, record["key"], record["default"])
        if value != record["default"]:
            shown = without_secrets(record["key"], value)
            rows.append((record["key"], json.dumps(shown), json.dumps(record["default"])))
    return PageTable("Keys that differ from their defaults", ("key", "value", "default"), rows)


def _secrets(values: Mapping[str, Any]) -> Iterator[str]:
    """Long texts among the values that are hidden."""
    for key, value in flat(values).items():
        for text in map(str, value if isinstance(value, list) else [value]):
            if len(text) >= SHORTEST_HIDDEN and without_secrets(key, text) == HIDDEN:
                yield text


def _environment(run: RunDir, config: Mapping[str, Any]) -> list[tuple[str, str]]:
    job = run.read_json(run.job)
    facts = [
        ("run folder", str(run.path)),
        ("job", " ".join(str(job.get(key, "")) for key in ("executor", "job_id")).strip() or "-"),
        ("device", str(_get(config, "slurm.device", "-"))),
        ("engines", str(_get(config, "run.engine", "-"))),
        ("interpreter", str(_get(config, "compute.python", "")) or "the one that submitted"),
        ("container", str(_get(config, "compute.image", "")) or "none"),
    ]
    for name, component in _get(config, "components", {}).items():
        if isinstance(component, dict) and component.get("nodes"):
            kind = f" {component['gpu_type']}" if component.get("gpu_type") else ""
            facts.append((f"{name} nodes", f"{component['nodes']} with {component.get('gpus', 0)}{kind} GPUs each"))
    return facts


def _get(values: Mapping[str, Any], key: str, default: Any) -> Any:
    """The value of a dotted key."""
    found: Any = values
    for name in key.split("."):
        if not isinstance(found, Mapping) or name not in found:
            return default
        found = found[name]
    return found
