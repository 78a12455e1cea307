"""`libra-hpc calibrate`: write a file of what a model takes on this hardware.

- ``train``: training steps of one replica, for `planner.train_speed`.
- ``engine``: engine step times, for `simulate --calibration`.
- ``engine --model``: start an engine on a rollout node, in a job, or with ``--here`` on this machine, and measure it.
- ``engine --run``: take the steps that a run recorded (``rollout.record_steps``), of all engines under a real workload.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, cast

import msgspec
import typer

from libra_hpc.annexes.calibrate import measure_steps
from libra_hpc.annexes.calibrate.measure_steps import earlier, merged, with_host_cost, write_host_cost
from libra_hpc.annexes.calibrate.measure_training import measure_training
from libra_hpc.config.run import RunConfig
from libra_hpc.engine.settings import EngineConfig, alone, check_config
from libra_hpc.engine.steplog import recorded
from libra_hpc.errors import invalid
from libra_hpc.models.architecture import check_parallel, read_shape
from libra_hpc.models.devices import device as listed_device
from libra_hpc.models.memory import TrainLayout
from libra_hpc.models.shapes import DTYPE_BYTES, model_shape
from libra_hpc.models.step_times.measured import Calibration, Fit, MeasuredTimes, fit_steps, save
from libra_hpc.models.step_times.train_speed import TrainSpeed, save_speed
from libra_hpc.planning.measured_train_speed import speed_of

from .check import site_config
from .job_wait import on_a_node
from .output import busy, print_json, print_line, show, table
from .runs import JsonOption, RunsOption, find_run

DEVICES = ("cpu", "cuda")
DTYPES = ("auto", "float32", "bfloat16", "float16")
CPU_KV_MB = 256
"""KV cache of an engine on the CPU in MiB; vLLM's default would be a share of the machine's memory."""
EXAMPLES = ((1, 512), (8, 512), (32, 512), (64, 1024))
"""(sequences, context tokens of each) of the steps in the table."""


TIME_LIMIT = "01:00:00"
"""Limit of the job that measures engines: a degree takes minutes, and a large model's start as long."""
START_MINUTES = 20
"""Minutes of the job that measures training, besides the steps: imports from a cold file system, and the start."""

app = typer.Typer(no_args_is_help=True)


@app.command("engine", help="Measure the engine steps of a model on a rollout node, or take those of a run.")
def calibrate(
    out: Annotated[
        Path,
        typer.Argument(
            metavar="OUT", help="File to write; further degrees are added to one of the same device and model."
        ),
    ],
    model: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Model folder to serve.")] = None,
    run: Annotated[
        str | None,
        typer.Option(metavar="RUN", help="Take the steps of this run, which had rollout.record_steps, instead."),
    ] = None,
    tp: Annotated[int, typer.Option(min=1, metavar="N", help="Devices of an engine.")] = 1,
    device: Annotated[str, typer.Option(metavar="cpu|cuda", help="Where to run.")] = "cpu",
    name: Annotated[
        str,
        typer.Option(
            "--name", metavar="NAME", help="Name of the device, as simulate will be asked for it; default: cpu or cuda."
        ),
    ] = "",
    dtype: Annotated[str, typer.Option(metavar="NAME", help="auto, float32, bfloat16 or float16.")] = "auto",
    max_model_len: Annotated[int, typer.Option(min=64, metavar="TOKENS", help="Longest context.")] = 4096,
    max_num_seqs: Annotated[int, typer.Option(min=1, metavar="N", help="Most sequences of a step.")] = 64,
    kv_cache_mb: Annotated[
        int, typer.Option(min=0, metavar="MIB", help=f"KV cache per device; 0: {CPU_KV_MB} on the CPU, else vLLM's.")
    ] = 0,
    threads: Annotated[int, typer.Option(min=1, metavar="N", help="CPU threads of an engine.")] = 1,
    devices: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Also write the host's work per step into this device file, for planner.devices and simulate.",
        ),
    ] = None,
    here: Annotated[bool, typer.Option("--here", help="Measure on this machine instead of in a job.")] = False,
    runs: RunsOption = Path("runs"),
    json: JsonOption = False,
) -> None:
    if (model is None) == (run is None):
        given = f"{model or '-'}, {run or '-'}"
        raise invalid("--model, --run", given, "the source of the steps must be given once", "one of the two")
    check_options(out, device, dtype)
    called = name or device
    if devices is not None:
        hardware = listed_device(called, devices if devices.exists() else None)
    if model is None:
        found = recorded(find_run(str(run), runs), called)
        old = earlier(out, found.device, found.model)
    else:
        old = earlier(out, called, model.resolve().name)
        sizes = {"max_model_len": max_model_len, "max_num_seqs": max_num_seqs, "threads": threads}
        sizes["kv_cache_mb"] = kv_cache_mb or (CPU_KV_MB if device == "cpu" else 0)
        config = alone(str(model.absolute()), device, dtype=dtype, rollout=sizes, tp=tp)
        check_config(config)
        found = (measured if here else queued)(config, called, model.resolve().name)
    if devices is not None:
        write_host_cost(with_host_cost(hardware, model_shape(model or found.model), found.points), devices)
    save(merged(old, found), out)
    fits = fits_of(found)
    if json:
        print_fits(out, found, fits)
    else:
        show_fits(out, found, fits)


def check_options(out: Path, device: str, dtype: str) -> None:
    """Raise `UserError` for an unknown word, or a file that cannot be written."""
    for option, value, valid in (("--device", device, DEVICES), ("--dtype", dtype, DTYPES)):
        if value not in valid:
            raise invalid(option, value, "unknown value", valid)
    if not out.absolute().parent.is_dir():
        raise invalid("OUT", str(out), "no such folder", "a file in a folder that exists")


def fits_of(found: Calibration) -> dict[int, Fit]:
    """The fitted step times of each degree."""
    degrees = sorted(found.kv_capacity)
    return {degree: fit_steps([point for point in found.points if point.tp == degree]) for degree in degrees}


def queued(config: EngineConfig, device: str, model: str) -> Calibration:
    """Measure an engine on a rollout node of the site profile."""
    found = on_a_node(
        measure_steps.calibrate,
        config,
        device,
        model,
        config=site_config(),
        component="rollout",
        name="libra-calibrate",
        time_limit=TIME_LIMIT,
    )
    return cast(Calibration, found)


def measured(config: EngineConfig, device: str, model: str) -> Calibration:
    """Measure an engine on this machine."""
    with busy("measuring"):
        return measure_steps.calibrate(config, device, model)


def print_fits(out: Path, found: Calibration, fits: dict[int, Fit]) -> None:
    """Print the fitted step times as JSON."""
    rows = {
        degree: {"kv_capacity": found.kv_capacity[degree], "fit": msgspec.to_builtins(fit)}
        for degree, fit in fits.items()
    }
    print_json({"out": str(out), "device": found.device, "model": found.model, "degrees": rows})


def show_fits(out: Path, found: Calibration, fits: dict[int, Fit]) -> None:
    """Print the fitted step times as a table."""
    print_line(f"{out}: {len(found.points):,} steps of {found.model} on {found.device}")
    examples = (f"{count} x {context}, ms>~" for count, context in EXAMPLES)
    made = table("TP~", "steps>~", "KV tokens>~", "error p50>~", "p90>~", *examples, "prefill 1k, ms>~")
    for tp, fit in fits.items():
        times = MeasuredTimes(fit, tp, found.kv_capacity[tp], "")
        cells = [f"{1e3 * times.step_s(count, count * context):.2f}" for count, context in EXAMPLES]
        errors = (f"{fit.median_error:.1%}", f"{fit.p90_error:.1%}")
        made.add_row(
            str(tp),
            f"{fit.points:,}",
            f"{found.kv_capacity[tp]:,}",
            *errors,
            *cells,
            f"{1e3 * times.step_s(0, 0, 1024):.1f}",
        )
    show(made)
    print_line(
        f"use it with: libra-hpc simulate TRACE --calibration {out} --device {found.device} --model {found.model}"
    )


@app.command("train")
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
    found = listed_device(called, listed)
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
