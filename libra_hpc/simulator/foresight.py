"""The input of the clairvoyant oracle: remaining work after any number of turns, and step times of the engines."""

from __future__ import annotations

from collections.abc import Sequence

from libra_hpc.protocol.trace import TrajectoryRecord
from libra_hpc.simulator.baselines.oracle import Foresight, OracleWork

from .settings import EngineSpec, SimSettings, trajectory_ids


def foresight_of(work: Sequence[TrajectoryRecord], engines: Sequence[EngineSpec], settings: SimSettings) -> Foresight:
    """The future of ``work``, by the names of `trajectory_ids`; a TP degree has the step times of its first engine."""
    left = {name: _remaining(spec) for name, spec in zip(trajectory_ids(work), work, strict=True)}
    steps = {engine.tp: engine.steps for engine in reversed(engines)}
    return Foresight(lambda name, turns: left[name][turns], steps, settings.max_num_seqs)


def _remaining(spec: TrajectoryRecord) -> list[OracleWork]:
    left: list[OracleWork] = []
    decode = new = 0
    tool_s = 0.0
    for index in range(len(spec.turns) - 1, -1, -1):
        turn = spec.turns[index]
        decode += turn.gen_tokens
        tool_s += turn.tool_s
        fresh = turn.new_tokens if index else spec.prompt_tokens + turn.new_tokens
        left.append(OracleWork(decode_tokens=decode, fresh_tokens=fresh, new_tokens=new, tool_s=tool_s))
        new += turn.new_tokens
    left.reverse()
    return left
