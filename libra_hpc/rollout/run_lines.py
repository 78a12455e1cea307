"""The lines of `trajectories.jsonl` and `decisions.jsonl`, which the rollout leader writes.

A trajectory's line is a `libra_hpc.protocol.trace.TrajectoryRecord`, so that the simulator can replay the run. Its
other fields are for people. ``clipped``: tokens of its last answer that the context had no room for.

A decision's line has the turn, its engine, and the policy's reason with its numbers. Times are epoch seconds,
durations seconds.
"""

from __future__ import annotations

from typing import Any

import msgspec

from libra_hpc.policies.scheduling.protocol import Decision, TurnView

from .trajectory import Trajectory


class TrajectoryEnd(msgspec.Struct, frozen=True):
    """A trajectory that finished at ``at``, ``seconds`` after its start."""

    trajectory: Trajectory
    at: float
    seconds: float


class Routed(msgspec.Struct, frozen=True):
    """A turn that was sent to an engine at ``at``, after ``waited_s`` in the queue."""

    turn: TurnView
    decision: Decision
    at: float
    waited_s: float


def trace_line(ended: TrajectoryEnd) -> dict[str, Any]:
    trajectory = ended.trajectory
    return {
        "prompt_id": trajectory.prompt_id,
        "sample": trajectory.sample,
        "prompt_tokens": trajectory.prompt_tokens,
        "turns": [turn.line() | {"tool_s": round(turn.tool_s, 6)} for turn in trajectory.turns],
        "reward": trajectory.reward,
        "index": trajectory.index,
        "attempt": trajectory.attempt,
        "info": trajectory.info,
        "versions": trajectory.versions,
        "clipped": trajectory.clipped,
        "started_at": ended.at - ended.seconds,
        "finished_at": ended.at,
    }


def decision_line(routed: Routed) -> dict[str, Any]:
    turn, decision = routed.turn, routed.decision
    return {
        "t": routed.at,
        "trajectory": turn.trajectory,
        "prompt_id": turn.prompt_id,
        "turn": turn.turns,
        "engine": decision.engine,
        "from": turn.engine,
        "level": decision.level,
        "priority": decision.priority,
        "reason": decision.reason,
        "numbers": {name: round(v, 6) if isinstance(v, float) else v for name, v in decision.numbers.items()},
        "context_tokens": turn.context_tokens,
        "waited_s": round(routed.waited_s, 6),
    }
