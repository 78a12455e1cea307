"""The project's own trace: one JSON object a line, a subset of what a run writes to ``trajectories.jsonl``, so that a
run can be replayed as it is.

A line is a `libra_hpc.protocol.trace.TrajectoryRecord`; other fields (engine, versions, times) are ignored, and so are
lines that a restart superseded.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from libra_hpc.protocol.trace import TrajectoryRecord, live_lines

from .record import Bad, trajectory, why

_decoder = msgspec.json.Decoder(TrajectoryRecord)
_encoder = msgspec.json.Encoder()


def read(lines: Iterable[tuple[int, bytes]], bad: Bad) -> Iterator[TrajectoryRecord]:
    """Read numbered lines.

    A last turn that generated nothing is dropped: a run opens it for a tool answer that no longer fits into the
    context, and ends there.
    """
    held = list(lines)
    for place, line in live_lines(lambda: (text for _, text in held)):
        number = held[place - 1][0]
        try:
            found = _decoder.decode(line)
            turns = found.turns
            if len(turns) > 1 and turns[-1].gen_tokens == 0:
                turns = turns[:-1]
            checked = trajectory(found.prompt_id, found.sample, found.prompt_tokens, turns, found.reward)
        except (ValueError, RecursionError) as error:
            bad(number, why(error))
        else:
            yield checked


def encode(trajectories: Iterable[TrajectoryRecord]) -> bytes:
    """The file's content, uncompressed."""
    lines = ({**msgspec.structs.asdict(one), "turns": [turn.line() for turn in one.turns]} for one in trajectories)
    return b"".join(_encoder.encode(line) + b"\n" for line in lines)
