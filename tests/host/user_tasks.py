"""Tasks of a user's file: one breaks in every way, one has a slow tool."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable

from libra_hpc.tasks.base import Episode, Signal, Task, TaskTokenizer, Tools, Turn
from tests.host.sample_tools import detach


def hold(path: str) -> str:
    """Start a daemon, write its id to a file, and hang."""
    return detach(path, 600.0)


def doze(seconds: float) -> str:
    time.sleep(seconds)
    return "rested"


class Scripted(Episode):
    """The first token of a turn decides what happens."""

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
    """Index 13 cannot be opened."""

    tools = {"doze": doze, "hold": hold}

    def __init__(self, tokenizer: TaskTokenizer, *, seed: int = 0, path: str = "") -> None:
        super().__init__(tokenizer, seed=seed)
        self.path = path

    def open(self, index: int, sample: int, progress: float) -> Episode:
        if index == 13:
            raise LookupError("no problem 13")
        return Scripted(self.path)


def nap(seconds: float) -> str:
    """A tool with a declared limit."""
    time.sleep(seconds)
    return "rested"


class Waiting(Episode):
    """The first token of a turn decides what it waits for."""

    prompt_id, prompt, max_tokens, stop_ids = "p", [1, 2], 4, (9,)

    async def step(self, tokens: list[int], tools: Tools) -> Turn:
        if tokens[0] == 0:
            await asyncio.sleep(600)
        while tokens[0] == 1:  # a loop of retries that takes its cancellation for an error of the judge
            try:
                await asyncio.sleep(600)
            except BaseException:
                continue
        if tokens[0] == 2:
            results = await asyncio.gather(tools.call("nap", 1.0), tools.call("nap", 0.0))
            return Turn([len(result.outcome) for result in results])
        if tokens[0] == 3:
            return Turn([len((await tools.call("doze", 600.0)).outcome)])
        if tokens[0] == 4:
            asyncio.current_task().cancel()  # type: ignore[union-attr]
            await asyncio.sleep(600)
        if tokens[0] == 5:
            sys.exit(3)
        return Turn([7])


class Patient(Task):
    """Its tool takes longer than others."""

    tools = {"nap": nap, "doze": doze}
    tool_limits = {"nap": 60.0}

    def open(self, index: int, sample: int, progress: float) -> Episode:
        return Waiting()


class NoSuchTool(Patient):
    """Declares a limit for a tool that it lacks."""

    tool_limits = {"napp": 60.0}


class NoTime(Patient):
    """Declares an invalid limit."""

    step_limit_s = float("nan")


class Heavy(Task):
    """Computes for a while to open an episode."""

    def open(self, index: int, sample: int, progress: float) -> Episode:
        time.sleep(0.6)
        return Waiting()


class Given(Episode):
    """Answers its only turn as the test has it."""

    def __init__(self, answer: object, prompt: object, max_tokens: object) -> None:
        self.prompt_id, self.stop_ids = "p", (9,)
        self.prompt, self.max_tokens = prompt, max_tokens  # type: ignore[assignment]
        self.answer = answer

    async def step(self, tokens: list[int], tools: Tools) -> Turn:
        return self.answer  # type: ignore[return-value]


def answering(answer: object, prompt: object = (1, 2), max_tokens: object = 4) -> Episode:
    return Given(answer, prompt, max_tokens)


ODD: dict[str, Callable[[], Episode]] = {
    "nan": lambda: answering(Turn(done=True, reward=float("nan"))),
    "infinite": lambda: answering(Turn(done=True, reward=-float("inf"))),
    "beyond float": lambda: answering(Turn(done=True, reward=10**400)),
    "beyond float32": lambda: answering(Turn(done=True, reward=1e39)),
    "text reward": lambda: answering(Turn(done=True, reward="much")),  # type: ignore[arg-type]
    "no reward": lambda: answering(Turn(done=True, reward=None)),  # type: ignore[arg-type]
    "nan info": lambda: answering(Turn(done=True, info={"solved": 1.0, "speed": float("nan")})),
    "no info": lambda: answering(Turn(done=True, info=None)),  # type: ignore[arg-type]
    "key of info": lambda: answering(Turn(done=True, info={3: 1.0})),  # type: ignore[dict-item]
    "no turn": lambda: answering(None),
    "text": lambda: answering(Turn("words")),  # type: ignore[arg-type]
    "bytes": lambda: answering(Turn(b"abcd")),  # type: ignore[arg-type]
    "fractions": lambda: answering(Turn([1.5])),  # type: ignore[list-item]
    "beyond int32": lambda: answering(Turn([1, 2**31])),
    "negative": lambda: answering(Turn([5, -1])),
    "signal": lambda: answering(Turn([1], Signal(3, "ok", 1, 0.1))),  # type: ignore[arg-type]
    "seconds": lambda: answering(Turn([1], Signal("t", "ok", 1, float("inf")))),
    "text prompt": lambda: answering(Turn([1]), "words"),
    "empty prompt": lambda: answering(Turn([1]), []),
    "no room": lambda: answering(Turn([1]), [1], 0),
}
"""Invalid answers, by their mistake."""


class Odd(Task):
    """Prompt ``index`` is the index-th of `ODD`; beyond them a valid episode."""

    def open(self, index: int, sample: int, progress: float) -> Episode:
        made = list(ODD.values())
        return made[index]() if index < len(made) else answering(Turn([5], Signal("t", "ok", 1, 0.1)))


class NoTool(Task):
    """Declares a tool that cannot be imported by another process."""

    tools = {"nested": (lambda: None)}

    def open(self, index: int, sample: int, progress: float) -> Episode:
        return Scripted()
