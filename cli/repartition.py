"""`libra-hpc repartition`: order another rank layout of a running job, which restarts inside its allocation.

The order is checked here, and again by rank 0, because the run goes on meanwhile.  It is a file in the run directory
(`libra_hpc.protocol.repartition_order`); its answer is an event (`libra_hpc.coordinator.orders`).
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from libra_hpc.config.load import load_resolved, parse_override
from libra_hpc.config.run import RunConfig
from libra_hpc.errors import OperationError, UserError, invalid
from libra_hpc.facts.rundir import RunDir, read_lines
from libra_hpc.facts.status import Status
from libra_hpc.files import write_once
from libra_hpc.preflight.rank_roles import describe, ranks, repartitioned
from libra_hpc.protocol.repartition_order import RepartitionOrder, encode_order, new_order

from . import jobs
from .follow import follow, job_line, wait_silently
from .output import print_json, print_line, print_note, show
from .runs import RUNS, JsonOption, RunsOption, attempt, find_run, job_id, run_names


def repartition(
    run: Annotated[
        str, typer.Argument(metavar="RUN", help="Run folder, its name, or its job id.", autocompletion=run_names)
    ],
    changes: Annotated[
        list[str], typer.Argument(metavar="KEY=VALUE", help="What changes, e.g. train.tp=2 components.train.nodes=2.")
    ],
    wait: Annotated[
        bool,
        typer.Option(
            "--wait",
            help="Follow the run until its first step in the new layout; exit code 1 when the order is refused.",
        ),
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the present and the new layout and order nothing.")
    ] = False,
    json: JsonOption = False,
    runs: RunsOption = Path(RUNS),
) -> None:
    found = find_run(run, runs)
    check_running(found)
    values = dict(parse_override(change, example="train.tp=2") for change in changes)
    before = load_resolved(found.config)
    after = repartitioned(before, values)
    facts: dict[str, Any] = {
        "run": found.name,
        "changes": values,
        "layout": describe(after),
        "ranks": _ranks(before, after),
    }
    order = None if dry_run else send(found, values)
    if order is None:
        print_json({**facts, "order": None}) if json else show(table(before, after))
        return
    if not json:
        show(table(before, after))
        print_line(
            f"{found.name}: ordered; at the next step boundary it saves, and its ranks start again in this layout"
        )
    step = await_answer(found, order, quiet=json) if wait else None
    if json:
        print_json({**facts, "order": order.id, "step": step})
    elif step is not None:
        print_line(f"{found.name}: repartitioned after step {step}")


def check_running(run: RunDir) -> None:
    """Raise `UserError` unless the run is running, by its status and the queue, and waits for no other order."""
    state = jobs.state(run)
    if state.state == "never_queued":
        why = "it was never queued"
    elif state.over:
        why = f"it is over ({job_line(job_id(run), state)})"
    elif state.state != "running":
        why = f"it does not run ({job_line(job_id(run), state)})"
    elif run.order.exists():
        why = f"another layout is ordered already ({run.order.name} waits for its answer)"
    else:
        return
    raise invalid("RUN", run.name, why, "a run whose job is running, and that waits for no other layout")


def send(run: RunDir, values: dict[str, Any]) -> RepartitionOrder:
    """Write the order; raises `UserError` when another one exists or the run directory cannot be written."""
    order = new_order(attempt(run), time.time(), values)
    try:
        if write_once(run.order, encode_order(order)):
            return order
    except OSError as error:
        raise UserError(f"{run.order}: the order cannot be written ({error.strerror}).") from error
    raise invalid("RUN", run.name, "another layout was ordered at the same moment")


def await_answer(run: RunDir, order: RepartitionOrder, *, quiet: bool) -> int:
    """Follow the run until its first step in the new layout; returns the last step before.

    Raises `OperationError` when the order is refused or the run ends.
    """

    def settled(status: Status | None) -> bool:
        answer = _answer(run, order)
        return answer is not None and ("step" not in answer or (status is not None and status.step > answer["step"]))

    try:
        state = (wait_silently if quiet else follow)(run, settled)
    except KeyboardInterrupt:
        print_note(f"the order stands; `libra-hpc status {run.name} --watch` shows what becomes of it")
        raise typer.Exit(130) from None
    answer = _answer(run, order)
    if answer is None:
        raise OperationError(
            f"the run ended ({state.words}) and did not answer the order; the next attempt refuses it."
        )
    if "step" not in answer:
        raise OperationError(f"the order was refused: {answer['reason']}")
    if state.over and state.state != "completed":
        raise OperationError(
            f"the run ended ({state.words}) in the new layout; `libra-hpc submit --resume {run.name} -o KEY=VALUE` goes"
            " on in another one."
        )
    return int(answer["step"])


def table(before: RunConfig, after: RunConfig) -> RenderableType:
    """A table of every rank's present and new role, and other changed values."""
    grid = Table(box=None, pad_edge=False, padding=(0, 2), header_style="dim underline")
    for name in ("rank", "now", "new"):
        grid.add_column(name, justify="right" if name == "rank" else "left", no_wrap=True)
    for rank in _ranks(before, after):
        changed = rank["before"] != rank["after"]
        grid.add_row(str(rank["rank"]), rank["before"], Text(rank["after"], style="bold yellow" if changed else "dim"))
    rest = [
        Text(f"{name}: {old} -> {new}")
        for name, old, new in (
            ("train.processes", before.train.processes, after.train.processes),
            ("train.micro_tokens", before.train.micro_tokens, after.train.micro_tokens),
            ("train.recompute", before.train.recompute, after.train.recompute),
            ("planner.hybrid_start", before.planner.hybrid_start, after.planner.hybrid_start),
        )
        if old != new
    ]
    return Group(grid, *rest)


def _ranks(before: RunConfig, after: RunConfig) -> list[dict[str, Any]]:
    return [
        {"rank": old.rank, "before": str(old), "after": str(new)}
        for old, new in zip(ranks(before), ranks(after), strict=True)
    ]


def _answer(run: RunDir, order: RepartitionOrder) -> dict[str, Any] | None:
    """The event that answers the order: ``repartitioned`` with a step, or ``repartition_refused`` with a reason."""
    answers = [
        event
        for event in read_lines(run.events)
        if event.get("order") == order.id and event.get("kind") != "repartition_ordered"
    ]
    return answers[-1] if answers else None
