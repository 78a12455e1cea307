"""`libra-hpc calibrate train`: measure training steps of one replica, for `planner.train_speed`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import typer

from libra_hpc.annexes.calibrate.measure_training import measure_training
from libra_hpc.config.run import RunConfig
from libra_hpc.errors import invalid
from libra_hpc.models.architecture import check_parallel, read_shape
from libra_hpc.models.devices import device as known_device
from libra_hpc.models.memory import TrainLayout
from libra_hpc.models.shapes import DTYPE_BYTES, model_shape
from libra_hpc.models.step_times.train_speed import TrainSpeed, save_speed
from libra_hpc.planning.measured_train_speed import speed_of

from .check import site_config
from .job_wait import on_a_node
from .output import busy, print_json, print_line, show, table
from .runs import JsonOption

START_MINUTES = 20
"""Minutes of the job besides the steps: imports from a cold file system, and the replica's start."""


def train(
    model: Annotated[Path, typer.Option(metavar="FOLDER", help="Model folder; its config.json is enough.")],
    out: Annotated[Path, typer.Option("-o", "--out", metavar="FILE", help="File to write.")],
    tp: Annotated[int, typer.Option(min=1, metavar="N", help="Tensor-parallel devices.")] = 1,
    pp: Annotated[int, typer.Option(min=1, metavar="N", help="Pipeline stages.")] = 1,
    seconds: Annotated[float, typer.Option(min=1, metavar="S", help="Seconds of steps.")] = 120.0,
    name: Annotated[
        str, typer.Option("--name", metavar="NAME", help="Device that the planner knows; default: of the site profile.")
    ] = "",
    devices: Annotated[Path | None, typer.Option(metavar="FILE", help="TOML file with further devices.")] = None,
    micro_tokens: Annotated[
        int | None, typer.Option(min=64, metavar="N", help="Tokens of a micro-batch; default: train.micro_tokens.")
    ] = None,
    here: Annotated[bool, typer.Option("--here", help="Measure on this machine instead of in a job.")] = False,
    json: JsonOption = False,
) -> None:
    """Measure training steps of one replica on a train node, against the planner's cost model."""
    config = _configured(model, tp, pp, micro_tokens)
    shape = read_shape(model)
    check_parallel(shape, tp, pp)
    if not out.absolute().parent.is_dir():
        raise invalid("--out", str(out), "no such folder", "a file in a folder that exists")
    called = name or config.planner.device or config.components.train.gpu_type
    if not called:
        raise invalid("--name", "", "the cost model has to know the device", "a name such as a800, see --devices")
    listed = devices or (Path(config.planner.devices) if config.planner.devices else None)
    found = known_device(called, listed)
    if here:
        with busy("starting") as status:
            measured = measure_training(config, seconds, status.update)
    else:
        minutes = START_MINUTES + round(seconds / 60)
        if 0 < config.components.train.gpus < tp * pp:
            raise invalid(
                "--tp, --pp",
                f"{tp}, {pp}",
                "a train node has fewer GPUs",
                f"a product up to {config.components.train.gpus}",
            )
        measured = on_a_node(
            measure_training,
            config,
            seconds,
            config=config,
            component="train",
            name="libra-calibrate",
            time_limit=f"{minutes // 60:02}:{minutes % 60:02}:00",
        )
    planned = msgspec.structs.replace(model_shape(str(model)), dtype_bytes=DTYPE_BYTES[config.model.dtype])
    layout = TrainLayout(tp, pp, 1, 1, 1, config.train.micro_tokens, config.train.recompute)
    speed = speed_of(planned, found, layout, measured)
    save_speed(speed, out)
    if json:
        print_json({"out": str(out), **msgspec.to_builtins(speed)})
    else:
        show_speed(out, speed)


def show_speed(out: Path, speed: TrainSpeed) -> None:
    """Print the measured batches as a table."""
    print_line(f"{out}: {speed.model} as {speed.layout} on {speed.device}")
    made = table("trajectories>~", "tokens each>~", "steps>~", "measured, s>~", "predicted, s>~", "factor>~")
    for s in speed.samples:
        cells = (f"{s.seconds:.3g}", f"{s.predicted:.3g}", f"{s.seconds / s.predicted:.3g}")
        made.add_row(f"{s.trajectories:,}", f"{s.context:,}", str(s.steps), *cells)
    show(made)
    print_line(f"{speed.tokens_s:,.0f} tokens/s, {speed.mfu:.2%} MFU, factor {speed.factor:.3g}")
    print_line(f"use it with: libra-hpc plan RUN.toml -o planner.train_speed={out}")


def _configured(model: Path, tp: int, pp: int, micro_tokens: int | None) -> RunConfig:
    """The site profile with the replica to measure."""
    values: dict[str, object] = {"model.path": str(model.absolute()), "train.tp": tp, "train.pp": pp}
    if micro_tokens is not None:
        values["train.micro_tokens"] = micro_tokens
    return site_config(values)
