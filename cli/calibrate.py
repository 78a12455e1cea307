"""`libra-hpc calibrate engine`: write a file of measured engine step times, for `simulate --calibration`.

- ``--model``: start an engine on a rollout node, in a job, or with ``--here`` on this machine, and measure it.
- ``--run``: take the steps that a run recorded (``rollout.record_steps``), under a real workload, all engines at once.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, cast

import msgspec
import typer

from libra_hpc.annexes.calibrate import measure_steps
from libra_hpc.annexes.calibrate.measure_steps import earlier, merged, with_host_cost, write_host_cost
from libra_hpc.engine.settings import EngineConfig, alone, check_config
from libra_hpc.engine.steplog import recorded
from libra_hpc.errors import invalid
from libra_hpc.models.devices import device as listed_device
from libra_hpc.models.shapes import model_shape
from libra_hpc.models.step_times.measured import Calibration, Fit, MeasuredTimes, fit_steps, save

from .calibrate_train import train
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


app = typer.Typer(no_args_is_help=True)
app.command("train")(train)


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
