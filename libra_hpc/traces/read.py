"""Read and write the project's own trace, gzip or not: one `TrajectoryRecord` a line, as `trajectories.jsonl` of a run.

Further fields of a run (engine, versions, times) and lines that a restart superseded are ignored.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import msgspec

from libra_hpc.errors import UserError
from libra_hpc.files import write_result
from libra_hpc.protocol.trace import TrajectoryRecord, live_lines

from .record import trajectory, why

GZIP = b"\x1f\x8b"
_decoder = msgspec.json.Decoder(TrajectoryRecord)
_encoder = msgspec.json.Encoder()


class Trace(NamedTuple):
    trajectories: list[TrajectoryRecord]
    bad: list[str]
    """What is wrong with each line that was passed over."""


def read_trace(path: Path, skip_bad: bool = False) -> Trace:
    """Read the trajectories of a file.

    Raises `UserError` for a file that is unreadable or without trajectories, and for a bad line unless ``skip_bad``.
    """
    lines = [(number, line) for number, line in enumerate(content(path).split(b"\n"), 1) if line.strip()]
    if not lines:
        raise UserError(f"{path}: the trace is empty.")
    trace = Trace([], [])
    for place, line in live_lines(lambda: (text for _, text in lines)):
        try:
            trace.trajectories.append(_checked(line))
        except (ValueError, RecursionError) as error:
            problem = f"line {lines[place - 1][0]}: {why(error)}"
            if not skip_bad:
                hint = "--skip-bad goes on without such lines"
                raise UserError(f"{path}, {problem} ({hint}).") from None
            trace.bad.append(f"{problem}.")
    if not trace.trajectories:
        passed = f" that can be read; bad lines: {len(trace.bad)}, the first: {trace.bad[0]}" if trace.bad else ""
        raise UserError(f"{path}: the trace has no trajectory{passed.rstrip('.')}.")
    return trace


def _checked(line: bytes) -> TrajectoryRecord:
    """A last turn without generated tokens is dropped: its tool answer did not fit into the context."""
    found = _decoder.decode(line)
    turns = found.turns
    if len(turns) > 1 and turns[-1].gen_tokens == 0:
        turns = turns[:-1]
    return trajectory(found.prompt_id, found.sample, found.prompt_tokens, turns, reward=found.reward)


def encode(trajectories: Iterable[TrajectoryRecord]) -> bytes:
    return b"".join(_encoder.encode(one) + b"\n" for one in trajectories)


def write_trace(path: Path, trajectories: Iterable[TrajectoryRecord]) -> None:
    """Write a trace atomically, compressed if the name ends in ``.gz``.

    Equal trajectories give equal bytes.  Raises `UserError` when the file cannot be written.
    """
    data = encode(trajectories)
    if path.suffix == ".gz":
        data = gzip.compress(data, mtime=0)
    write_result(path, data)


def content(path: Path) -> bytes:
    """The bytes of a file, gzip or not; raises `UserError` where it cannot be read."""
    try:
        data = path.read_bytes()
        return gzip.decompress(data) if data.startswith(GZIP) else data
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UserError(f"{path}: the gzip file is damaged ({error}).") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}).") from None
