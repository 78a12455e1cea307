"""The project's own trace: one JSON object a line, a subset of what a run writes to ``trajectories.jsonl``, so that a run can be replayed as it is.

Fields: ``prompt_id`` str (same prompt = same id), ``sample`` int (which of the group), ``prompt_tokens`` int, ``reward`` float or null, and
``turns``, a list of ``new_tokens`` (added by the environment before this generation), ``gen_tokens``, ``tool`` (null on the last turn),
``outcome``, ``tool_s`` (seconds) and optionally ``exit_code``, ``passed``, ``failed``.  Other fields (engine, versions, times) are ignored.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from libra_hpc.sim.workload import TrajectorySpec

from .record import Bad, trajectory, why

OPTIONAL = ("exit_code", "passed", "failed")
"""Fields of a turn that are written only where known."""

_decoder = msgspec.json.Decoder(TrajectorySpec)
_encoder = msgspec.json.Encoder()


def read(lines: Iterable[tuple[int, bytes]], bad: Bad) -> Iterator[TrajectorySpec]:
    """Read numbered lines.

    A last turn that generated nothing is dropped: a run opens it for a tool answer that no longer fits into the context, and ends there.
    """
    for number, line in lines:
        try:
            found = _decoder.decode(line)
            turns = found.turns
            if len(turns) > 1 and turns[-1].gen_tokens == 0:
                turns = turns[:-1]
            checked = trajectory(found.prompt_id, found.sample, found.prompt_tokens, turns, found.reward)
        except msgspec.DecodeError as error:
            bad(number, why(error))
        except ValueError as error:
            bad(number, str(error))
        else:
            yield checked


def encode(trajectories: Iterable[TrajectorySpec]) -> bytes:
    """The file's content, uncompressed."""
    return b"".join(_encoder.encode(_line(one)) + b"\n" for one in trajectories)


def _line(one: TrajectorySpec) -> dict[str, Any]:
    turns = []
    for turn in one.turns:
        record: dict[str, Any] = msgspec.structs.asdict(turn)
        turns.append({name: value for name, value in record.items() if value is not None or name not in OPTIONAL})
    return {**msgspec.structs.asdict(one), "turns": turns}
