"""Tasks of a user's file: one breaks in every way, one has a slow tool."""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import threading
import time
from typing import Any, NamedTuple

from libra_hpc.tasks.base import EnvironmentFailed, Episode, PolicyTurn, Signal, Task, TaskTokenizer, Tools, Turn, Why
from tests.host.sample_tools import detach, sleep_for


def hold(path: str) -> str:
    """Start a daemon, write its id to a file, and hang."""
    return detach(path, 600.0)


class Scripted(Episode):
    """The first token of a turn decides what happens."""

    prompt_id, prompt, max_tokens, stop_ids = "p", [1, 2], 4, (9,)

    async def step(self, turn: PolicyTurn, tools: Tools) -> Turn:
        if turn.tokens[0] == 0:
            raise RuntimeError("the task is broken")
        if turn.tokens[0] == 2:
            await tools.call("no such tool")
        if turn.tokens[0] == 3:
            return Turn([len((await tools.call("doze", 600.0)).outcome)])
        if turn.tokens[0] == 4:
            return Turn([6], done=True, reward=0.25, info={"turns": 2})
        if turn.tokens[0] == 6:
            return Turn([1, 3], new_sample=True)
        if turn.tokens[0] == 8:
            await tools.python("while True: pass")
        if turn.tokens[0] == 10:
            await asyncio.sleep(600)
        while turn.tokens[0] == 11:  # a loop of retries that takes its cancellation for an error of the judge
            try:
                await asyncio.sleep(600)
            except BaseException:
                continue
        if turn.tokens[0] == 12:
            results = await asyncio.gather(tools.call("nap", 1.0), tools.call("nap", 0.0))
            return Turn([len(result.outcome) for result in results])
        if turn.tokens[0] == 14:
            asyncio.current_task().cancel()  # type: ignore[union-attr]
            await asyncio.sleep(600)
        if turn.tokens[0] == 15:
            sys.exit(3)
        if turn.tokens[0] == 16:
            raise BaseException("no")
        if turn.tokens[0] == 19:
            asyncio.get_running_loop().call_later(0.1, self.unwanted)
        if turn.tokens[0] == 20:
            raise EnvironmentFailed("the index is away")
        if turn.tokens[0] == 18:
            os.fork()
        if turn.tokens[0] == 17:
            threading.Thread(target=time.sleep, args=(600.0,)).start()
        return Turn([7, 8], reward=0.5)


class Fragile(Task):
    """Index 13 cannot be opened."""

    tools = {"doze": sleep_for}

    def open(self, index: int, sample: int, progress: float) -> Episode:
        if index == 13:
            raise LookupError("no problem 13")
        return Scripted()


class Patient(Task):
    """Its tool takes longer than others."""

    tools = {"nap": sleep_for, "doze": sleep_for}
    tool_limits = {"nap": 60.0}

    def open(self, index: int, sample: int, progress: float) -> Episode:
        return Scripted()


class Crowd(Scripted):
    """Its prompt is the number of episodes that start with it."""

    starting = 0

    async def start(self, tools: Tools) -> None:
        Crowd.starting += 1
        self.prompt = [Crowd.starting]
        await asyncio.sleep(0.2)
        Crowd.starting -= 1


class Crowded(Patient):
    def open(self, index: int, sample: int, progress: float) -> Episode:
        return Crowd()


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
        return Scripted()


class Given(Episode):
    """Answers its only turn as the test has it."""

    def __init__(self, answer: object, prompt: object, max_tokens: object) -> None:
        self.prompt_id, self.stop_ids = "p", (9,)
        self.prompt, self.max_tokens = prompt, max_tokens  # type: ignore[assignment]
        self.answer = answer

    async def step(self, turn: PolicyTurn, tools: Tools) -> Turn:
        return self.answer  # type: ignore[return-value]


class Mistake(NamedTuple):
    """What a task answers to the only turn of an episode, or opens it with, and how the episode fails."""

    kind: str
    error: str
    answer: object = Turn([1])
    prompt: object = (1, 2)
    max_tokens: object = 4


def turn(*arguments: Any, **fields: Any) -> Turn:
    """A turn whose types nobody checks."""
    return Turn(*arguments, **fields)


def signal(tool: Any, seconds: float = 0.1) -> Signal:
    return Signal(tool, "ok", 1, seconds)


NAN, INF = float("nan"), float("inf")
FORM = "the answer does not fit the protocol (Expected `str`, got `int`"
NOT_32 = "not a finite number of 32 bits"
ODD = (
    Mistake("reward", f"BadReward: reward is nan, {NOT_32}", turn(done=True, reward=NAN)),
    Mistake("reward", f"BadReward: reward is -inf, {NOT_32}", turn(done=True, reward=-INF)),
    Mistake("reward", "BadReward: reward is 10000000000", turn(done=True, reward=10**400)),
    Mistake("reward", f"BadReward: reward is 1e+39, {NOT_32}", turn(done=True, reward=1e39)),
    Mistake("reward", "BadReward: reward is 'much', not a finite number", turn(done=True, reward="much")),
    Mistake("reward", "BadReward: reward is None, not a finite number", turn(done=True, reward=None)),
    Mistake("reward", f"BadReward: info['b'] is nan, {NOT_32}", turn(done=True, info={"a": 1.0, "b": NAN})),
    Mistake("answer", "BadAnswer: info is None, not a dict of numbers", turn(done=True, info=None)),
    Mistake("answer", f"BadAnswer: {FORM}", turn(done=True, info={3: 1.0})),
    Mistake("answer", "BadAnswer: step returned None, not a Turn", None),
    Mistake("answer", "BadAnswer: tokens is 'words', not a list of token ids", turn("words")),
    Mistake("answer", "BadAnswer: tokens is b'abcd', not a list of token ids", turn(b"abcd")),
    Mistake("answer", "BadAnswer: tokens = [1.5] holds something else than integers", turn([1.5])),
    Mistake("answer", "BadAnswer: tokens = [1, 2147483648] holds something else than integers", turn([1, 2**31])),
    Mistake("answer", "BadAnswer: tokens holds -1, and token ids are integers from 0", turn([5, -1])),
    Mistake("answer", "BadAnswer: tokens is empty, and a new sample needs at least one", turn([], new_sample=True)),
    Mistake("answer", f"BadAnswer: {FORM}", turn([1], [signal(3)])),
    Mistake("answer", "BadAnswer: signal.seconds is inf, not a finite number", turn([1], [signal("t", INF)])),
    Mistake("answer", "BadAnswer: prompt is 'words', not a list of token ids", prompt="words"),
    Mistake("answer", "BadAnswer: prompt is empty", prompt=[]),
    Mistake("answer", "BadAnswer: max_tokens is 0, not an integer >= 1", max_tokens=0),
)


class Odd(Task):
    """Prompt ``index`` is the index-th of `ODD`; beyond them a valid episode."""

    def open(self, index: int, sample: int, progress: float) -> Episode:
        valid = Mistake("", "", Turn([5], [signal("t")]))
        return Given(*(ODD[index] if index < len(ODD) else valid)[2:])


class NoTool(Task):
    """Declares a tool that cannot be imported by another process."""

    tools = {"nested": (lambda: None)}

    def open(self, index: int, sample: int, progress: float) -> Episode:
        return Scripted()


class Diary(Episode):
    """Writes its ends to a file; 1, 101, ... never start, 2, 102, ... cannot start, 3, 103, ... cannot close."""

    prompt_id, max_tokens, stop_ids = "p", 4, (9,)

    def __init__(self, path: str, index: int) -> None:
        self.path, self.index, self.kind = path, index, index % 100

    def note(self, text: str) -> None:
        with open(self.path, "a") as file:
            file.write(f"{self.index} {text}\n")

    async def start(self, tools: Tools) -> None:
        if self.kind == 1:
            await asyncio.sleep(600)
        if self.kind == 2:
            raise OSError("no container")
        self.prompt = [len((await tools.call("doze", seconds=0.0)).value)]

    async def step(self, turn: PolicyTurn, tools: Tools) -> Turn:
        if turn.tokens[0] == 0:
            raise RuntimeError("the task is broken")
        if turn.tokens[0] == 1:
            try:
                await asyncio.sleep(600)
            finally:
                await asyncio.sleep(0.05)
                self.note("cleaned up")
        return Turn(done=turn.tokens[0] == 4, reward=1.0, info={"room": turn.room, "stop": float(turn.stop == "stop")})

    async def truncated(self, tools: Tools) -> Turn:
        return Turn(reward=0.5)

    async def close(self, why: Why) -> None:
        await asyncio.sleep(0.01)
        self.note(why)
        if self.kind == 3:
            raise OSError("the container is gone")


class Kept(Task):
    """Its episodes hold something that they must free."""

    tools = {"doze": sleep_for}

    def __init__(self, tokenizer: TaskTokenizer, *, seed: int = 0, path: str) -> None:
        super().__init__(tokenizer, seed=seed)
        self.path = path

    def open(self, index: int, sample: int, progress: float) -> Episode:
        return Diary(self.path, index)


class Litter(Diary):
    """Starts a process in a session of its own, makes a temporary folder, and writes both down."""

    async def start(self, tools: Tools) -> None:
        process = await asyncio.create_subprocess_exec("sleep", "600", start_new_session=True)
        self.note(f"process {process.pid}")
        self.note(f"folder {tempfile.mkdtemp(prefix='of-a-task-')}")
        self.prompt = [1]

    async def step(self, turn: PolicyTurn, tools: Tools) -> Turn:
        await tools.call("hold", self.path + f".daemon{self.index}")
        return Turn(done=True)


class Logged(Kept):
    """Its diary has the beginning of each episode too."""

    def open(self, index: int, sample: int, progress: float) -> Episode:
        episode = Diary(self.path, index)
        episode.note("open")
        return episode


class Littering(Logged):
    """Its episodes leave processes and folders behind, unless somebody ends them."""

    tools = {"doze": sleep_for, "hold": hold}

    def open(self, index: int, sample: int, progress: float) -> Episode:
        return Litter(self.path, index)
