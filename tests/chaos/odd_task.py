"""The key-chain task with faults: which one, and when, is drawn by prompt, sample and attempt, or told by a file."""

from __future__ import annotations

import asyncio
import math
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from libra_hpc.tasks.base import Episode, PolicyTurn, TaskTokenizer, Tools, Turn
from libra_hpc.user_file import load_file

KeyChain = load_file(Path(__file__).parents[2] / "examples" / "keychain.py").KeyChain


class OddEpisode(Episode):
    """One of the real task, disturbed at its first turn."""

    def __init__(self, inner: Episode, task: OddKeyChain, index: int, sample: int) -> None:
        self._inner, self._task, self._place = inner, task, (index, sample)
        self.prompt_id, self.prompt = inner.prompt_id, inner.prompt
        self.max_tokens, self.stop_ids = inner.max_tokens, inner.stop_ids

    async def step(self, turn: PolicyTurn, tools: Tools) -> Turn:
        """The real answer, or what the fault makes of it."""
        fault = self._task.fault(*self._place)
        if fault == "raise":
            raise RuntimeError("the judge is down")
        if fault == "await":
            await asyncio.sleep(10_000.0)
        if fault == "block":
            time.sleep(10_000.0)
        if fault == "long":
            return Turn(tokens=[self.prompt[0]] * 1_600_000)
        answer = await self._inner.step(turn, tools)
        if fault == "nan" and answer.done:
            return replace(answer, reward=math.nan)
        if answer.done:
            rare = {"rare": 1.0} if self._place[1] == 0 else {}
            return replace(answer, info={**answer.info, "reward": 99.0, **rare})
        return answer


class OddKeyChain(KeyChain):
    """``once``: a few prompts have one of every kind of fault, each the first time it is met."""

    step_limit_s = 6.0

    def __init__(
        self, tokenizer: TaskTokenizer, *, seed: int = 0, once: bool = False, met: str = "", **options: Any
    ) -> None:
        super().__init__(tokenizer, seed=seed, **options)
        self._once, self._met = once, Path(met)

    def open(self, index: int, sample: int, progress: float) -> Any:
        """The real episode, disturbed."""
        return OddEpisode(super().open(index, sample, progress), self, index, sample)

    def fault(self, index: int, sample: int) -> str:
        """Which fault an episode has now."""
        kind = (
            {(9, 0): "nan", (14, 1): "raise", (19, 2): "await", (24, 3): "long", (29, 0): "block"}.get(
                (index, sample), ""
            )
            if self._once
            else ""
        )
        if kind in ("", "nan", "long"):
            return kind
        mark = self._met / f"{index}.{sample}"
        if mark.exists():
            return ""
        mark.touch()
        return kind
