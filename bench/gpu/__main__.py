"""Does libra-hpc work on this GPU machine, and how fast? One command of at most ten minutes (docs/gpu-check.md).

    python -m bench.gpu [--device cpu] [--rows "run|switch"] [--json FILE]

- Each step is a process of its own -> one that fails, hangs or loses the GPU leaves the others' figures.
- A step passes its limit -> it is ended, and its figures so far count.
- The budget is used up -> later steps are left out. Steps are ordered by what is least certain.

Exit code 0 when every step passed, else 1, with the logs beside the JSON file.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from bench.gpu.setting import Figure, Figures, Setting
from bench.harness import ROOT, options, progress, report, write
from libra_hpc.errors import OperationError, UserError
from libra_hpc.process.child_environment import engine_environment

BUDGET_S = 540.0
"""With the minute that the environment takes from a folder of wheels: ten minutes."""
LEAVE_S = 25.0
"""Seconds from SIGTERM to SIGKILL for a late step, in which it ends what it started."""
LEAST_S = 20.0
"""A step with less time is left out: it could not even import its engines."""
REHEARSAL = "A rehearsal on CPUs: predictions are for no real device."
QUOTED = 120, 180
"""Characters of the beginning and of the end of a long reason in the table; the JSON file has all."""
STEPS = {
    "facts": ("steps", 40.0),
    "run": ("steps", 240.0),
    "training": ("training", 150.0),
    "switch": ("switch", 220.0),
    "tests": ("steps", 400.0),
    "pieces": ("pieces", 240.0),
}
"""Module of this folder with the function, imported in the step's process because torch and vLLM take seconds; and the
limit in seconds, several times what the step should take."""


class Outcome(msgspec.Struct, frozen=True):
    """What a step left."""

    step: str
    state: Literal["passed", "failed", "late", "left out"]
    seconds: float = 0.0
    figures: list[Figure] = []
    reason: str = ""
    """Why it did not pass."""


def command_of(step: str, setting: Setting, figures: Path) -> list[str]:
    """The command of a step's process."""
    values = {**msgspec.structs.asdict(setting), "rows": step, "figures": figures}
    return [sys.executable, "-m", "bench.gpu", *(f"--{name}={value}" for name, value in values.items())]


def run(step: str, setting: Setting, command: Sequence[str], folder: Path, leave_s: float = LEAVE_S) -> Outcome:
    """Run a step's process within ``setting.seconds``; its log and figures are in ``folder``."""
    if setting.seconds < LEAST_S:
        return Outcome(step, "left out", reason="The time was used up.")
    figures, log, late = folder / f"{step}.jsonl", folder / f"{step}.log", False
    environment = engine_environment(os.environ, setting.device, first=0, count=1, threads=setting.sizes.threads)
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    begin = time.monotonic()
    with log.open("wb") as output:
        streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": output}
        process = subprocess.Popen(command, env=environment, cwd=ROOT, start_new_session=True, **streams)
    try:
        process.wait(setting.seconds)
    except subprocess.TimeoutExpired:
        late = True
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(leave_s)
    finally:
        # Its engines are of its group, also when it is gone.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    seconds, found = time.monotonic() - begin, Figures(figures).read()
    if not (late or process.returncode):
        return Outcome(step, "passed", seconds, found)
    reason = (log.read_text(errors="replace").strip() or "It left no message.").splitlines()[-1]
    if late:
        return Outcome(step, "late", seconds, found, f"It did not end within {setting.seconds:.0f} s. {reason}")
    return Outcome(step, "failed", seconds, found, reason)


def measure(step: str, setting: Setting, figures: Figures) -> int:
    """Measure a step in this process; returns its exit code."""
    # So that what a step started is ended by it.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(1))
    try:
        getattr(importlib.import_module(f"bench.gpu.{STEPS[step][0]}"), step)(setting, figures)
    except (OperationError, UserError) as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        return 1
    return 0


def lines(outcomes: Sequence[Outcome]) -> list[tuple[Any, ...]]:
    """Rows of the table: each step, then its figures."""
    rows: list[tuple[Any, ...]] = []
    for outcome in outcomes:
        rows.append((f"{outcome.step}: {outcome.state}, {outcome.seconds:.0f} s", None, None, None))
        for one in outcome.figures:
            ratio = f"{one.measured / one.predicted:.2f}" if isinstance(one.measured, float) and one.predicted else ""
            rows.append((one.what, one.measured, one.predicted, ratio))
    return rows


def shortened(reason: str) -> str:
    """Beginning and end of a reason: what failed, and the last line of the log that it quotes."""
    first, last = QUOTED
    return reason if len(reason) <= first + last else f"{reason[:first]} ... {reason[-last:]}"


def main(arguments: Sequence[str] | None = None) -> int:
    texts = {"model": "", "gpu": "", "devices": "", "figures": ""}
    device = ("cuda", "cpu")
    given = options("gpu", __doc__, rows=STEPS, arguments=arguments, device=device, seconds=BUDGET_S, **texts)
    # There is no time for it beside the others.
    given.rows = [step for step in given.rows if step != "pieces"] or given.rows
    setting, outcomes = msgspec.convert(vars(given), Setting), list[Outcome]()
    if given.figures:
        return measure(given.rows[0], setting, Figures(Path(given.figures)))
    end = time.monotonic() + given.seconds
    with tempfile.TemporaryDirectory(prefix="libra-gpu-check-") as name:
        for step in given.rows:
            progress(f"{step} ...")
            limit_s = min(STEPS[step][1], end - time.monotonic() - LEAVE_S)
            own = msgspec.structs.replace(setting, seconds=limit_s)
            outcomes.append(run(step, own, command_of(step, own, Path(name, f"{step}.jsonl")), Path(name)))
            write(given, msgspec.to_builtins(outcomes))
        failed = [one for one in outcomes if one.state != "passed"]
        if failed:
            logs = [f"--- {log.stem}\n{log.read_text(errors='replace')}" for log in sorted(Path(name).glob("*.log"))]
            given.json.with_suffix(".log").write_text("\n".join(logs))
    notes = [REHEARSAL] * (given.device == "cpu")
    notes += [f"{one.step}: {one.state} after {one.seconds:.0f} s: {shortened(one.reason)}" for one in failed]
    columns = ("", "measured", "predicted", "measured / predicted")
    raw = msgspec.to_builtins(outcomes)
    report(given, "GPU check", columns=columns, rows=lines(outcomes), notes=notes, raw=raw)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
