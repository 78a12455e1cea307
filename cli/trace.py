"""`libra-hpc trace`: inspect a trace, or generate one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import typer

from libra_hpc.protocol.trace import TrajectoryRecord
from libra_hpc.traces import profiles
from libra_hpc.traces.describe import TAIL, Description, describe
from libra_hpc.traces.generate import Dials, generate
from libra_hpc.traces.read import read_trace, write_trace

from .output import busy, narrow_table, print_json, print_line, print_note, show
from .runs import JsonOption

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
