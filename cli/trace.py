"""`libra-hpc trace`: inspect a trace, or generate one; what each node of a run was to be, and was."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from msgspec.structs import asdict, replace

from libra_hpc.errors import UserError
from libra_hpc.facts.layout_log import replay
from libra_hpc.protocol.trace import TrajectoryRecord
from libra_hpc.traces import profiles
from libra_hpc.traces.describe import TAIL, Description, describe
from libra_hpc.traces.generate import Dials, generate
from libra_hpc.traces.read import read_trace, write_trace

from .output import busy, narrow_table, print_json, print_line, print_note, show
from .runs import RUNS, JsonOption, RunArgument, RunsOption, find_run

app = typer.Typer(no_args_is_help=True)
DEFAULTS = Dials()
SHOWN_TOOLS, SHOWN_OUTCOMES = 12, 6
"""Tools of the table, and outcomes of a tool; further tools are summed up in its last row (all are in the JSON)."""

FileArgument = Annotated[Path, typer.Argument(metavar="FILE", help="Trace, gzip or not.")]
OutArgument = Annotated[Path, typer.Argument(metavar="OUT", help="File to write; compressed if it ends in .gz.")]
SkipOption = Annotated[bool, typer.Option("--skip-bad", help="Pass over lines that cannot be read, and count them.")]


@app.command("inspect")
def inspect(file: FileArgument, skip_bad: SkipOption = False, json: JsonOption = False) -> None:
    """Show counts, quantiles and the tail."""
    found = load(file, skip_bad)
    with busy("analysing"):
        description = describe(found)
    if json:
        print_json({"file": str(file), "description": msgspec.to_builtins(description)})
    else:
        show_description(file, description)


@app.command("generate")
def generate_trace(
    out: OutArgument,
    preset: Annotated[str, typer.Option(metavar="NAME", help=f"Kind of work: {', '.join(profiles.PROFILES)}.")] = "r2e",
    trajectories: Annotated[int, typer.Option(metavar="N", help="A multiple of group.")] = DEFAULTS.trajectories,
    group: Annotated[int, typer.Option(metavar="N", help="Samples of a prompt.")] = DEFAULTS.group,
    sibling: Annotated[
        float, typer.Option(metavar="0..1", help="Share of the variance of the log length that the prompt explains.")
    ] = DEFAULTS.sibling,
    outcome: Annotated[
        float, typer.Option(metavar="0..1", help="Correlation of tool outcomes with what remains.")
    ] = DEFAULTS.outcome,
    drift: Annotated[
        float, typer.Option(metavar="X", help="Typical length at the end of the trace over that at its start.")
    ] = DEFAULTS.drift,
    max_context: Annotated[
        int, typer.Option(metavar="TOKENS", help="Where a trajectory is cut.")
    ] = DEFAULTS.max_context,
    seed: Annotated[int, typer.Option(metavar="N", help="Same seed, same trace.")] = DEFAULTS.seed,
    json: JsonOption = False,
) -> None:
    """Generate a trace with known structure."""
    dials = Dials(
        trajectories=trajectories,
        group=group,
        seed=seed,
        sibling=sibling,
        outcome=outcome,
        drift=drift,
        max_context=max_context,
    )
    with busy("generating"):
        made = generate(preset, dials)
        write_trace(out, made)
    facts = {
        "trajectories": len(made),
        "turns": sum(len(one.turns) for one in made),
        "generated_tokens": sum(one.generated for one in made),
    }
    if json:
        print_json({"out": str(out), "preset": preset, **facts})
    else:
        print_line(
            f"{out}: {facts['trajectories']:,} trajectories, {facts['turns']:,} turns, {facts['generated_tokens']:,}"
            " generated tokens"
        )


@app.command("layouts")
def layouts(
    run: RunArgument = None,
    runs: RunsOption = Path(RUNS),
    at: Annotated[float, typer.Option(metavar="T", help="Epoch seconds; default: now.")] = math.inf,
    json: JsonOption = False,
) -> None:
    """Show what each node of a run was to be, and was."""
    found, shown = find_run(run, runs), None
    for one in replay(found):
        if one.t <= at:
            shown = one
    if shown is None:
        raise UserError(f"{found.layouts} has no Layout" + f" up to {at}." * math.isfinite(at))
    layout, ways = shown.layout, shown.ways
    if layout.number != shown.number:
        print_note(f"{found.layouts}: lines before number {shown.number} are missing; number {layout.number} is shown")
    if json:
        nodes = {rank: {**asdict(row), "way": ways.get(rank)} for rank, row in layout.rows.items()}
        print_json({"t": shown.t, **msgspec.to_builtins(replace(layout, rows={})), "rows": nodes})
        return
    alike = dict[tuple[str, ...], list[int]]()
    for rank, row in layout.rows.items():
        member = "yes" if row.member else ""
        kind: tuple[str, ...] = (row.state, row.active or "", row.drain, member, str(row.starts), ways.get(rank, ""))
        alike.setdefault(kind, []).append(rank)
    print_line(
        f"number {layout.number}, since {shown.t:.3f}; generation {layout.generation}, step {layout.recorded} recorded"
        + (f"; to stop: {layout.stop.reason}" if layout.stop else "")
    )
    table = narrow_table("count>", "was", "to be awake", "drain", "member", "starts>", "by", "nodes~")
    for kind, ranks in alike.items():
        table.add_row(f"{len(ranks):,}", *kind, spans(ranks))
    show(table)


def spans(ranks: Sequence[int]) -> str:
    """Sorted numbers in words: ``1, 3-5``."""
    parts = [[rank for _, rank in part] for _, part in groupby(enumerate(ranks), lambda one: one[1] - one[0])]
    return ", ".join(f"{part[0]}-{part[-1]}" if len(part) > 1 else str(part[0]) for part in parts)


def load(file: Path, skip_bad: bool) -> list[TrajectoryRecord]:
    """Read a trace, and print skipped lines on stderr."""
    with busy("reading"):
        found, bad = read_trace(file, skip_bad)
    if bad:
        print_note(f"passed over {len(bad)} bad lines, the first: {bad[0]}")
    return found


def show_description(file: Path, what: Description) -> None:
    """Print counts and quantiles."""
    groups = f"{what.groups:,} with siblings" if what.groups else "no siblings"
    reward = "" if what.mean_reward is None else f"; mean reward {what.mean_reward:.3f}"
    print_line(
        f"{file}\n{what.trajectories:,} trajectories of {what.prompts:,} prompts ({groups}),\n{what.turns:,} turns,"
        f" {what.generated:,} generated tokens\nthe longest {TAIL:.0%} of them generate {what.tail_share:.0%} of the"
        f" tokens{reward}"
    )
    table = narrow_table("per trajectory, turn or call", "p50>", "p90>", "p99>", "max>", "mean>")
    for name, of in what.spreads.items():
        table.add_row(name, *map(_number, (of.p50, of.p90, of.p99, of.most, of.mean)))
    show(table)
    if not what.tools:
        return
    table = narrow_table("tool", "calls>", "p50 s>", "p90 s>", "p99 s>", "outcomes~")
    uses = list(what.tools.items())
    for tool, use in uses[:SHOWN_TOOLS]:
        shares = [f"{name} {count / use.calls:.0%}" for name, count in list(use.outcomes.items())[:SHOWN_OUTCOMES]]
        seconds = map(_number, (use.seconds.p50, use.seconds.p90, use.seconds.p99))
        table.add_row(tool, f"{use.calls:,}", *seconds, ", ".join(shares) or "-")
    if rest := uses[SHOWN_TOOLS:]:
        table.add_row(f"{len(rest)} more", f"{sum(use.calls for _, use in rest):,}", "", "", "", "")
    show(table)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.3g}"
