"""Plays the start of one episode before a job is queued: ``python -m libra_hpc.host.trial``, as `libra_hpc.host.host`.

- The task is built, sample 0 of prompt 0 opened, and at most `TURNS` turns of a single stop token are answered.
- It cannot be built or opened, or a step is no coroutine -> a user's mistake, exit code 2.
- A step raises or answers what cannot be used -> a sentence on stdout: other turns may end better.

Tools run in the sandbox of an environment host, in the folder of the socket, to which nobody connects.
"""

from __future__ import annotations

import asyncio
import inspect
import sys
from pathlib import Path

import msgspec

from libra_hpc.errors import UserError, invalid
from libra_hpc.tasks.base import Episode, Task, Turn
from libra_hpc.tasks.task_registry import build_task
from libra_hpc.tasks.tokenizer import TaskTokenizer

from . import answers
from .contain import hide_memory
from .declared import step_limit, tool_limits
from .host import main
from .sandbox import Sandbox
from .settings import HostConfig
from .step import Step

TURNS = 2
"""The first may end the episode; the second follows an answer of the environment."""


async def play(path: str, config: HostConfig) -> int:
    """See the module docstring; returns 0, or raises `UserError`."""
    config = msgspec.structs.replace(config, tool_processes=1)
    tokenizer = TaskTokenizer(config.model)
    try:
        task = build_task(config.task, config.options, config.seed, tokenizer, chat=config.chat)
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        raise _mistake(config, "the task cannot be built", error) from error
    tools = Sandbox(task.tools, config, folder=Path(path).parent, limits=tool_limits(task, config.tool_timeout_s))
    try:
        await tools.start()
        episode = _open(config, task)
        stop = episode.stop_ids[:1] or (tokenizer.eos_id or 0,)
        for _ in range(TURNS):
            outcome = await _step(episode, list(stop), tools, step_limit(task, config.step_limit_s))
            if isinstance(outcome, BaseException):
                print(f"a turn of one stop token fails: {type(outcome).__name__}: {outcome}")
                break
            if outcome.done:
                break
    finally:
        tools.close()
    return 0


def _open(config: HostConfig, task: Task) -> Episode:
    try:
        episode = task.open(0, 0, 0.0)
        answers.opened("trial", episode)
    except (Exception, SystemExit) as error:
        raise _mistake(config, "its open fails", error) from error
    if not inspect.iscoroutinefunction(episode.step):
        why = f"the step of {type(episode).__name__} is no coroutine function"
        raise invalid("task.name", config.task, why, "`async def step(self, tokens, tools)`")
    return episode


async def _step(episode: Episode, tokens: list[int], tools: Sandbox, limit_s: float) -> Turn | BaseException:
    ended: asyncio.Future[Turn | BaseException] = asyncio.get_running_loop().create_future()
    Step(episode, tokens, tools, limit_s, over=ended.set_result)
    outcome = await ended
    try:
        if isinstance(outcome, Turn):
            answers.stepped("trial", outcome)
    except ValueError as error:
        return error
    return outcome


def _mistake(config: HostConfig, what: str, error: BaseException) -> UserError:
    return invalid("task.name", config.task, f"{what} ({type(error).__name__}: {error})".replace("\n", " "))


if __name__ == "__main__":
    hide_memory()
    sys.exit(main("libra_hpc.host.trial", HostConfig, play))
