"""`libra-hpc trace`: inspect a trace, convert it to the project's own format, or generate one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import typer

from libra_hpc.traces import profiles, read
from libra_hpc.traces.describe import TAIL, Description, Spread, describe
from libra_hpc.traces.generate import Dials, generate

from .output import busy, narrow_table, print_json, print_line, print_note, show
from .runs import JsonOption

app = typer.Typer(no_args_is_help=True)
DEFAULTS = Dials()
SHOWN_TOOLS, SHOWN_OUTCOMES = 12, 6
"""Tools of the table, and outcomes of a tool; further tools are summed up in its last row (all are in the JSON)."""

FileArgument = Annotated[
    Path, typer.Argument(metavar="FILE", help="Trace, gzip or not; or a folder of kv-cache-tester documents.")
]
OutArgument = Annotated[Path, typer.Argument(metavar="OUT", help="File to write; compressed if it ends in .gz.")]
FormatOption = Annotated[
    str, typer.Option("--format", metavar="NAME", help=f"One of {', '.join((read.AUTO, *read.READERS))}.")
]
SkipOption = Annotated[bool, typer.Option("--skip-bad", help="Pass over lines that cannot be read, and count them.")]
LimitOption = Annotated[int | None, typer.Option("--limit", metavar="N", help="Only the first N trajectories.")]


@app.command("inspect")
def inspect(
    file: FileArgument,
    format: FormatOption = read.AUTO,
    skip_bad: SkipOption = False,
    limit: LimitOption = None,
    json: JsonOption = False,
) -> None:
    """Show counts, quantiles and the tail."""
    found = load(file, format, skip_bad, limit)
    with busy("analysing"):
        description = describe(found.trajectories)
    if json:
        facts = {"file": str(file), "format": found.format, "bad_lines": len(found.bad)}
        print_json({**facts, "description": msgspec.to_builtins(description)})
    else:
        show_description(file, found.format, description)


@app.command("convert")
def convert(
    file: Annotated[Path, typer.Argument(metavar="IN", help="Trace of any format, gzip or not.")],
    out: OutArgument,
    format: FormatOption = read.AUTO,
    skip_bad: SkipOption = False,
    limit: LimitOption = None,
    json: JsonOption = False,
) -> None:
    """Write a trace in the project's own format."""
    found = load(file, format, skip_bad, limit)
    with busy("writing"):
        read.write_trace(out, found.trajectories)
    if json:
        print_json(
            {
                "out": str(out),
                "format": found.format,
                "bad_lines": len(found.bad),
                "trajectories": len(found.trajectories),
            }
        )
    else:
        print_line(f"{out}: {len(found.trajectories):,} trajectories from {found.format}")


@app.command("generate")
def generate_trace(
    out: OutArgument,
    preset: Annotated[str, typer.Option(metavar="NAME", help=f"Kind of work: {', '.join(profiles.PROFILES)}.")] = "r2e",
    trajectories: Annotated[
        int, typer.Option(metavar="N", help="A multiple of group * epochs.")
    ] = DEFAULTS.trajectories,
    group: Annotated[int, typer.Option(metavar="N", help="Samples of a prompt.")] = DEFAULTS.group,
    turns: Annotated[
        float | None, typer.Option(metavar="X", help="Mean turns; default: the preset's.")
    ] = DEFAULTS.turns,
    sibling: Annotated[
        float, typer.Option(metavar="0..1", help="Share of the variance of the log length that the prompt explains.")
    ] = DEFAULTS.sibling,
    outcome: Annotated[
        float, typer.Option(metavar="0..1", help="Correlation of tool outcomes with what remains.")
    ] = DEFAULTS.outcome,
    drift: Annotated[
        float, typer.Option(metavar="X", help="Typical length at the end of the trace over that at its start.")
    ] = DEFAULTS.drift,
    epochs: Annotated[int, typer.Option(metavar="N", help="How often each prompt comes.")] = DEFAULTS.epochs,
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
        epochs=epochs,
        turns=turns,
        max_context=max_context,
    )
    with busy("generating"):
        made = generate(preset, dials)
        read.write_trace(out, made)
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


def load(file: Path, format: str, skip_bad: bool, limit: int | None) -> read.Trace:
    """Read a trace, and print skipped lines on stderr."""
    with busy("reading"):
        found = read.read_trace(file, format, skip_bad, limit)
    if found.bad:
        print_note(f"passed over {len(found.bad)} bad lines, the first: {found.bad[0]}")
    return found


def show_description(file: Path, format: str, what: Description) -> None:
    """Print counts and quantiles."""
    groups = f"{what.groups:,} with siblings" if what.groups else "no siblings"
    print_line(f"{file} ({format})")
    print_line(
        f"{what.trajectories:,} trajectories of {what.prompts:,} prompts ({groups}),\n{what.turns_total:,} turns,"
        f" {what.generated_total:,} generated tokens"
    )
    reward = "" if what.mean_reward is None else f"; mean reward {what.mean_reward:.3f}"
    print_line(f"the longest {TAIL:.0%} of them generate {what.tail_share:.0%} of the tokens{reward}")
    table = narrow_table("per trajectory, turn or call", "p50>", "p90>", "p99>", "max>", "mean>")
    rows = {
        "turns": what.turns,
        "generated tokens": what.generated,
        "generated tokens of a turn": what.generated_per_turn,
        "prompt tokens": what.prompt_tokens,
        "context at the end": what.context,
        "tokens a tool returns": what.payload,
        "seconds of a tool call": what.tool_s,
    }
    for name, spread in rows.items():
        table.add_row(name, *_cells(spread))
    show(table)
    if not what.tools:
        return
    table = narrow_table("tool", "calls>", "p50 s>", "p90 s>", "p99 s>", "outcomes~")
    for use in what.tools[:SHOWN_TOOLS]:
        outcomes = (
            ", ".join(f"{name} {count / use.calls:.0%}" for name, count in list(use.outcomes.items())[:SHOWN_OUTCOMES])
            or "-"
        )
        table.add_row(
            use.tool,
            f"{use.calls:,}",
            *(_number(value) for value in (use.seconds.p50, use.seconds.p90, use.seconds.p99)),
            outcomes,
        )
    rest = what.tools[SHOWN_TOOLS:]
    if rest:
        table.add_row(f"{len(rest)} more", f"{sum(use.calls for use in rest):,}", "", "", "", "")
    show(table)


def _cells(spread: Spread | None) -> list[str]:
    if spread is None:
        return ["-"] * 5
    return [_number(value) for value in (spread.p50, spread.p90, spread.p99, spread.most, spread.mean)]


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.3g}"
