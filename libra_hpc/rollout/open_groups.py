"""The planner's facts on trajectories: lengths of finished ones, progress of open groups."""

from __future__ import annotations

from collections.abc import Iterable

from libra_hpc.protocol.plan import GroupFact, TrajectoryFact

from .trajectory import Trajectory


def length_of(trajectory: Trajectory) -> TrajectoryFact:
    """Tokens, turns and tool seconds of a finished trajectory."""
    return TrajectoryFact(
        index=-1,
        at=trajectory.finished_at,
        generated=trajectory.generated,
        context=trajectory.all_tokens,
        turns=len(trajectory.turns),
        tool_s=sum(turn.tool_s for turn in trajectory.turns),
        group=trajectory.index,
        prompt=trajectory.prompt_tokens,
    )


def open_groups(episodes: Iterable[Trajectory], now: float, decode_s: float) -> tuple[GroupFact, ...]:
    """Groups with open trajectories, by index; a group without a known prompt is left out.

    Engines answer whole turns. A turn sent ``s`` seconds ago counts as s / ``decode_s`` tokens, at most its limit.
    ``decode_s``: seconds per token; 0.0: unknown, and the turn counts as 0 tokens.
    """
    groups: dict[int, list[Trajectory]] = {}
    for trajectory in episodes:
        groups.setdefault(trajectory.index, []).append(trajectory)
    found = []
    for index, members in sorted(groups.items()):
        prompt = max(t.prompt_tokens for t in members)
        if prompt:
            running = [t for t in members if t.sent_at > 0.0]
            generated = sum(t.generated + _turn(t, now, decode_s) for t in running)
            found.append(
                GroupFact(
                    index=index,
                    prompt=prompt,
                    waiting=len(members) - len(running),
                    running=len(running),
                    generated=generated,
                )
            )
    return tuple(found)


def _turn(trajectory: Trajectory, now: float, decode_s: float) -> int:
    if trajectory.place != "engine" or decode_s <= 0.0:
        return 0
    return min(trajectory.max_tokens - trajectory.turns[-1].gen_tokens, int((now - trajectory.sent_at) / decode_s))
