"""Finished trajectories of earlier attempts, which the scheduling policy learns from at the start.

A resumed run passes lines of `trajectories.jsonl` to `Policy.finished` before the first turn.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from pathlib import Path

from libra_hpc.policies.scheduling.protocol import Finished
from libra_hpc.protocol.trace import recorded

MAX_RECORDS = 20_000
"""Most trajectories to learn from; older evidence has decayed."""


def history(own: Path, task: str) -> list[Finished]:
    """The last `MAX_RECORDS` trajectories of the run, oldest first; ``task``: the task of lines that name none."""
    return list(deque(records(own, task), MAX_RECORDS))


def records(path: Path, task: str = "") -> Iterator[Finished]:
    """What each trajectory of `recorded` teaches; ``task``: the task of lines that name none."""
    for one in recorded(path):
        if one.turns:
            yield Finished.of(one, f"{one.prompt_id}/{one.index}-{one.sample}-{one.attempt}", task)
