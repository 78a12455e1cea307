"""`libra-hpc plan --write`: a row of the table as a run file that `check` and `submit` take."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from libra_hpc.config.node_groups import STAGES
from libra_hpc.config.run import RunConfig
from libra_hpc.errors import invalid
from libra_hpc.planning.initial import row_values, run_file_text
from libra_hpc.planning.request import PlanRequest, PlanResult

from .output import print_note


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
