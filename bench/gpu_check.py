"""Does libra-hpc work on this GPU machine, and how fast? One command of at most ten minutes (docs/gpu-check.md).

    python -m bench.gpu_check [--device cpu] [--step run --step switch] [--out FOLDER]

- Each step is a process of its own -> one that fails, hangs or loses the GPU leaves the others' figures.
- A step passes its limit -> it is ended, and its figures so far count.
- The budget is used up -> later steps are left out. Steps are ordered by what is least certain.

Prints the table as Markdown and the JSON; both are files too. Exit code 0 when every step passed, else 1.
"""

from __future__ import annotations

import argparse
import contextlib
import json
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

from bench.gpu_check_steps import Figure, Figures, Setting
from bench.harness import RESULTS, ROOT, machine, progress, text
from libra_hpc.process.child_environment import engine_environment

BUDGET_S = 540.0
"""With the minute that the environment takes from a folder of wheels: ten minutes."""
LEAVE_S = 25.0
"""Seconds from SIGTERM to SIGKILL for a late step, in which it ends what it started."""
LEAST_S = 20.0
"""A step with less time is left out: it could not even import its engines."""
RETURNED = {"MALLOC_MMAP_THRESHOLD_": "65536"}
"""Without a GPU: freed buffers leave the process at once, so that its memory is what its tensors hold."""
REHEARSAL = "A rehearsal on CPUs: predictions are for no real device, and memory is the process's own."
QUOTED = 120, 180
"""Characters of the beginning and of the end of a long reason in the table; the JSON has all."""

State = Literal["passed", "failed", "late", "left out"]


class Step(msgspec.Struct, frozen=True):
    name: str
    title: str
    limit_s: float
    """Several times what it should take: a hang must not use up the time of the others."""


STEPS = (
    Step("facts", "machine", 40.0),
    Step("run", "whole run, train and rollout on one device", 240.0),
    Step("training", "training alone", 150.0),
    Step("switch", "node between training and rollout", 220.0),
    Step("tests", "GPU tests", 400.0),
)


class Outcome(msgspec.Struct, frozen=True):
    """What a step left."""

    step: str
    title: str
    state: State
    seconds: float
    figures: list[Figure]
    reason: str = ""
    """Why it did not pass."""


def command_of(step: Step, setting: Setting, figures: Path) -> list[str]:
    encoded = msgspec.json.encode(setting).decode()
    return [sys.executable, "-m", "bench.gpu_check_steps", step.name, "--setting", encoded, "--figures", str(figures)]


class Runner:
    """Runs steps one after the other within a budget."""

    def __init__(self, setting: Setting, folder: Path, budget_s: float, leave_s: float = LEAVE_S) -> None:
        self._setting, self._folder, self._leave_s = setting, folder, leave_s
        self._end = time.monotonic() + budget_s
        self._environment = engine_environment(
            os.environ, setting.device, first=0, count=1, threads=setting.sizes.threads
        )
        if setting.device == "cpu":
            self._environment |= RETURNED
        self._environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))

    def run(self, step: Step, command: Sequence[str] | None = None) -> Outcome:
        """Run one step; ``command`` instead of its own."""
        limit_s = min(step.limit_s, self._end - time.monotonic() - self._leave_s)
        if limit_s < min(LEAST_S, step.limit_s):
            return Outcome(step.name, step.title, "left out", 0.0, [], "The time was used up.")
        figures, log = self._folder / f"{step.name}.jsonl", self._folder / f"{step.name}.log"
        setting = msgspec.structs.replace(self._setting, limit_s=limit_s)
        begin = time.monotonic()
        with log.open("wb") as output:
            streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": output, "cwd": ROOT}
            words = list(command or command_of(step, setting, figures))
            process = subprocess.Popen(words, env=self._environment, start_new_session=True, **streams)
            late = self._wait(process, limit_s)
        seconds = time.monotonic() - begin
        state: State = "late" if late else "failed" if process.returncode else "passed"
        reason = f"It did not end within {limit_s:.0f} s. " if late else ""
        reason = "" if state == "passed" else reason + last_line(log)
        return Outcome(step.name, step.title, state, seconds, Figures(figures).read(), reason)

    def _wait(self, process: subprocess.Popen[bytes], limit_s: float) -> bool:
        """Wait for a step and end what it leaves; returns whether it was late."""
        late = False
        try:
            process.wait(limit_s)
        except subprocess.TimeoutExpired:
            late = True
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(self._leave_s)
        finally:
            # Its engines are of its group, also when it is gone.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        return late


def last_line(log: Path) -> str:
    """The error of a step: its last line, or the exception's."""
    lines = log.read_text(errors="replace").strip().splitlines()
    return lines[-1] if lines else "It left no message."


def markdown(outcomes: Sequence[Outcome], note: str = "") -> str:
    """The table, and below it ``note`` and one line for each step."""
    rows = [("", "measured", "predicted", "measured / predicted")]
    for outcome in outcomes:
        rows.append((f"**{outcome.title}**", outcome.state, "", ""))
        for figure in outcome.figures:
            ratio = quotient(figure)
            rows.append((figure.what.replace("  ", "- "), text(figure.measured), text(figure.predicted), ratio))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rows.insert(1, tuple("-" * width for width in widths))  # type: ignore[arg-type]
    padded = [[cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in rows]
    lines = [f"| {' | '.join(row)} |" for row in padded]
    lines += ["", *([f"{note}  "] if note else [])]
    for outcome in outcomes:
        why = f": {shortened(outcome.reason)}" if outcome.reason else ""
        lines.append(f"{outcome.step}: {outcome.state} after {outcome.seconds:.0f} s{why}  ")
    return "\n".join(lines) + "\n"


def shortened(reason: str) -> str:
    """Beginning and end of a reason: what failed, and the last line of the log that it quotes."""
    first, last = QUOTED
    return reason if len(reason) <= first + last else f"{reason[:first]} ... {reason[-last:]}"


def quotient(figure: Figure) -> str:
    """Measured over predicted; empty where nothing was predicted."""
    if not isinstance(figure.measured, float) or not figure.predicted:
        return ""
    return f"{figure.measured / figure.predicted:.2f}"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Check one GPU machine in ten minutes.")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a rehearsal, tiny and slow")
    parser.add_argument("--model", default="", help="short name; default: the largest Qwen3 up to 4B that fits")
    parser.add_argument("--name", default="", help="name in the device table; default: by the driver's name")
    parser.add_argument("--devices", default="", metavar="FILE", help="TOML file with further devices")
    parser.add_argument("--step", choices=[step.name for step in STEPS], action="append", help="default: all")
    parser.add_argument("--seconds", type=float, default=BUDGET_S, help="for all steps together", dest="limit_s")
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="FOLDER", help="for gpu_check.json and .md")
    options = parser.parse_args(arguments)
    setting = msgspec.convert(vars(options), Setting, strict=False)
    note, outcomes = REHEARSAL if setting.device == "cpu" else "", list[Outcome]()
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="libra-gpu-check-") as name:
        runner = Runner(setting, Path(name), options.limit_s)
        for step in [one for one in STEPS if one.name in (options.step or [one.name])]:
            progress(f"{step.title} ...")
            outcomes.append(runner.run(step))
            found = save(options.out, outcomes, note)
            progress(f"  {outcomes[-1].state} after {outcomes[-1].seconds:.0f} s")
        all_passed = all(outcome.state == "passed" for outcome in outcomes)
        if not all_passed:
            keep_logs(Path(name), options.out)
    print(json.dumps(found), markdown(outcomes, note), sep="\n\n", end="")
    return int(not all_passed)


def save(out: Path, outcomes: Sequence[Outcome], note: str) -> dict[str, Any]:
    """Replace both files: what is known so far is readable after any kill."""
    found: dict[str, Any] = {"at": time.strftime("%Y-%m-%dT%H:%M:%S"), "machine": machine(), "note": note}
    found["steps"] = msgspec.to_builtins(outcomes)
    (out / "gpu_check.json").write_text(json.dumps(found, indent=1) + "\n")
    (out / "gpu_check.md").write_text(markdown(outcomes, note))
    return found


def keep_logs(folder: Path, out: Path) -> None:
    """Join the logs of all steps, because one of them explains a failure."""
    logs = [f"--- {log.stem}\n{log.read_text(errors='replace')}" for log in sorted(folder.glob("*.log"))]
    (out / "gpu_check.log").write_text("\n".join(logs))
    progress(f"logs: {out / 'gpu_check.log'}")


if __name__ == "__main__":
    sys.exit(main())
