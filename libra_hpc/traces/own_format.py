"""The project's own trace: one `TrajectoryRecord` a line, as in ``trajectories.jsonl`` of a run.

Further fields of a run (engine, versions, times) and lines that a restart superseded are ignored.
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

    A last turn without generated tokens is dropped: its tool answer did not fit into the context.
    """
    numbered = list(lines)
    for place, line in live_lines(lambda: (text for _, text in numbered)):
        number = numbered[place - 1][0]
        try:
            found = _decoder.decode(line)
            turns = found.turns
            if len(turns) > 1 and turns[-1].gen_tokens == 0:
                turns = turns[:-1]
            checked = trajectory(found.prompt_id, found.sample, found.prompt_tokens, turns, reward=found.reward)
        except (ValueError, RecursionError) as error:
            bad(number, why(error))
        else:
            yield checked


def encode(trajectories: Iterable[TrajectoryRecord]) -> bytes:
    lines = ({**msgspec.structs.asdict(one), "turns": [turn.line() for turn in one.turns]} for one in trajectories)
    return b"".join(_encoder.encode(line) + b"\n" for line in lines)
