"""Why a run makes no progress: pure, from the pool, the last rollout report, and recent notices.

- A part gave notice lately (a slow engine, a storage fault, paused admission) -> the newest notice is the reason.
- Else -> what the trainers or the rollout wait for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from libra_hpc.facts.events import EVENTS, in_words
from libra_hpc.policies.pool import states
from libra_hpc.protocol.agents import RolloutReport

NOTICE_S = 120.0
"""An older notice explains nothing any more, unless it is repeated."""
NOTICES = 8
"""Most notices remembered."""


class Notices:
    """The last things that went wrong, as sentences; ``t`` and ``now`` are epoch seconds."""

    def __init__(self) -> None:
        self._notices: deque[tuple[float, str]] = deque(maxlen=NOTICES)

    def add(self, kind: str, t: float, fields: dict[str, Any]) -> None:
        if kind in EVENTS and EVENTS[kind].notice:
            where = f"node {fields['rank']}: " if "rank" in fields else ""
            self._notices.append((t, f"{where}{in_words(kind)}: {fields.get('reason', '')}".rstrip(": ")))

    def recent(self, now: float) -> list[str]:
        return [sentence for t, sentence in reversed(self._notices) if now - t <= NOTICE_S]


def waits_for(pool: states.Pool, report: RolloutReport | None, notices: Sequence[str]) -> str:
    """What a step that does not come waits for."""
    if notices:
        return notices[0]
    if not states.trainers(pool):
        return _nodes(pool, "train") or "no training replica is ready"
    if not states.rollout_nodes(pool):
        return _nodes(pool, "rollout") or "no rollout engine is ready"
    if report is None:
        return "the rollout leader has not reported"
    if report.waiting_turns and not report.inflight:
        return f"{report.waiting_turns} turns wait for an engine"
    if report.tools_running and not report.inflight:
        return f"{report.tools_running} of {report.open_trajectories} trajectories are in tools"
    if report.inflight:
        return f"{report.inflight} turns run at engines, {report.open_trajectories} trajectories are open"
    return "the trainers work on a step" if report.ready_groups else "no trajectory is open"


def _nodes(pool: states.Pool, role: str) -> str:
    waiting = [
        f"node {node.rank} is {node.state.replace('_', ' ')}" for node in pool.nodes.values() if node.role == role
    ]
    return ", ".join(waiting[:3])
