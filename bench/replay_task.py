"""A task that replays a workload file, so that a real run gets the same work as the simulator.

Prompts of siblings have equal random tokens, all else differs: prefix caches behave as in a real run.  `bench.replay`
sets the length of every turn.
"""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import msgspec

from libra_hpc.protocol.trace import TrajectoryRecord, signals_of
from libra_hpc.tasks.base import Episode, PolicyTurn, Task, TaskTokenizer, Tools, Turn

TOKENS = (3, 96)
"""Range of the random token ids, within the vocabulary of any tiny policy."""


def random_tokens(count: int, *seed: Any) -> list[int]:
    """``count`` token ids that depend on ``seed`` alone."""
    return random.Random(":".join(map(str, seed))).choices(range(*TOKENS), k=count)


class Replay(Task):
    """``work`` is a JSON file with a list of `TrajectoryRecord`, ``group_size`` for each prompt."""

    def __init__(self, tokenizer: TaskTokenizer, *, seed: int = 0, work: str, group_size: int) -> None:
        super().__init__(tokenizer, seed=seed)
        self._work = msgspec.json.decode(Path(work).read_bytes(), type=list[TrajectoryRecord])
        self._group_size = group_size

    def open(self, index: int, sample: int, progress: float) -> Episode:
        """Replay the trajectory at this place of the file."""
        return ReplayedEpisode(self._work[index * self._group_size + sample], self.seed)


class ReplayedEpisode(Episode):
    """One trajectory; it ends after its last turn."""

    def __init__(self, spec: TrajectoryRecord, seed: int) -> None:
        self._spec, self._seed, self._turn = spec, seed, 0
        self.prompt_id = spec.prompt_id
        self.prompt = random_tokens(spec.prompt_tokens, seed, spec.prompt_id)
        self.max_tokens = max(turn.gen_tokens for turn in spec.turns)
        self.stop_ids = ()

    async def step(self, turn: PolicyTurn, tools: Tools) -> Turn:
        spec, tokens = self._spec, turn.tokens
        played = spec.turns[self._turn]
        if len(tokens) != played.gen_tokens:
            raise ValueError(
                f"turn {self._turn} of {spec.prompt_id}/{spec.sample} has {len(tokens)} tokens, not {played.gen_tokens}"
            )
        self._turn += 1
        if played.tool_s:
            await asyncio.sleep(played.tool_s)
        done = self._turn == len(spec.turns)
        count, fresh = (0, False) if done else (spec.turns[self._turn].new_tokens, spec.turns[self._turn].new_sample)
        signals = signals_of(played, count)
        added = random_tokens(count, self._seed, spec.prompt_id, spec.sample, self._turn)
        return Turn(added, signals, done, reward=0.0, new_sample=fresh)
