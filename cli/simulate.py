"""`libra-hpc simulate`: replay a trace on simulated engines and compare scheduling policies."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich import box
from rich.table import Table
from rich.text import Text

from libra_hpc.errors import UserError, invalid
from libra_hpc.facts.status import short_count
from libra_hpc.models.shapes import KV_ELEMENT_BYTES
from libra_hpc.pictures.study_charts import draw_simulations
from libra_hpc.policies.scheduling.registry import policy_class, policy_names
from libra_hpc.protocol.trace import TrajectoryRecord
from libra_hpc.simulator.compare import FIELD, Compared, compare
from libra_hpc.simulator.engine.simulated_engines import build_engines
from libra_hpc.simulator.settings import SimulationSettings
from libra_hpc.traces.cut import cut_at
from libra_hpc.user_file import FORM

from .output import busy, picture_file, print_json, print_line, print_note, show
from .runs import JsonOption
from .trace import FileArgument, SkipOption, load

DEFAULTS = SimulationSettings()
POLICIES = f"Of {', '.join(policy_names())} and {FORM}."
LEGEND = """p50, p95, p99: from a trajectory's start to its end; moves: turns on another
engine than before; re-prefill: tokens computed again; idle: share of the GPUs'
time; x best: makespan over the shortest one"""
"""Under the table."""


def simulate(
    file: FileArgument,
    gpus: Annotated[int, typer.Option(min=0, metavar="N", help="Buckets are repeated; 0: the buckets' own.")] = 0,
    device: Annotated[str, typer.Option(metavar="NAME", help="GPU, e.g. a800, h200.")] = "a800",
    model: Annotated[str, typer.Option(metavar="NAME|FOLDER", help="Known model, or its folder.")] = "qwen3-14b",
    buckets: Annotated[str, typer.Option(metavar="LIST", help="Engines by TP degree.")] = "4xTP1,2xTP2,2xTP4",
    policy: Annotated[str, typer.Option(metavar="LIST", help=POLICIES)] = "cmlfq,least_loaded,sticky",
    batch_groups: Annotated[int, typer.Option(min=0, metavar="N", help="Groups of a training step; 0: all.")] = 0,
    eta: Annotated[int, typer.Option(min=0, metavar="N", help="Staleness bound, with --batch-groups.")] = 0,
    train_s: Annotated[float, typer.Option(min=0, metavar="S", help="Seconds of a training step.")] = 0.0,
    sync_s: Annotated[float, typer.Option(min=0, metavar="S", help="Pause of an engine for new weights.")] = 0.0,
    max_num_seqs: Annotated[int, typer.Option(min=1, metavar="N", help="Sequences of a step.")] = DEFAULTS.max_num_seqs,
    max_inflight: Annotated[int, typer.Option(min=1, metavar="N", help="Turns of an engine.")] = DEFAULTS.max_inflight,
    seats: Annotated[int, typer.Option(min=0, metavar="N", help="Most trajectories at once; 0: all.")] = 0,
    max_context: Annotated[int, typer.Option(min=0, metavar="TOKENS", help="Where trajectories end; 0: no cut.")] = 0,
    kv_dtype: Annotated[str, typer.Option(metavar="TYPE", help=f"Of {', '.join(KV_ELEMENT_BYTES)}.")] = "auto",
    async_steps: Annotated[bool, typer.Option(help="Form a step during the one before.")] = True,
    calibration: Annotated[Path | None, typer.Option(metavar="FILE", help="Measured step times.")] = None,
    devices: Annotated[Path | None, typer.Option(metavar="FILE", help="TOML file with further devices.")] = None,
    seed: Annotated[int, typer.Option(metavar="N", help="Order of the groups; 0: as in the trace.")] = 0,
    skip_bad: SkipOption = False,
    plot: Annotated[Path | None, typer.Option(metavar="SVG", callback=picture_file, help="Draw the runs.")] = None,
    json: JsonOption = False,
) -> None:
    names = named_policies(policy)
    settings = SimulationSettings(
        max_num_seqs=max_num_seqs,
        max_inflight=max_inflight,
        async_steps=async_steps,
        batch_groups=batch_groups,
        eta=eta,
        seats=seats,
        train_s=train_s,
        sync_s=sync_s,
        seed=seed,
        max_model_len=max_context,
    )
    check_steps(settings)
    built = build_engines(
        buckets,
        gpus,
        device,
        model,
        calibration=calibration,
        devices_file=devices,
        kv_dtype=kv_dtype,
        longest=max_context,
        async_steps=async_steps,
    )
    work = within(load(file, skip_bad), max_context)
    with busy("simulating") as status:
        done = compare(work, built.engines, names, settings, lambda name: status.update(f"simulating {label(name)}"))
    note_empty(done, seats, built.empty, gpus)
    what = f"{built.gpus} x {device}, {model}"
    if plot is not None:
        draw_simulations({label(name): one.result for name, one in done.items()}, f"{file.name}: {what}", plot)
    if json:
        facts = {"trace": str(file), "gpus": built.gpus, "device": device, "model": model, "buckets": buckets}
        print_json({**facts, "source": built.source, "policies": as_json(done)})
    else:
        show_work(file, work)
        show(Text(f"{what}: {len(built.engines)} engines ({buckets}); step times: {built.source}"))
        show(table(done))
        print_line(LEGEND)


def check_steps(settings: SimulationSettings) -> None:
    """Raise `UserError` for options of training steps that have no meaning."""
    if settings.eta and not settings.batch_groups:
        raise UserError(
            f"--eta = {settings.eta}: without --batch-groups there are no training steps to be stale against."
        )
    for option, value in (("--train-s", settings.train_s), ("--sync-s", settings.sync_s)):
        if not math.isfinite(value):
            raise invalid(option, value, "not a finite number", "a number >= 0")


def show_work(file: Path, work: Sequence[TrajectoryRecord]) -> None:
    """Print how much there is to generate."""
    turns, generated = sum(len(one.turns) for one in work), sum(one.generated for one in work)
    print_line(f"{file}: {len(work):,} trajectories, {turns:,} turns, {generated:,} generated tokens")


def as_json(done: dict[str, Compared]) -> dict[str, dict[str, Any]]:
    """The results, and each makespan over the shortest one."""
    shortest = shortest_s(done)
    return {
        name: {
            **msgspec.to_builtins(one.result),
            "computed_s": one.computed_s,
            "ratio_to_best": one.result.makespan_s / shortest,
        }
        for name, one in done.items()
    }


def shortest_s(done: dict[str, Compared]) -> float:
    """The shortest makespan."""
    return min(one.result.makespan_s for one in done.values())


def note_empty(done: dict[str, Compared], seats: int, empty: int, gpus: int) -> None:
    """Note the wait for a seat under each policy, and GPUs without an engine."""
    for name, one in done.items() if seats else ():
        print_note(f"{label(name)}: a trajectory waits {one.result.seat_wait_s:,.1f} s for one of {seats:,} seats")
    if empty:
        print_note(f"{empty} of {gpus} GPUs stay empty: they do not fill another pattern of engines")


def named_policies(text: str) -> list[str]:
    """Policies of a comma-separated list, each once, in the order given; raises `UserError` for an unknown one."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise invalid(FIELD, text, "no policy is named", "one or more policies, separated by commas")
    for name in names:
        policy_class(name, FIELD)
    return list(dict.fromkeys(names))


def label(name: str) -> str:
    """A policy's name in the table: of one in a file the class."""
    return name.rpartition(":")[2]


def within(work: Sequence[TrajectoryRecord], max_context: int) -> list[TrajectoryRecord]:
    """The trajectories, ended at ``max_context`` unless it is 0; raises `UserError` where no prompt has room."""
    if not max_context:
        return list(work)
    cut = cut_at(work, max_context)
    if not cut.trajectories:
        raise invalid("--max-context", max_context, "no prompt of the trace leaves room for an answer", "more tokens")
    if cut.shortened or cut.left_out:
        print_note(
            f"{cut.shortened:,} of {len(work):,} trajectories end at --max-context {max_context:,}"
            + (f"; {cut.left_out:,} are left out, their prompts leave no room" if cut.left_out else "")
        )
    return cut.trajectories


def table(done: dict[str, Compared]) -> Table:
    """One row a policy; that of the shortest makespan is marked."""
    shortest = shortest_s(done)
    # Headings of two lines and one space between columns: ten columns in 80.
    out = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 0), show_edge=False)
    out.add_column("policy", no_wrap=True, vertical="bottom")
    headings = ("makespan s", "tokens\n/s", "p50 s", "p95 s", "p99 s", "moves", "re-\nprefill", "idle", "x\nbest")
    for heading in headings:
        out.add_column(heading, justify="right", no_wrap=True, vertical="bottom")
    for name, one in done.items():
        result, ends = one.result, one.result.completion
        out.add_row(
            label(name),
            f"{result.makespan_s:,.1f}",
            f"{result.tokens_per_s:,.0f}",
            *(f"{q:,.1f}" if q < 1000 else f"{q:,.0f}" for q in (ends.p50, ends.p95, ends.p99)),
            f"{result.moves:,}",
            short_count(result.reprefilled_tokens),
            f"{result.idle_share:.0%}",
            f"{result.makespan_s / shortest:.3f}",
            style="green" if result.makespan_s == shortest else "",
        )
    return out
