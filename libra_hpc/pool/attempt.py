"""Where an attempt starts, what it forgets of the one before, and the policy it leaves: rank 0's dealings with the run directory at both ends.

An attempt goes on from the newest complete checkpoint.  Whatever was done after that is done again, so nothing of it may count.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from libra_hpc.protocol.mesh import Welcome
from libra_hpc.telemetry.rundir import RunDir, read_lines, write_atomic


def forget_steps_after(run: RunDir, step: int) -> None:
    """Drop metrics of steps that an earlier attempt ran beyond the checkpoint this one starts from: they are trained again, and must not count twice."""
    kept = [line for line in read_lines(run.metrics) if line.get("step", 0) <= step]
    if run.metrics.exists():
        write_atomic(run.metrics, b"".join(json.dumps(line).encode() + b"\n" for line in kept))


def copy_policy(source: Path, destination: Path) -> None:
    """Replace the folder of a policy; the new one appears whole."""
    partial = destination.with_name(f".{destination.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    shutil.copytree(source, partial)
    shutil.rmtree(destination, ignore_errors=True)
    partial.rename(destination)


def start_state(run: RunDir) -> Welcome:
    """Where an attempt starts: the newest complete checkpoint of the run, or the beginning."""
    newest = run.latest_checkpoint()
    if newest is None:
        return Welcome(0, "", 0, ())
    step, folder = newest
    state = run.read_json(folder / "state.json")
    return Welcome(step, str(folder), int(state["low"]), tuple(state["extra"]))
