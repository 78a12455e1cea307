"""What the rollout leader leaves behind: the lines of `trajectories.jsonl` and `decisions.jsonl`.

A trajectory's line follows the trace schema, so that a user can replay their own run in the simulator: ``prompt_id``, ``sample``, ``prompt_tokens``, and
``turns`` of ``new_tokens`` (0 on the first turn, whose context is the prompt), ``gen_tokens``, ``tool``, ``outcome``, ``tool_s``, and, where the tool said so,
``exit_code``, ``passed`` and ``failed``; ``reward``.  The other fields are for people.  A decision's line says which turn of which trajectory went where,
the policy's reason and the numbers it rests on.  Times are epoch seconds, durations seconds.
"""

from __future__ import annotations

from typing import Any

import msgspec

from libra_hpc.sched.protocol import Decision, TurnView

from .trajectory import Trajectory, TurnRecord


class Ended(msgspec.Struct, frozen=True):
    """A trajectory that finished at ``at``, ``seconds`` after its start."""

    trajectory: Trajectory
    at: float
    seconds: float


class Routed(msgspec.Struct, frozen=True):
    """A turn that was sent to an engine at ``at``, having waited ``waited_s``."""

    turn: TurnView
    decision: Decision
    at: float
    waited_s: float


def trace_line(ended: Ended) -> dict[str, Any]:
    """The line of a finished trajectory."""
    trajectory = ended.trajectory
    return {
        "prompt_id": trajectory.prompt_id, "sample": trajectory.sample, "prompt_tokens": trajectory.prompt_tokens,
        "turns": [_turn(record, first=number == 0) for number, record in enumerate(trajectory.turns)],
        "reward": trajectory.reward, "index": trajectory.index, "attempt": trajectory.attempt, "info": trajectory.info, "versions": trajectory.versions,
        "started_at": ended.at - ended.seconds, "finished_at": ended.at,
    }  # fmt: skip


def _turn(record: TurnRecord, *, first: bool) -> dict[str, Any]:
    line: dict[str, Any] = {
        "new_tokens": 0 if first else record.new_tokens, "gen_tokens": record.gen_tokens, "tool": record.tool, "outcome": record.outcome,
        "tool_s": round(record.tool_s, 6), "engine": record.engine, "versions": record.versions,
    }  # fmt: skip
    found = {"exit_code": record.exit_code, "passed": record.passed, "failed": record.failed}
    return line | {key: value for key, value in found.items() if value is not None}


def decision_line(routed: Routed) -> dict[str, Any]:
    """The line of a routed turn."""
    turn, decision = routed.turn, routed.decision
    return {
        "t": routed.at, "trajectory": turn.trajectory, "prompt_id": turn.prompt_id, "turn": turn.turns, "engine": decision.engine, "from": turn.engine,
        "level": decision.level, "priority": decision.priority, "reason": decision.reason, "numbers": dict(decision.numbers),
        "context_tokens": turn.context_tokens, "waited_s": round(routed.waited_s, 6), "keep_s": decision.keep_s,
    }  # fmt: skip
