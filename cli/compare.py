"""`libra-hpc compare`: several runs side by side, as tables and as a picture."""

from __future__ import annotations

import json as json_text
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.table import Table
from rich.text import Text

from libra_hpc.config.grid import short_keys
from libra_hpc.errors import UserError, invalid
from libra_hpc.facts import series
from libra_hpc.facts.columns import as_json, cell, compared
from libra_hpc.facts.comparison import SEED, Comparison, MetricCurve
from libra_hpc.facts.comparison import compare as side_by_side
from libra_hpc.facts.rundir import RunDir
from libra_hpc.facts.series import duration
from libra_hpc.facts.status import dry_run
from libra_hpc.facts.summary import state_text

from . import jobs
from .output import busy, picture_file, print_json, print_line, print_note, show, table
from .runs import RUNS, JsonOption, RunsOption, find_run, of_sweep

PICTURE = Path("compare.svg")
LEGEND = (
    "{metric}: mean of the last fifth of the steps; s/step, tokens/s: without the first step; {declared};"
    " failed: attempts of trajectories; time: from the first event to the last"
)
"""Under the table of results."""
REWARD = "reward"

RunsArgument = Annotated[
    list[str] | None, typer.Argument(metavar="RUN RUN...", help="Run folders, their names, or their job ids.")
]
SweepOption = Annotated[str, typer.Option("--sweep", metavar="NAME", help="All runs of a sweep.")]
MetricOption = Annotated[
    str, typer.Option("--metric", metavar="NAME", help="A column of metrics.jsonl, e.g. reward or entropy.")
]
OutOption = Annotated[Path, typer.Option("--out", metavar="SVG", callback=picture_file, help="Where the picture goes.")]


def compare(
    wanted: RunsArgument = None,
    sweep: SweepOption = "",
    metric: MetricOption = REWARD,
    out: OutOption = PICTURE,
    json: JsonOption = False,
    runs: RunsOption = Path(RUNS),
) -> None:
    found = chosen(wanted or [], sweep, runs)
    with busy("reading the runs"):
        check_metric(metric, found)
        comparison, curves = side_by_side(found, metric)
        known = jobs.states(found)
        states = [known[str(run.path)].state for run in found]
    picture = draw(comparison, curves, sweep or "runs side by side", out)
    if json:
        facts = as_facts(comparison, states)
        print_json({"sweep": sweep or None, **facts, "picture": None if picture is None else str(picture)})
        return
    show(settings_table(comparison, states))
    show(results_table(comparison))
    declared = "; ".join(f"{one.head}: {one.name}" for one in compared())
    show(Text(LEGEND.format(metric=metric, declared=declared)))
    if any(len(group.members) > 1 for group in comparison.groups):
        show(seeds_table(comparison))
    if picture is not None:
        print_line(f"picture  {picture}")


def chosen(wanted: Sequence[str], sweep: str, parent: Path) -> list[RunDir]:
    """The named runs, or those of the sweep, each once; raises `UserError`."""
    if bool(wanted) == bool(sweep):
        raise UserError("compare needs either two or more runs or --sweep NAME, and not both.")
    if sweep:
        return of_sweep(sweep, parent)
    unique = {run.path.resolve(): run for run in (find_run(name, parent) for name in wanted)}
    if len(unique) < 2:
        raise UserError(f"compare needs two runs or more; {wanted[0]!r} is one.")
    return list(unique.values())


def check_metric(metric: str, runs: Sequence[RunDir]) -> None:
    """Raise `UserError` when runs have steps, and no step has the metric."""
    names: set[str] = set()
    for run in runs:
        for row in series.steps(run):
            names |= {key for key, value in row.items() if isinstance(value, (int, float))}
    if names and metric not in names:
        raise invalid("--metric", metric, "no step of these runs has it", sorted(names - {"t", "step"}))


def draw(comparison: Comparison, curves: Sequence[MetricCurve], title: str, out: Path) -> Path | None:
    """Draw a line for every group of seeds; returns the picture, None where no run has a step."""
    empty = [run.run for run, curve in zip(comparison.runs, curves, strict=True) if not curve.steps]
    if empty:
        print_note(f"without steps, and so not in the picture: {', '.join(empty)}")
    if len(empty) == len(curves):
        return None
    from libra_hpc.pictures.study_charts import MOST_LINES, draw_comparison

    lines = []
    for group in comparison.groups:
        drawn = [place for place in group.members if curves[place].steps]
        if drawn:
            label = words(group.values) or comparison.runs[drawn[0]].run
            seeds = f" ({len(drawn)} seeds)" if len(drawn) > 1 else ""
            lines.append((f"{label}{seeds}", [curves[place] for place in drawn]))
    if len(lines) > MOST_LINES:
        print_note(f"the picture has the first {MOST_LINES} of {len(lines)} lines")
    try:
        with busy("drawing"):
            draw_comparison(lines, comparison.metric, title, out)
    except UserError as error:
        print_note(f"no picture: {error}")
        return None
    return out


def words(values: Mapping[str, Any]) -> str:
    """Settings in one line: ``lr=3e-6, seed=0``."""
    labels = short_keys(list(values))
    return ", ".join(f"{labels[key]}={value_text(value)}" for key, value in values.items())


def value_text(value: object) -> str:
    """A value of the configuration as in a run file; a missing one as ``-``."""
    if value is None:
        return "-"
    # 1e-06 is shown as it is written in a run file.
    return value if isinstance(value, str) and value else json_text.dumps(value).replace("e-0", "e-")


def settings_table(comparison: Comparison, states: Sequence[str]) -> Table:
    """Number, name, state, progress and settings of every run."""
    made = table("#>", "run~", "state", "step>", "differs in~")
    for number, (run, state) in enumerate(zip(comparison.runs, states, strict=True), start=1):
        step = f"{run.steps}/{run.steps_wanted}"
        how = Text.assemble(state_text(state), dry_run(run.speedup))
        made.add_row(str(number), run.run, how, step, words(run.values) or "nothing")
    return made


def results_table(comparison: Comparison) -> Table:
    """Results by the number of the run; at most 80 columns."""
    heads = [f"{comparison.metric}>~", "best>~" if comparison.metric == REWARD else "highest>~", "s/step>", "tokens/s>"]
    made = table("#>", *heads, *(f"{one.head}>" for one in compared()), "failed>", "time>", "GPU h>")
    for number, run in enumerate(comparison.runs, start=1):
        made.add_row(
            str(number),
            number_text(run.last),
            number_text(run.highest),
            number_text(run.step_s, ",.2f"),
            number_text(run.tokens_per_s, ",.0f"),
            *(cell(one, run.numbers[one.name]).value for one in compared()),
            str(run.failed_attempts),
            duration(run.wall_s) if run.wall_s else "-",
            f"{run.gpu_hours:,.2f}",
        )
    return made


def seeds_table(comparison: Comparison) -> Table:
    """Medians over the seeds of every setting, the highest metric first."""
    heads = ("setting~", "seeds>", f"{comparison.metric}>", "lowest>", "highest>", "s/step>")
    made = table(*heads, title="median over seeds", title_justify="left", title_style="dim")
    for group in sorted(comparison.groups, key=lambda group: -group.last[1] if group.last else float("inf")):
        low, middle, high = group.last or (None, None, None)
        seeds = ",".join(value_text(comparison.runs[place].values.get(SEED)) for place in group.members)
        made.add_row(
            words(group.values) or "all runs",
            seeds if len(seeds) <= 12 else str(len(group.members)),
            *(number_text(value) for value in (middle, low, high)),
            number_text(group.step_s, ".2f"),
        )
    return made


def as_facts(comparison: Comparison, states: Sequence[str]) -> dict[str, Any]:
    """All that is compared, as JSON."""
    facts: dict[str, Any] = msgspec.to_builtins(comparison)
    facts["runs"] = [as_json(run) | {"state": state} for run, state in zip(comparison.runs, states, strict=True)]
    return facts


def number_text(value: float | None, form: str = "") -> str:
    """A number in a table, without ``form`` to a thousandth or, from 1000 on, whole; None as ``-``."""
    return "-" if value is None else format(value, form or (".3f" if abs(value) < 1000.0 else ",.0f"))
