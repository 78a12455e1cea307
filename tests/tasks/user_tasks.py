"""Tasks as a user's file has them: one that breaks in every way, and one whose tool is slow."""

from __future__ import annotations

import time

from libra_hpc.tasks.base import Episode, Task, TaskTokenizer, Tools, Turn
from tests.tasks.sample_tools import detach


def hold(path: str) -> str:
    """Leave a daemon behind, its id in a file, and hang."""
    return detach(path, 600.0)


def doze(seconds: float) -> str:
    time.sleep(seconds)
    return "rested"


class Scripted(Episode):
    """The first token of a turn says what happens."""

    prompt_id, prompt, max_tokens, stop_ids = "p", [1, 2], 4, (9,)

    def __init__(self, path: str = "") -> None:
        self.path = path

    async def step(self, tokens: list[int], tools: Tools) -> Turn:
        if tokens[0] == 0:
            raise RuntimeError("the task is broken")
        if tokens[0] == 1:
            return Turn([5], done=True, reward=float("nan"), info={"bad": "text"})  # type: ignore[dict-item]
        if tokens[0] == 2:
            await tools.call("no such tool")
        if tokens[0] == 3:
            return Turn([len((await tools.call("doze", 600.0)).outcome)])
        if tokens[0] == 4:
            return Turn([6], done=True, reward=0.25, info={"turns": 2})
        if tokens[0] == 5:
            return Turn([len((await tools.call("hold", self.path)).outcome)])
        return Turn([7, 8])


class Fragile(Task):
    """Index 13 cannot even be opened."""

    tools = {"doze": doze, "hold": hold}

    def __init__(self, tokenizer: TaskTokenizer, *, seed: int = 0, path: str = "") -> None:
        super().__init__(tokenizer, seed=seed)
        self.path = path

    def open(self, index: int, sample: int, progress: float) -> Episode:
        if index == 13:
            raise LookupError("no problem 13")
        return Scripted(self.path)


class NoTool(Task):
    """Declares a tool that cannot be imported by another process."""

    tools = {"nested": (lambda: None)}

    def open(self, index: int, sample: int, progress: float) -> Episode:
        return Scripted()
