"""The lines of `decisions.jsonl`, which the rollout leader writes.

A line has the turn, its engine, and the policy's reason with its numbers. Times are epoch seconds, durations seconds.
"""

from __future__ import annotations

from typing import Any

import msgspec

from libra_hpc.policies.scheduling.protocol import Decision, TurnView


class Routed(msgspec.Struct, frozen=True):
    """A turn that was sent to an engine at ``at``, after ``waited_s`` in the queue."""

    turn: TurnView
    decision: Decision
    at: float
    waited_s: float


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
