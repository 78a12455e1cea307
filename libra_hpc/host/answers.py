"""What a task's code declares and returns, checked: limits, messages that decode at the leader, finite numbers."""

from __future__ import annotations

import inspect
import math
import reprlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from libra_hpc.errors import invalid
from libra_hpc.protocol.codec import LENGTH, FrameError, pack_i32
from libra_hpc.protocol.env import EpisodeOpened, EpisodeStepped, FromHost, from_host
from libra_hpc.tasks.base import Episode, Task, Turn
from libra_hpc.user_file import FILE_MODULE

from .toolproc import ToolRef


def tool_refs(tools: Mapping[str, Callable[..., Any]]) -> tuple[ToolRef, ...]:
    """Describe declared tools so that another process can import them; raises `UserError` for lambdas and nested
    functions.
    """
    refs = []
    for name, function in tools.items():
        module, qualname = getattr(function, "__module__", None) or "", getattr(function, "__qualname__", "")
        if not module or module == "__main__" or "<" in qualname or not qualname or not callable(function):
            valid = "a function at the top level of a module"
            raise invalid(f"tools[{name!r}]", function, "cannot be run in a tool process", valid)
        if inspect.iscoroutinefunction(function):
            raise invalid(f"tools[{name!r}]", function, "nobody awaits it in a tool process", "a plain function")
        file = inspect.getsourcefile(sys.modules[module]) if module.startswith(FILE_MODULE) else None
        refs.append(ToolRef(name, module, file or "", qualname))
    return tuple(refs)


def tool_limits(task: Task, default_s: float) -> dict[str, float]:
    """Seconds per call of each tool: ``default_s``, or the task's own limit if longer; raises `UserError`."""
    for name, limit_s in task.tool_limits.items():
        if name not in task.tools:
            raise invalid("tool_limits", name, "the task declares no such tool", task.tools)
        _check(f"tool_limits[{name!r}]", limit_s)
    return {name: max(default_s, task.tool_limits.get(name, 0.0)) for name in task.tools}


def step_limit(task: Task, default_s: float) -> float:
    """Seconds per step, in the same way; 0: no limit."""
    _check("step_limit_s", task.step_limit_s)
    return max(default_s, task.step_limit_s)


def busy_limit(task: Task) -> float:
    """Longest time that the task declares for a step or tool call; 0: none."""
    _check("step_limit_s", task.step_limit_s)
    return max(task.step_limit_s, *tool_limits(task, 0.0).values(), 0.0)


def _check(field: str, value: object) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool) or not (0.0 <= value < math.inf):
        raise invalid(field, value, "not a length of time", "a number of seconds >= 0")


LARGEST = 3.4028234663852886e38
"""Largest float32, the type in which rewards are trained."""
LARGEST_ID = 2**31 - 1


class BadReward(ValueError):
    """A reward, or a number of ``info``, that is not finite."""


class BadAnswer(ValueError):
    """Another part of an answer that violates `libra_hpc.tasks.base`."""


def opened(name: str, episode: Episode) -> bytes:
    prompt = _ids("prompt", episode.prompt)
    stop_ids = episode.stop_ids
    _ids("stop_ids", stop_ids)
    if not prompt:
        raise BadAnswer("prompt is empty, and a turn needs at least one token before it")
    if not isinstance(episode.max_tokens, int) or episode.max_tokens < 1:
        raise BadAnswer(f"max_tokens is {shown(episode.max_tokens)}, not an integer >= 1")
    message = EpisodeOpened(
        episode=name,
        prompt_id=episode.prompt_id,
        tokens=prompt,
        max_tokens=episode.max_tokens,
        stop_ids=tuple(stop_ids),
    )
    return _frame(message)


def stepped(name: str, turn: Turn, max_tokens: int = 0) -> bytes:
    if not isinstance(turn, Turn):
        raise BadAnswer(f"step returned {shown(turn)}, not a Turn")
    if not isinstance(turn.signals, list | tuple):
        raise BadAnswer(f"signals is {shown(turn.signals)}, not a list of Signal")
    signals = tuple(turn.signals)
    for signal in signals:
        seconds = getattr(signal, "seconds", 0.0)
        if isinstance(seconds, float) and not math.isfinite(seconds):
            raise BadAnswer(f"signal.seconds is {seconds}, not a finite number")
    if not isinstance(turn.info, Mapping):
        raise BadAnswer(f"info is {shown(turn.info)}, not a dict of numbers")
    info = {key: _number(f"info[{shown(key)}]", value) for key, value in turn.info.items()}
    reward = _number("reward", turn.reward)
    tokens, fresh = b"" if turn.done else _ids("tokens", turn.tokens), turn.new_sample and not turn.done
    if fresh and not tokens:
        raise BadAnswer("tokens is empty, and a new sample needs at least one token before its first turn")
    answer = EpisodeStepped(name, tokens, signals, done=bool(turn.done), reward=reward, info=info, dropped=turn.dropped)
    return _frame(msgspec.structs.replace(answer, new_sample=fresh, max_tokens=max_tokens))


def shown(value: object) -> str:
    """A value as short text for an error message; never raises."""
    try:
        return reprlib.repr(value)
    except Exception:
        return f"an object of {type(value).__name__}"


def _number(what: str, value: Any) -> float:
    try:
        number = float(value)
    except Exception as error:  # whatever __float__ raises
        raise BadReward(f"{what} is {shown(value)}, not a finite number") from error
    if not abs(number) <= LARGEST:  # NaN compares as False
        raise BadReward(f"{what} is {number}, not a finite number of 32 bits")
    return number


def _ids(what: str, values: Any) -> bytes:
    listed = hasattr(values, "__len__") and hasattr(values, "__iter__")
    if not listed or isinstance(values, str | bytes | bytearray | Mapping):
        raise BadAnswer(f"{what} is {shown(values)}, not a list of token ids")
    ids = list(values)
    try:
        data = pack_i32(ids)
        low = min(ids, default=0)
    except (TypeError, ValueError, OverflowError) as error:
        raise BadAnswer(f"{what} = {shown(ids)} holds something else than integers from 0 to {LARGEST_ID}") from error
    if low < 0:
        raise BadAnswer(f"{what} holds {low}, and token ids are integers from 0 to {LARGEST_ID}")
    return data


def _frame(message: FromHost) -> bytes:
    """Frame a message and decode it as the leader will: a wrong type inside it fails here."""
    try:
        frame = from_host.frame(message)
        from_host.decode(memoryview(frame)[LENGTH.size :])
    except (FrameError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise BadAnswer(f"the answer does not fit the protocol ({error})") from error
    return frame
