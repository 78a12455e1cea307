"""What a scheduler has learned, across runs and leaders: an append-only log of finished trajectories.

The log is the list of `Finished` records themselves, one JSON object a line; a tree is made from them by learning them again in order (some 70 us each).  So
*merging* the logs of several leaders is the union of their records, ordered by weight version, and needs no arithmetic on statistics.  The caller appends
`to_line(record)` to a file whenever and wherever it likes: nothing here is called while a turn is routed.

A log can be read after a kill at any byte: a torn or foreign line is skipped, and `append` starts a fresh line after a torn one.  `trajectories.jsonl`
of a run can be read as well (`records` tells the two apart by their fields).  `warm` learns the last `MAX_RECORDS` = 20,000, far more than the decay of
evidence leaves a trace of.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from libra_hpc.protocol.trace import TrajectoryRecord, live_lines, signals_of
from libra_hpc.sched.protocol import Finished
from libra_hpc.sched.tree import CausalTree

MAX_RECORDS = 20_000
_encoder = msgspec.json.Encoder()


class _Line(TrajectoryRecord, frozen=True):
    """What a run writes beyond the trace."""

    index: int = 0
    attempt: int = 0
    task: str = ""
    versions: tuple[tuple[int, int], ...] = ()


_finished = msgspec.json.Decoder(Finished)
_line = msgspec.json.Decoder(_Line)


def to_line(record: Finished) -> bytes:
    """One line of the log, newline included."""
    return _encoder.encode(record) + b"\n"


def append(path: Path, new: Iterable[Finished]) -> None:
    """Append records; not for the thread that routes turns (it writes a file)."""
    with path.open("ab+") as handle:
        torn = b""
        if handle.tell():
            handle.seek(-1, 2)
            torn = b"\n" if handle.read(1) != b"\n" else b""
        handle.write(torn + b"".join(map(to_line, new)))


def records(path: Path, task: str = "") -> Iterator[Finished]:
    """Records of a log or of a ``trajectories.jsonl``; unreadable and superseded lines are skipped, a missing file is empty.

    ``task`` is that of trace lines that do not name one.
    """
    if not path.exists():
        return
    with path.open("rb") as first, path.open("rb") as second:
        passes = iter((first, second))
        for _, line in live_lines(lambda: next(passes)):
            record = _read(line, task)
            if record is not None:
                yield record


def merge(paths: Iterable[Path], task: str = "") -> list[Finished]:
    """Union of several logs, oldest weights first; a record that occurs twice counts once."""
    union = {(r.trajectory, r.prompt_id, r.sample, r.version, r.generated_tokens): r for path in paths for r in records(path, task)}
    return sorted(union.values(), key=lambda r: r.version)


def warm(tree: CausalTree, past: Iterable[Finished]) -> CausalTree:
    """Teach a tree the last records."""
    for record in list(past)[-MAX_RECORDS:]:
        tree.insert(record)
    return tree


def _read(line: bytes, task: str) -> Finished | None:
    try:
        return _finished.decode(line)
    except msgspec.MsgspecError:
        pass
    except (UnicodeDecodeError, RecursionError):
        return None
    try:
        found = _line.decode(line)
    except (msgspec.MsgspecError, RecursionError):
        return None
    return _learned(found, task) if found.turns else None


def _learned(line: _Line, task: str) -> Finished:
    signals, at = signals_of(line.turns)
    name = f"{line.prompt_id}/{line.index}-{line.sample}-{line.attempt}"
    version = line.versions[-1][0] if line.versions else 0
    return Finished(
        name, line.prompt_id, line.sample, line.task or task, line.generated, len(line.turns), tuple(at), tuple(signals), version, line.context
    )
