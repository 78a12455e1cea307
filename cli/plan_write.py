"""`libra-hpc plan --write`: a row of the table as a run file that `check` and `submit` take."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from libra_hpc.config.run import RunConfig
from libra_hpc.errors import invalid
from libra_hpc.planning.initial import row_values, run_file_text
from libra_hpc.planning.request import PlanRequest, PlanResult

from .output import print_note


class Options(NamedTuple):
    """Options of ``plan`` that change the question: what the written run file has to have too; empty: not given."""

    gpus: int = 0
    device: str = ""
    devices: str = ""
    model: str = ""
    trace: str = ""
    train_speed: str = ""

    def over(self, config: RunConfig) -> RunConfig:
        """``config`` with them in its planner section."""
        given = {key: value for key, value in self._asdict().items() if value and key != "gpus"}
        return config.changed(planner=given)


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
    options: Options,
    chosen: tuple[PlanRequest, PlanResult],
) -> None:
    """Write row ``target.row`` of ``chosen``, a question and its answer; raises `UserError`."""
    asked, result = chosen
    rows = len(result.plans)
    if target.row > rows:
        raise invalid("--choose", target.row, f"the table has {rows} rows", f"1 to {rows} (more: --best)")
    values = {**_asked(config, options, asked), **row_values(config, asked.pools, result.plans[target.row - 1])}
    text = run_file_text(run_file, overrides, config, values)
    target.path.write_text(text, encoding="utf-8")
    print_note(f"row {target.row} is in {target.path}; next: libra-hpc check {target.path}")


def _asked(config: RunConfig, options: Options, asked: PlanRequest) -> dict[str, Any]:
    """The options as run-file values."""
    simulated = config.run.engine == "simulated"
    section = "simulated" if simulated else "planner"
    given = {
        f"{section}.device": options.device,
        f"{section}.devices": options.devices,
        "planner.trace": options.trace,
        "planner.train_speed": options.train_speed,
    }
    values: dict[str, Any] = {key: value for key, value in given.items() if value}
    if options.model and simulated:
        values["simulated.model"] = options.model
    elif options.model:
        if not Path(options.model).is_dir():
            raise invalid("--model", options.model, "a run needs the weights", "with --write: a model folder")
        values["model.path"] = options.model
    (first, *others) = asked.pools
    for name in ("train", "hybrid", "rollout"):
        component = getattr(config.components, name)
        # CPU nodes that stand for GPUs in the plan have none.
        if not others and component.gpus != first.node_devices and (options.gpus or simulated):
            values[f"components.{name}.gpus"] = first.node_devices
    return values
