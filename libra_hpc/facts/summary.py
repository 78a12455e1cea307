"""Summary of a run that has ended, in one screen: reward, speed, moves of nodes, and faults."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from typing import Any

import msgspec
from rich import box
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from libra_hpc.protocol import trace

from . import series
from .columns import Value, declared, rows_of, values_of
from .rundir import RunDir, read_lines
from .series import duration, planned_steps
from .status import FailedAttempts, StepAccuracy, accuracy_line, because, dry_run, failed_in, failed_line, step_accuracy

STATE_STYLES = {"completed": "green", "running": "cyan", "failed": "red", "silent": "red"}
"""Styles by state; every other state is yellow."""


MOVE_HEADS = ("at", "move", "took", "done meanwhile", "gain predicted", "realised")
MOVE_NUMBERS = ("at", "took", "realised")
"""Columns that a narrow screen leaves whole; the others take several lines."""


class MoveSummary(series.MoveRecord, frozen=True, kw_only=True):
    """One node's move, and the progress of the others meanwhile."""

    at_s: float
    """Seconds after the job started."""
    steps_meanwhile: int
    """Optimizer steps committed while the node moved."""
    tokens_meanwhile: int
    """Generated tokens of trajectories that finished while the node moved."""


class LayoutSummary(msgspec.Struct, frozen=True):
    """One repartition."""

    step: int
    """Last step in the layout before."""
    layout: str
    """Training and rollout from then on."""
    break_s: float | None
    """Seconds from the commit of that step to the next commit."""
    before_s: float | None
    """Median step time in the layout before; the first step of a layout does not count, because it has the break."""
    after_s: float | None
    """Median step time since, up to the next layout."""


class EvaluationResult(msgspec.Struct, frozen=True):
    """The newest evaluation of a task, beside its first."""

    task: str
    step: int
    first: float | None
    """Mean reward of the first one; None: every trajectory failed."""
    mean: float | None
    stderr: float | None
    best_of: float | None
    """Mean of each prompt's best sample."""
    pass_at: dict[str, float] | None
    """Pass@k by k = 1, 2, 4, ...; None: no trajectory ended; empty: nobody knows what is solved."""
    solved: str | None
    """What pass@k counts, as ``reward >= 1``."""
    samples: int
    failed: int

    def words(self) -> str:
        """The result in one line, for people."""
        if self.mean is None:
            return f"{self.task} at step {self.step}: all trajectories failed"
        first = f"{self.first:.3f} -> " if self.first is not None else ""
        best = f", best of {self.samples} {self.best_of:.3f}" if self.samples > 1 else ""
        if self.pass_at:
            # Where rewards are 0 or 1, pass@1 is the mean.
            best = "".join(f", pass@{k} {share:.3f}" for k, share in self.pass_at.items() if share != self.mean)
            best += f" ({self.solved})" if best and self.solved else ""
        elif best and self.solved:
            best += f", no pass@k of {self.solved}"
        failed = f", {self.failed} failed" if self.failed else ""
        return f"{self.task} {first}{self.mean:.3f} +- {self.stderr:.3f} at step {self.step}{best}{failed}"


KEPT = EvaluationResult.__struct_fields__[3:]
"""Keys of a line that a result has."""


def evaluation_results(run: RunDir) -> list[EvaluationResult]:
    """Evaluations of each task, in the order of their first lines; of a job of its own, those of each step."""
    trains, lines = not run.policies.exists(), dict[Any, list[dict[str, Any]]]()
    for line in read_lines(run.evaluations):
        lines.setdefault(line["task"] if trains else (line["step"], line["task"]), []).append(line)
    found = []
    for own in lines.values():
        last = max(own, key=lambda line: line["step"])
        first = own[0].get("mean") if len(own) > 1 else None
        numbers: list[Any] = [last.get(name) for name in KEPT]
        found.append(EvaluationResult(last["task"], last["step"], first, *numbers))
    return found


class Summary(msgspec.Struct, frozen=True):
    """Totals of a run over all its attempts.  Times in seconds; None: not measured."""

    attempts: int
    wall_s: float
    """By the clock; all other seconds of a dry run are simulated ones."""
    steps: int
    rewards: list[series.RewardChange]
    """Changes by task of a mixture, or by phase; else one."""
    speedup: float
    """How many times faster than the clock it passed: 1.0 but for a dry run."""
    since_first_s: float | None
    """From the start of the first trajectory that ended to the last step."""
    planned_s: float | None
    """The same as the plan of the split played it."""
    kept_up: float
    """Training seconds over those by its clock, which a machine that is too slow for a dry run lengthens; at most 1."""
    numbers: dict[str, Value]
    """By the names in `columns`; in JSON they stand beside the other keys."""
    accuracy: StepAccuracy | None
    """Accuracy of the planner's step times; None: no estimates."""
    moves: list[MoveSummary]
    layouts: list[LayoutSummary]
    failures: list[FailedAttempts]
    """Failed attempts of trajectories by kind, the most frequent first."""
    evaluations: list[EvaluationResult]
    """The newest of each task."""
    checkpoints: list[int]
    policy: str | None
    """Folder of the exported policy."""
    picture: str | None


def summarise(run: RunDir) -> Summary:
    """Summarise a run directory, of a running run or an ended one."""
    recorded = series.read(run)
    steps, log, start, end, speedup = recorded
    first = next((one.started_at for one in trace.recorded(run.trajectories) if one.started_at), None)
    own_s, clock_s = (sum(series.number(row, key, 0.0) for row in steps) for key in ("train_s", "train_wall_s"))
    return Summary(
        attempts=max(len({e.get("attempt") for e in log if e["kind"] == "job_started"}), 1),
        wall_s=(end - start) / speedup,
        steps=len(steps),
        rewards=series.reward_changes(steps, planned_steps(run)),
        speedup=speedup,
        since_first_s=steps[-1]["t"] - recorded.since(first) if steps and first else None,
        planned_s=_planned_s(run, len(steps)) if first else None,
        kept_up=min(1.0, own_s / clock_s) if clock_s else 1.0,
        numbers=values_of(declared("ended"), steps, log),
        accuracy=step_accuracy(steps),
        moves=_moves(run, recorded),
        layouts=_layouts(steps, log),
        failures=failed_in(log, run.read_json(run.status)),
        evaluations=evaluation_results(run),
        checkpoints=_checkpoints(log),
        policy=str(run.policy) if (run.policy / "config.json").exists() else None,
        picture=str(run.summary_picture) if run.summary_picture.exists() else None,
    )


def _checkpoints(log: Sequence[series.Record]) -> list[int]:
    """Steps that were saved, in order."""
    return sorted({e["step"] for e in log if e["kind"] == "checkpoint_saved" and isinstance(e.get("step"), int)})


def _planned_s(run: RunDir, steps: int) -> float | None:
    predicted = run.read_json(run.plan).get("predicted", {})
    ends = predicted.get("step_ends_s", [])[:steps]
    return ends[-1] + (steps - len(ends)) * predicted["batch_s"] if ends else None


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
            layout=str(event["layout"]),
            break_s=series.known(ends.get(event["step"] + 1, math.nan) - ends.get(event["step"], math.nan)),
            before_s=before,
            after_s=after,
        )
        for event, (before, after) in zip(changed, itertools.pairwise(medians), strict=True)
    ]


def _moves(run: RunDir, recorded: series.Recorded) -> list[MoveSummary]:
    found = series.moves(recorded.log)
    if not found:
        return []
    trained = [series.number(row, "t") for row in recorded.steps]
    generated = [(recorded.since(one.finished_at), one.generated) for one in trace.recorded(run.trajectories)]
    out = []
    for move in found:
        end = math.inf if move.end is None else move.end
        out.append(
            MoveSummary(
                **msgspec.structs.asdict(move),
                at_s=move.start - recorded.start,
                steps_meanwhile=sum(move.start <= t <= end for t in trained),
                tokens_meanwhile=int(sum(tokens for t, tokens in generated if move.start <= t <= end)),
            )
        )
    return out


def render_summary(run: RunDir, summary: Summary, state: str, reason: str = "") -> RenderableType:
    """The summary for a terminal of 100 columns, or as plain text; how the run ended is not in its summary."""
    facts = label_grid()
    if reason and state != "completed":
        facts.add_row("message", Text(reason, style="yellow"))
    for change in summary.rewards:
        facts.add_row("reward", reward_text(change))
    attempts = f", {summary.attempts} attempts" if summary.attempts > 1 else ""
    facts.add_row("steps", f"{summary.steps} in {_elapsed(summary)}{attempts}")
    for label, cells in rows_of("ended", summary.numbers).items():
        facts.add_row(label, ", ".join(map(str, cells)))
    if summary.accuracy is not None:
        facts.add_row("step time", accuracy_line(summary.accuracy))
    several = (
        ("evaluation", map(EvaluationResult.words, summary.evaluations)),
        ("repartition", map(_layout_line, summary.layouts)),
    )
    for label, sentences in several:
        for sentence in sentences:
            facts.add_row(label, sentence)
    if summary.failures:
        facts.add_row("failed", failed_line(summary.failures))
    if summary.checkpoints:
        facts.add_row("checkpoints", ", ".join(f"step {step}" for step in summary.checkpoints[-6:]))
    parts: list[RenderableType] = [facts]
    if summary.moves:
        parts += [Text(), _moves_table(summary.moves)]
    places = label_grid()
    for label, path in (("run", str(run.path)), ("policy", summary.policy), ("picture", summary.picture)):
        if path:
            places.add_row(label, path)
    title = Text.assemble((run.name, "bold"), (dry_run(summary.speedup), "yellow"), " ", state_text(state))
    return Group(Panel(Group(*parts), title=title, title_align="left", box=box.ROUNDED, padding=(1, 2)), places)


def label_grid() -> Table:
    """A grid of labels and their texts, which may take several lines."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    return grid


def state_text(state: str) -> Text:
    """A state in words and in its colour."""
    return Text(state.replace("_", " "), style=STATE_STYLES.get(state, "yellow"))


def _elapsed(summary: Summary) -> str:
    clock, first_s, planned_s = duration(summary.wall_s), summary.since_first_s, summary.planned_s
    since = "" if first_s is None else f"{duration(first_s)} since the first prompt"
    planned = "" if planned_s is None else f", {duration(planned_s)} planned"
    if not dry_run(summary.speedup):
        return f"{clock}; {since}{planned}" if planned else clock
    return (
        f"{since or duration(summary.wall_s * summary.speedup)}{planned}; simulated, {clock} by the clock; the machine"
        f" kept up with {summary.kept_up:.2f} of the simulated time"
    )


def _layout_line(change: LayoutSummary) -> str:
    known = (
        ("before", change.before_s, " a step"),
        ("since", change.after_s, " a step"),
        ("break", change.break_s, ""),
    )
    seconds = ", ".join(f"{name} {value:.2f} s{what}" for name, value, what in known if value is not None)
    return f"after step {change.step}: {change.layout}" + (f"; {seconds}" if seconds else "")


def move_rows(moves: Sequence[MoveSummary]) -> list[tuple[str, ...]]:
    """Moves as rows below `MOVE_HEADS`."""
    return [
        (
            duration(move.at_s),
            f"node {move.rank} to {move.to}",
            "unfinished" if move.seconds is None else f"{move.seconds:.1f} s",
            f"{move.steps_meanwhile} steps, {move.tokens_meanwhile:,} tokens",
            seconds_text(move.predicted_gain_s),
            seconds_text(move.realised_gain_s),
        )
        for move in moves
    ]


def seconds_text(value: float | None) -> str:
    """Seconds to a hundredth, None as a dash."""
    return "-" if value is None else f"{value:.2f} s"


def _moves_table(moves: Sequence[MoveSummary]) -> RenderableType:
    rows = move_rows(moves)
    # Where the work changed with every move, nothing was measured.
    heads = MOVE_HEADS if any(row[-1] != "-" for row in rows) else MOVE_HEADS[:-1]
    table = Table(
        *heads,
        box=box.SIMPLE_HEAD,
        collapse_padding=True,
        pad_edge=False,
        title="moves of nodes",
        title_justify="left",
        title_style="dim",
    )
    for head, column in zip(heads, table.columns, strict=True):
        column.no_wrap = head in MOVE_NUMBERS
    reasons = label_grid()
    for move, row in zip(moves, rows, strict=True):
        table.add_row(*row[: len(heads)])
        reasons.add_row(f"node {move.rank}", because(move.reason, f"to_{move.to}"))
    return Group(table, reasons)


def reward_text(change: series.RewardChange) -> Text:
    """``0.410 → 0.728  before drift``"""
    if change.first is None or change.last is None:
        return Text("-")
    style = "green" if change.last > change.first else "yellow"
    return Text.assemble(f"{change.first:.3f} → ", (f"{change.last:.3f}", f"bold {style}"), f"  {change.of}".rstrip())
