"""The trajectories that a run rolls out next, estimated from its newest eta + 1 batches of groups and older ones alike.

Trained batches are eta + 1 batches old, and short trajectories finish first. Admitted groups are neither. An unfinished
trajectory counts as finished ones of a similar prompt, at most an octave of tokens off:

- r running trajectories of a group -> r evenly spaced quantiles of the lengths beyond their present mean.
- Trajectories that no engine has received -> quantiles of all of these lengths.
- No such prompt has finished, running -> twice the present length, the expectation when only the age is known.
- The same, waiting -> not counted.
- The batch before has their means within `ALIKE` standard errors -> it counts, and the one before it is asked.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from math import hypot, log2, sqrt
from statistics import fmean, pstdev

from msgspec.structs import replace

from libra_hpc.protocol.plan import GroupFact, PlanSnapshot, TrajectoryFact
from libra_hpc.protocol.trace import TrajectoryRecord, TurnRecord

SIMILAR = 64
"""Newest finished trajectories of an octave of prompt tokens. Half: quantiles of long tails scatter; double: older
policies count."""
MIN_SIMILAR = 8
"""Fewest finished trajectories of a similar prompt from which lengths are taken."""
ALIKE = 2.0
"""Half: steady work counts as changed, and nodes follow the scatter of batches; double: slow drift is seen late."""
BATCHES = 12
"""Most that count, and the shortest horizon, unless the run ends before: batches of large runs take many minutes. Half:
they scatter more than splits differ."""


def coming_work(snapshot: PlanSnapshot) -> list[list[TrajectoryFact]]:
    """The newest groups, finished or as expected, in the order of admission."""
    groups, octaves = dict[int, list[TrajectoryFact]](), dict[int, deque[TrajectoryFact]]()
    for t in snapshot.trajectories:
        octaves.setdefault(_octave(t.prompt), deque(maxlen=SIMILAR)).append(t)
        groups.setdefault(t.group, []).append(t)
    for group in snapshot.groups:
        near = _octave(group.prompt)
        like = [t for octave in (near - 1, near, near + 1) for t in octaves.get(octave, ())]
        for t in _expected(group, sorted(like, key=lambda t: t.generated)):
            groups.setdefault(group.index, []).append(t)
    size = snapshot.prompts_per_step
    newest = [t.group for t in snapshot.trajectories[-size * snapshot.group_size :]] + [
        g.index for g in snapshot.groups
    ]
    end = 1 + max(newest, default=-1)
    first = end - (snapshot.eta + 1) * size
    found = coming = [groups[at] for at in range(first, end) if at in groups]
    while batch := [groups[at] for at in range(first - size, first) if at in groups]:
        if len(found) >= BATCHES * size or not _alike(batch, coming):
            break
        found, first = batch + found, first - size
    return found


def means(groups: Sequence[Sequence[TrajectoryFact]]) -> list[tuple[float, float]]:
    """Mean and standard error of generated tokens and of contexts.

    Trajectories of a group are alike, so that the means of groups are the samples.
    """
    found = ([fmean(getattr(t, what) for t in group) for group in groups] for what in ("generated", "context"))
    return [(fmean(each), pstdev(each) / sqrt(len(each))) for each in found]


def _alike(some: Sequence[Sequence[TrajectoryFact]], others: Sequence[Sequence[TrajectoryFact]]) -> bool:
    both = zip(means(some), means(others), strict=True)
    return all(abs(mean - other) <= ALIKE * hypot(error, its_error) for (mean, error), (other, its_error) in both)


def records(groups: Sequence[Sequence[TrajectoryFact]]) -> list[TrajectoryRecord]:
    """The groups as the simulator plays them."""
    return [_record(t, index, sample) for index, group in enumerate(groups) for sample, t in enumerate(group)]


def _octave(prompt: int) -> int:
    return int(log2(max(1, prompt)))


def _expected(group: GroupFact, like: Sequence[TrajectoryFact]) -> Iterator[TrajectoryFact]:
    """The unfinished trajectories of a group; ``like``: finished ones of similar prompts, by length."""
    age = group.generated / max(1, group.running)
    if len(like) >= MIN_SIMILAR:
        yield from _quantiles([t for t in like if t.generated > age] or like[-1:], group.running, group.prompt)
        yield from _quantiles(like, group.waiting, group.prompt)
    elif group.running and group.generated:
        length = max(1, int(2 * age))
        expected = TrajectoryFact(
            index=-1, at=0.0, generated=length, context=group.prompt + length, turns=1, tool_s=0.0, prompt=group.prompt
        )
        yield from [expected] * group.running


def _quantiles(ordered: Sequence[TrajectoryFact], count: int, prompt: int) -> Iterator[TrajectoryFact]:
    for k in range(count):
        like = ordered[int((k + 0.5) * len(ordered) / count)]
        yield replace(like, context=like.context - like.prompt + prompt, prompt=prompt)


def _record(t: TrajectoryFact, group: int, sample: int) -> TrajectoryRecord:
    """Turns of equal length: a snapshot has only their sums."""
    turns = max(1, t.turns)
    prompt = max(1, t.prompt or t.context - t.generated)
    generated = max(turns, t.generated)
    own, added = generated // turns, max(0, t.context - prompt - generated) // max(1, turns - 1)
    tool_s = max(0.0, t.tool_s) / max(1, turns - 1)
    first = [TurnRecord(added if turn else 0, own, tool="tool", tool_s=tool_s) for turn in range(turns - 1)]
    last = TurnRecord(added if first else 0, generated - own * (turns - 1))
    return TrajectoryRecord(str(group), sample, prompt, (*first, last))
