"""Finished trajectories of earlier attempts and other runs, as the scheduling policy's evidence at the start.

`trajectories.jsonl` holds all that a policy learns from, so a resumed run, or one told to by ``rollout.warm_start``, replays the lines through
`Policy.finished` before the first turn, whatever the policy makes of them.  Weight versions count within one run: what another run has seen happened, to this
one, under version 0, so that evidence of its own outlives it.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from libra_hpc.errors import UserError, invalid
from libra_hpc.sched.persist import MAX_RECORDS, records
from libra_hpc.sched.protocol import Finished
from libra_hpc.telemetry.rundir import RunDir


def check_warm_start(path: str) -> Path:
    """The file of ``rollout.warm_start``: itself, or the trajectories of a run directory.

    Raises `UserError` when there is none, or no line of it is a trajectory.
    """
    found = RunDir(path).trajectories if Path(path).is_dir() else Path(path)
    if not found.is_file():
        raise invalid("rollout.warm_start", path, f"{found} does not exist", "a run directory, or a trajectories.jsonl")
    if next(records(found), None) is None:
        raise UserError(f"rollout.warm_start = {path!r}: no line of {found} is a trajectory with prompt_id, sample, prompt_tokens and turns.")
    return found


def history(own: Path, warm_start: str, task: str) -> list[Finished]:
    """The last `MAX_RECORDS` trajectories of the file ``warm_start`` names (empty: none) and of the run's ``own`` file, in this order, oldest first.

    ``task`` is that of lines that do not name one.  Raises `UserError` as `check_warm_start` does.
    """
    other = records(check_warm_start(warm_start), task) if warm_start else ()
    found = [msgspec.structs.replace(record, version=0) for record in other]
    found += records(own, task)
    return found[-MAX_RECORDS:]
