"""`libra-hpc plan`: the best split of the nodes, its predicted times, and what does not fit."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
import typer

from libra_hpc.config.load import load_run_file, with_absolute_paths
from libra_hpc.config.node_groups import STAGES
from libra_hpc.config.run import RunConfig
from libra_hpc.config.site import site_profile
from libra_hpc.errors import UserError, invalid
from libra_hpc.files import cache_folder
from libra_hpc.models.devices import Device
from libra_hpc.models.shapes import ModelShape
from libra_hpc.models.step_times.lookup import StepLookup, lookup
from libra_hpc.models.step_times.measured import load
from libra_hpc.models.step_times.steps import StepTimes
from libra_hpc.planning.best_plan import best_plans
from libra_hpc.planning.in_turn import asked_in_turn
from libra_hpc.planning.initial import hybrid_of, planned_pools, row_values, run_file_text
from libra_hpc.planning.measured_train_speed import with_train_speed
from libra_hpc.planning.request import PlanRequest, PlanResult, as_planned, check_gpus, request
from libra_hpc.planning.scaling_curve import ScalingPoint, knee, steps, sweep
from libra_hpc.preflight.checked_run import known_rooms
from libra_hpc.preflight.known_work import known_work

from . import plan_tables
from .config_show import OverrideOption, RunFileArgument
from .output import busy, picture_file, print_json, print_line, print_note, show
from .runs import JsonOption

RANGE = re.compile(r"^(\d+)(?:\.\.(\d+))?$")
MOST_GPUS = 65_536
"""Limit of the exact search, which takes half a minute for a dense model."""


def plan(
    run_file: RunFileArgument,
    override: OverrideOption = [],  # noqa: B006
    gpus: Annotated[str, typer.Option(metavar="N|A..B", help="GPUs, or a range; default: the run file's.")] = "",
    switch_s: Annotated[
        float | None,
        typer.Option("--switch-s", min=0, metavar="S", help="A pair of switches between the stages; default: assumed."),
    ] = None,
    calibration: Annotated[Path | None, typer.Option(metavar="FILE", help="Measured step times of engines.")] = None,
    keep: Annotated[int, typer.Option("--best", min=1, metavar="N", help="Plans to show.")] = 5,
    again: Annotated[bool, typer.Option("--again", help="Search, though an equal plan is kept.")] = False,
    explain: Annotated[bool, typer.Option("--explain", help="Also every term, and all that was excluded.")] = False,
    json: JsonOption = False,
    plot: Annotated[
        Path | None, typer.Option(metavar="SVG", callback=picture_file, help="Draw plans or curve.")
    ] = None,
    write: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the run file with a row's keys.")] = None,
    choose: Annotated[int, typer.Option(min=1, metavar="K", help="With --write: the row, from 1.")] = 1,
    force: Annotated[bool, typer.Option("--force", help="With --write: replace an existing file.")] = False,
) -> None:
    low, high = gpu_range(gpus)
    target = None if write is None else Target(write, choose, force)
    if target is not None:
        check_target(target, swept=low != high)
    config = with_absolute_paths(load_run_file(run_file, override, site_profile()))
    times = measured_steps(calibration)
    asked = question(config, gpus=high, switch_s=switch_s)
    if low != high:
        show_sweep(asked, times, low, high, json=json, plot=plot)
        return
    result = best(asked, keep, times, again)
    if plot is not None:
        from libra_hpc.pictures.study_charts import draw_splits

        draw_splits(result.plans, plan_tables.title(asked), plot)
    if target is not None:
        write_row(target, run_file=run_file, overrides=override, config=config, gpus=high, chosen=(asked, result))
    if json:
        print_json(plan_facts(asked, result))
    else:
        show_plans(asked, result, explain)


def question(config: RunConfig, *, gpus: int = 0, switch_s: float | None = None) -> PlanRequest:
    """What to search, with the pools that a run file can divide; ``gpus``: instead of its nodes."""
    rooms, config = known_rooms(config), as_planned(known_work(config))
    asked = with_train_speed(request(config, gpus=gpus, rooms=rooms), config.planner.train_speed)
    pools = asked.pools if gpus else planned_pools(config, asked.pools)
    asked = msgspec.structs.replace(asked, pools=pools, hybrid=hybrid_of(config, pools))
    if switch_s is None and config.components.split == "auto" and config.planner.time_sharing != "auto":
        # As `submit` asks, which finds this answer kept.
        return asked
    return asked_in_turn(asked, config, switch_s)


def best(asked: PlanRequest, keep: int, steps: StepLookup = lookup, again: bool = False) -> PlanResult:
    """The best plans, with a spinner; those of an equal question of before, unless ``again``."""
    with busy("searching") as status:
        result = best_plans(
            asked,
            steps,
            progress=lambda plays: status.update(f"playing plans: {plays}"),
            cache=cache_folder(),
            again=again,
        )
    return msgspec.structs.replace(result, plans=result.plans[:keep])


def show_plans(asked: PlanRequest, result: PlanResult, explain: bool) -> None:
    """Print the tables of one search."""
    kept = ", a kept plan (--again searches)" if result.kept else ""
    plan_tables.header(asked, plan_tables.steps_from(result.sources) + kept)
    show(plan_tables.plans(asked, result))
    plan_tables.remarks(asked, result)
    plan_tables.shared(asked, result)
    plan_tables.speed(asked, result)
    if explain:
        for table in (
            plan_tables.terms(result),
            plan_tables.memory(asked, result),
            *([plan_tables.excluded(result)] if result.excluded else []),
        ):
            show(table)
    if not explain or not result.excluded:
        plan_tables.nearest(result)


def show_sweep(asked: PlanRequest, times: StepLookup, low: int, high: int, *, json: bool, plot: Path | None) -> None:
    """Compute, print and draw the scaling curve."""
    (pool,) = asked.pools
    check_gpus(low, pool.node_devices)
    with busy("searching"):
        points = sweep(asked, times, steps(low // pool.node_devices, high // pool.node_devices))
    if all(p.plan is None for p in points):
        raise UserError(points[-1].why)
    at = knee(points)
    gpus = None if at is None else points[at].devices
    if plot is not None:
        from libra_hpc.pictures.study_charts import draw_scaling

        curve = [(p.devices, p.plan.tokens_s) for p in points if p.plan is not None]
        draw_scaling(curve, gpus, plan_tables.title(asked, sized=False), plot)
    if json:
        print_json({"request": facts(asked), "points": msgspec.to_builtins(points), "knee": gpus})
        return
    plan_tables.header(asked, "", sized=False)
    show(plan_tables.curve(points, at))
    print_line(knee_words(points, at))


def knee_words(points: list[ScalingPoint], at: int | None) -> str:
    """The knee of the curve in one line."""
    if at is None:
        return (
            "no knee: over the whole range throughput grows about as fast as the number of GPUs, or there are too few"
            " points"
        )
    return f"knee at {points[at].devices} GPUs: beyond, a further GPU brings less than the average one of this range"


def measured_steps(calibration: Path | None) -> StepLookup:
    """Step times from a calibration file for its TP degrees, from `lookup` for others; raises `UserError`."""
    if calibration is None:
        return lookup
    degrees = load(calibration).kv_capacity

    def times(device: Device, shape: ModelShape, tp: int) -> StepTimes:
        return lookup(device, shape, tp, calibration if tp in degrees else None)

    return times


def gpu_range(text: str) -> tuple[int, int]:
    """``""`` -> (0, 0), ``"48"`` -> (48, 48), ``"16..128"`` -> (16, 128); raises `UserError`."""
    if not text:
        return 0, 0
    match = RANGE.match(text)
    if match is None:
        raise invalid("--gpus", text, "malformed", "a number such as 48 or a range such as 16..128")
    low, high = int(match[1]), int(match[2] or match[1])
    if low > high or low < 1:
        raise invalid("--gpus", text, "an empty range", "a range from fewer to more GPUs, such as 16..128")
    if high > MOST_GPUS:
        raise invalid("--gpus", text, "too many to search through", f"at most {MOST_GPUS}")
    return low, high


def facts(asked: PlanRequest) -> dict[str, object]:
    """The request as plain data, for ``--json``."""
    speed = {"train_speed": asked.train_speed, "train_factor": asked.train_factor}
    return {**asked.facts(), **speed, "notes": list(asked.notes)}


def plan_facts(asked: PlanRequest, result: PlanResult) -> dict[str, Any]:
    """The plans as plain data."""
    return {"request": facts(asked), **msgspec.to_builtins(result)}


class Target(NamedTuple):
    """The file to write and the row to choose, from 1."""

    path: Path
    row: int
    force: bool


def check_target(target: Target, *, swept: bool) -> None:
    """Raise `UserError` for what can be refused before the search."""
    if swept:
        raise invalid("--write", str(target.path), "a range of --gpus has no one plan", "one number of GPUs")
    if target.path.exists() and not target.force:
        raise invalid("--write", str(target.path), "the file exists", "another name, or --force")
    if not target.path.absolute().parent.is_dir():
        raise invalid("--write", str(target.path), "no such folder", "a file in a folder that exists")


def write_row(
    target: Target,
    *,
    run_file: Path,
    overrides: Sequence[str],
    config: RunConfig,
    gpus: int,
    chosen: tuple[PlanRequest, PlanResult],
) -> None:
    """Write row ``target.row`` of ``chosen``, a question (of so many ``gpus``) and its answer; raises `UserError`."""
    asked, result = chosen
    rows = len(result.plans)
    if target.row > rows:
        raise invalid("--choose", target.row, f"the table has {rows} rows", f"1 to {rows} (more: --best)")
    values = {**_node_gpus(config, gpus, asked), **row_values(config, asked.pools, result.plans[target.row - 1])}
    text = run_file_text(run_file, overrides, config, values)
    target.path.write_text(text, encoding="utf-8")
    print_note(f"row {target.row} is in {target.path}; next: libra-hpc check {target.path}")


def _node_gpus(config: RunConfig, gpus: int, asked: PlanRequest) -> dict[str, Any]:
    """GPUs of a node, where the plan is of others than the run file's."""
    (first, *others) = asked.pools
    # CPU nodes that stand for GPUs in the plan have none.
    if others or not (gpus or config.run.engine == "simulated"):
        return {}
    own = {name: getattr(config.components, name).gpus for name in STAGES}
    return {f"components.{name}.gpus": first.node_devices for name in STAGES if own[name] != first.node_devices}
