"""Finished trajectories of earlier attempts and other runs, which the scheduling policy learns from at the start.

A resumed run, or one with ``rollout.warm_start``, passes lines of `trajectories.jsonl` to `Policy.finished` before the
first turn. Weight versions count within one run, so trajectories of another run get version 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from libra_hpc.errors import UserError, invalid
from libra_hpc.facts.rundir import RunDir
from libra_hpc.policies.scheduling.protocol import Finished
from libra_hpc.protocol.trace import recorded

MAX_RECORDS = 20_000
"""Most trajectories to learn from; older evidence has decayed."""


def check_warm_start(path: str) -> Path:
    """The file of ``rollout.warm_start``: ``path`` itself, or the `trajectories.jsonl` of a run directory.

    Raises `UserError` when it is missing, or no line of it is a trajectory.
    """
    found = RunDir(path).trajectories if Path(path).is_dir() else Path(path)
    if not found.is_file():
        raise invalid("rollout.warm_start", path, f"{found} does not exist", "a run directory, or a trajectories.jsonl")
    if next(records(found), None) is None:
        raise UserError(
            f"rollout.warm_start = {path!r}: no line of {found} is a trajectory with prompt_id, sample, prompt_tokens"
            " and turns."
        )
    return found


def history(own: Path, warm_start: str, task: str) -> list[Finished]:
    """The last `MAX_RECORDS` trajectories: first those of ``warm_start`` (empty: none), then the run's ``own``.

    Oldest first. ``task``: the task of lines that name none. Raises `UserError` as `check_warm_start` does.
    """
    other = records(check_warm_start(warm_start), task) if warm_start else ()
    found = [msgspec.structs.replace(record, version=0) for record in other]
    found += records(own, task)
    return found[-MAX_RECORDS:]


def records(path: Path, task: str = "") -> Iterator[Finished]:
    """What each trajectory of `recorded` teaches; ``task``: the task of lines that name none."""
    for one in recorded(path):
        if one.turns:
            yield Finished.of(one, f"{one.prompt_id}/{one.index}-{one.sample}-{one.attempt}", task)
