"""Summary of a run in one screen: reward, speed, moves of nodes, and faults."""

from __future__ import annotations

import itertools
import math
import statistics
from collections import Counter
from collections.abc import Sequence

import msgspec
from rich import box
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from . import series
from .estimate import StepAccuracy, accuracy_line, step_accuracy
from .failed import FailedAttempts, failed_facts, failed_in
from .phases import PhaseReward, first_and_last, phase_rewards, planned_steps
from .rundir import RunDir
from .status import because

STATE_STYLES = {
    "completed": "green",
    "running": "cyan",
    "starting": "yellow",
    "restarting": "yellow",
    "failed": "red",
    "time_limit": "yellow",
    "preempted": "yellow",
    "cancelled": "yellow",
    "silent": "red",
}
"""Styles by state; every other state is yellow."""


class MoveSummary(msgspec.Struct, frozen=True):
    """One node's move, and the progress of the others meanwhile."""

    rank: int
    to: str
    reason: str
    at_s: float
    """Seconds after the job started."""
    seconds: float | None
    """None: unfinished."""
    steps_meanwhile: int
    """Optimizer steps committed while the node moved."""
    tokens_meanwhile: int
    """Generated tokens of trajectories that finished while the node moved."""
    predicted_gain_s: float | None
    """Seconds per global batch, predicted before and measured after; None: unknown."""
    realised_gain_s: float | None


class LayoutSummary(msgspec.Struct, frozen=True):
    """One repartition."""

    step: int
    """Last step in the layout before."""
    by: str
    """``planner`` | ``operator``"""
    layout: str
    """Training and rollout from then on."""
    break_s: float | None
    """Seconds from the commit of that step to the next commit."""
    before_s: float | None
    """Median step time in the layout before; the first step of a layout does not count, because it has the break."""
    after_s: float | None
    """Median step time since, up to the next layout."""


class Summary(msgspec.Struct, frozen=True):
    """Totals of a run over all its attempts.  Times in seconds; None: not measured."""

    run: str
    path: str
    state: str
    attempts: int
    wall_s: float
    steps: int
    reward_first: float | None
    reward_last: float | None
    phases: list[PhaseReward]
    tokens: int
    """Tokens trained on, prompts included."""
    loss_tokens: int
    """Generated tokens trained on."""
    train_tokens_per_s: float | None
    rollout_tokens_per_s: float | None
    accuracy: StepAccuracy | None
    """Accuracy of the planner's step times; None: no estimates."""
    moves: list[MoveSummary]
    layouts: list[LayoutSummary]
    staleness_mean: float | None
    staleness_max: int
    engines_lost: int
    engines_restarted: int
    resubmitted: int
    recomputed_tokens: int
    """Context tokens that engines computed again; next, those of them that a KV cache had lost."""
    evicted_tokens: int
    failures: list[FailedAttempts]
    """Failed attempts of trajectories by kind, the most frequent first."""
    pauses: int
    """Pauses of admission because of them."""
    given_up: int
    """Prompts all of whose trajectories failed."""
    kept_trajectories: int
    """Finished trajectories that restarts recovered."""
    kept_unfinished: int
    """Unfinished trajectories that restarts recovered by replay of their turns."""
    kept_tokens: int
    """Generated tokens of both."""
    checkpoints: list[int]
    policy: str | None
    """Folder of the exported policy."""
    picture: str | None


def summarise(run: RunDir) -> Summary:
    """Summarise a run directory, of a running run or an ended one."""
    rows, log = series.steps(run), series.events(run)
    kinds = Counter(e["kind"] for e in log)
    times = [e["t"] for e in log] + [t for t in series.column(rows, "t") if math.isfinite(t)]
    start = min(times, default=0.0)
    first, last = first_and_last(series.column(rows, "reward"), planned_steps(run))
    staleness = [s for s in series.column(rows, "staleness_max") if math.isfinite(s)]
    recovered = [e for e in log if e["kind"] == "experience_kept"]
    finished = [e for e in log if e["kind"] == "job_finished"]
    state = (
        str(finished[-1].get("state", "completed"))
        if finished
        else str(run.read_json(run.status).get("state", "unknown"))
    )
    return Summary(
        run=run.name,
        path=str(run.path),
        state=state,
        attempts=max(len({e.get("attempt") for e in log if e["kind"] == "job_started"}), 1),
        wall_s=max(times, default=0.0) - start,
        steps=len(rows),
        reward_first=first,
        reward_last=last,
        phases=phase_rewards(rows),
        tokens=_total(rows, "tokens"),
        loss_tokens=_total(rows, "loss_tokens"),
        train_tokens_per_s=_known(series.mean(series.column(rows, "train_tokens_per_s"))),
        rollout_tokens_per_s=_known(series.mean(series.column(rows, "rollout_tokens_per_s"))),
        accuracy=_accuracy(rows),
        moves=_moves(run, rows, log, start),
        layouts=_layouts(rows, log),
        staleness_mean=_known(series.mean(series.column(rows, "staleness_mean"))),
        staleness_max=int(max(staleness, default=0)),
        engines_lost=kinds["engine_lost"],
        engines_restarted=kinds["engine_restarted"],
        resubmitted=kinds["resubmitted"],
        recomputed_tokens=_total(rows, "recomputed_tokens"),
        evicted_tokens=_total(rows, "evicted_tokens"),
        failures=failed_in(log, run.read_json(run.status)),
        pauses=kinds["admission_paused"],
        given_up=kinds["prompt_given_up"],
        kept_trajectories=_total(recovered, "trajectories"),
        kept_unfinished=_total(recovered, "unfinished"),
        kept_tokens=_total(recovered, "generated_tokens") + _total(recovered, "unfinished_tokens"),
        checkpoints=sorted(
            {e["step"] for e in log if e["kind"] == "checkpoint_saved" and isinstance(e.get("step"), int)}
        ),
        policy=str(run.policy) if (run.policy / "config.json").exists() else None,
        picture=str(run.summary_picture) if run.summary_picture.exists() else None,
    )


def _layouts(rows: Sequence[series.Record], log: Sequence[series.Record]) -> list[LayoutSummary]:
    changed = [e for e in log if e["kind"] == "repartitioned"]
    boundaries = [0.0, *(series.number(e, "step") for e in changed), math.inf]
    times = [
        [series.number(row, "step_s") for row in rows if low + 1.0 < series.number(row, "step") <= high]
        for low, high in itertools.pairwise(boundaries)
    ]
    medians = [statistics.median(part) if part else None for part in times]
    ends = {row["step"]: series.number(row, "t") for row in rows}
    return [
        LayoutSummary(
            step=int(event["step"]),
            by=str(event.get("by", "planner")),
            layout=str(event["layout"]),
            break_s=_known(ends.get(event["step"] + 1, math.nan) - ends.get(event["step"], math.nan)),
            before_s=before,
            after_s=after,
        )
        for event, (before, after) in zip(changed, itertools.pairwise(medians), strict=True)
    ]


def _moves(run: RunDir, rows: Sequence[series.Record], log: Sequence[series.Record], start: float) -> list[MoveSummary]:
    found = series.moves(log)
    if not found:
        return []
    trained = [series.number(row, "t") for row in rows]
    generated = [series.generated(record) for record in series.trajectories(run)]
    out = []
    for move in found:
        end = math.inf if move.end is None else move.end
        out.append(
            MoveSummary(
                rank=move.rank,
                to=move.to,
                reason=move.reason,
                at_s=move.start - start,
                seconds=_known(move.seconds),
                steps_meanwhile=sum(move.start <= t <= end for t in trained),
                tokens_meanwhile=int(sum(tokens for t, tokens in generated if move.start <= t <= end)),
                predicted_gain_s=_known(move.predicted_gain_s),
                realised_gain_s=_known(move.realised_gain_s),
            )
        )
    return out


def _accuracy(rows: Sequence[series.Record]) -> StepAccuracy | None:
    return step_accuracy(
        [(_known(series.number(row, "expected_s")), series.number(row, "step_s", 0.0)) for row in rows]
    )


def _total(rows: Sequence[series.Record], key: str) -> int:
    return int(sum(series.number(row, key, 0.0) for row in rows))


def _known(value: float) -> float | None:
    return value if math.isfinite(value) else None


def render_summary(summary: Summary) -> RenderableType:
    """The summary for a terminal of 100 columns, or as plain text."""
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="dim", no_wrap=True)
    facts.add_column(overflow="fold")
    facts.add_row("reward", _change(summary.reward_first, summary.reward_last))
    for phase in summary.phases:
        line = _change(phase.reward_first, phase.reward_last)
        facts.add_row("", Text.assemble(line, (f"   {phase.phase} ({phase.steps} steps)", "dim")))
    facts.add_row(
        "steps",
        f"{summary.steps} in {duration(summary.wall_s)}"
        + (f", {summary.attempts} attempts" if summary.attempts > 1 else ""),
    )
    facts.add_row("tokens", f"{summary.tokens:,} trained, {summary.loss_tokens:,} of them generated")
    facts.add_row("speed", f"train {_rate(summary.train_tokens_per_s)}   rollout {_rate(summary.rollout_tokens_per_s)}")
    if summary.recomputed_tokens:
        facts.add_row("recomputed", recomputed_line(summary.recomputed_tokens, summary.evicted_tokens))
    stale = (
        "-"
        if summary.staleness_mean is None
        else f"{summary.staleness_mean:.2f} mean, {summary.staleness_max} max (weight versions)"
    )
    facts.add_row("staleness", stale)
    if summary.accuracy is not None:
        facts.add_row("step time", accuracy_line(summary.accuracy))
    trouble = (
        f"engines lost {summary.engines_lost}, restarted {summary.engines_restarted}; trajectories re-submitted"
        f" {summary.resubmitted}"
    )
    facts.add_row("failures", Text(trouble, style="" if summary.engines_lost else "dim"))
    if summary.failures:
        facts.add_row("failed", failed_facts(summary.failures, summary.pauses, summary.given_up))
    if summary.kept_trajectories or summary.kept_unfinished:
        what = (
            f"{summary.kept_trajectories} trajectories and {summary.kept_unfinished} unfinished ones with"
            f" {summary.kept_tokens:,} generated tokens"
        )
        facts.add_row("recovered", f"{what}, in restarts of the ranks")
    for change in summary.layouts:
        known = (
            ("before", change.before_s, " a step"),
            ("since", change.after_s, " a step"),
            ("break", change.break_s, ""),
        )
        seconds = ", ".join(f"{name} {value:.2f} s{what}" for name, value, what in known if value is not None)
        facts.add_row(
            "repartition",
            f"after step {change.step} by the {change.by}: {change.layout}" + (f"; {seconds}" if seconds else ""),
        )
    if summary.checkpoints:
        facts.add_row("checkpoints", ", ".join(f"step {step}" for step in summary.checkpoints[-6:]))
    parts: list[RenderableType] = [facts]
    if summary.moves:
        parts += [Text(), _moves_table(summary.moves)]
    places = Table.grid(padding=(0, 2))
    places.add_column(style="dim", no_wrap=True)
    places.add_column(overflow="fold")
    for label, path in (("run", summary.path), ("policy", summary.policy), ("picture", summary.picture)):
        if path:
            places.add_row(label, path)
    title = Text.assemble(
        (summary.run, "bold"), " ", (summary.state.replace("_", " "), STATE_STYLES.get(summary.state, ""))
    )
    return Group(Panel(Group(*parts), title=title, title_align="left", box=box.ROUNDED, padding=(1, 2)), places)


def _moves_table(moves: Sequence[MoveSummary]) -> RenderableType:
    table = Table(
        box=box.SIMPLE_HEAD,
        title="moves of nodes",
        title_justify="left",
        title_style="dim",
        pad_edge=False,
        expand=True,
    )
    for name in ("at", "node", "to", "took", "meanwhile", "gain a batch: predicted", "realised"):
        table.add_column(name, no_wrap=True)
    reasons = Table.grid(padding=(0, 2))
    reasons.add_column(style="dim", no_wrap=True)
    reasons.add_column(overflow="fold")
    for move in moves:
        took = "unfinished" if move.seconds is None else f"{move.seconds:.1f} s"
        meanwhile = f"{move.steps_meanwhile} steps, {move.tokens_meanwhile:,} tokens"
        gains = ("-" if gain is None else f"{gain:.2f} s" for gain in (move.predicted_gain_s, move.realised_gain_s))
        table.add_row(duration(move.at_s), str(move.rank), move.to, took, meanwhile, *gains)
        reasons.add_row(f"node {move.rank}", because(move.reason, f"to_{move.to}"))
    return Group(table, reasons)


def _change(first: float | None, last: float | None) -> Text:
    if first is None or last is None:
        return Text("-")
    style = "green" if last > first else "yellow"
    return Text.assemble(f"{first:.3f} → ", (f"{last:.3f}", f"bold {style}"), (f"  ({last - first:+.3f})", style))


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f} tokens/s"


def recomputed_line(tokens: int, evicted: int) -> str:
    """Context tokens that engines computed again, and how many of them a KV cache had lost."""
    return f"{tokens:,} context tokens, {evicted:,} of them evicted from a KV cache"


def duration(seconds: float) -> str:
    """Seconds as ``42 s``, ``3:07`` or ``1:02:03``."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    hours, rest = divmod(whole, 3600)
    return f"{hours}:{rest // 60:02d}:{rest % 60:02d}" if hours else f"{rest // 60}:{rest % 60:02d}"
