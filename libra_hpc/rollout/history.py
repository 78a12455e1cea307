"""Finished trajectories of earlier attempts and other runs, as the scheduling policy's evidence at the start.

`trajectories.jsonl` holds all that a policy learns from, so a resumed run, or one told to by ``rollout.warm_start``,
replays the lines through `Policy.finished` before the first turn, whatever the policy makes of them.  Weight versions
count within one run: what another run has seen happened, to this one, under version 0, so that evidence of its own
outlives it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from libra_hpc.errors import UserError, invalid
from libra_hpc.protocol.trace import TrajectoryRecord, live_lines, signals_of
from libra_hpc.sched.protocol import Finished
from libra_hpc.telemetry.rundir import RunDir

MAX_RECORDS = 20_000
"""Trajectories that are replayed: far more than the decay of evidence leaves a trace of."""


class _Line(TrajectoryRecord, frozen=True):
    """What a run writes beyond the trace."""

    index: int = 0
    attempt: int = 0
    task: str = ""
    versions: tuple[tuple[int, int], ...] = ()


_decoder = msgspec.json.Decoder(_Line)


def check_warm_start(path: str) -> Path:
    """The file of ``rollout.warm_start``: itself, or the trajectories of a run directory.

    Raises `UserError` when there is none, or no line of it is a trajectory.
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
    """The last `MAX_RECORDS` trajectories of the file ``warm_start`` names (empty: none) and of the run's ``own`` file,
    in this order, oldest first.

    ``task`` is that of lines that do not name one.  Raises `UserError` as `check_warm_start` does.
    """
    other = records(check_warm_start(warm_start), task) if warm_start else ()
    found = [msgspec.structs.replace(record, version=0) for record in other]
    found += records(own, task)
    return found[-MAX_RECORDS:]


def records(path: Path, task: str = "") -> Iterator[Finished]:
    """Trajectories of a ``trajectories.jsonl``; unreadable and superseded lines are skipped, a missing file is empty.

    ``task`` is that of lines that do not name one.
    """
    if not path.exists():
        return
    with path.open("rb") as first, path.open("rb") as second:
        passes = iter((first, second))
        for _, line in live_lines(lambda: next(passes)):
            record = _read(line, task)
            if record is not None:
                yield record


def _read(raw: bytes, task: str) -> Finished | None:
    try:
        line = _decoder.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    if not line.turns:
        return None
    signals, at = signals_of(line.turns)
    return Finished(
        trajectory=f"{line.prompt_id}/{line.index}-{line.sample}-{line.attempt}",
        prompt_id=line.prompt_id,
        sample=line.sample,
        task=line.task or task,
        generated_tokens=line.generated,
        turns=len(line.turns),
        at_signal=tuple(at),
        signals=tuple(signals),
        version=line.versions[-1][0] if line.versions else 0,
        context_tokens=line.context,
    )
