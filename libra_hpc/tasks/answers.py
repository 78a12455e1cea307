"""What a task's code returns, checked and framed: every message is one the leader can read, every number is finite."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping
from typing import Any

from libra_hpc.protocol.codec import LENGTH, FrameError, pack_i32
from libra_hpc.protocol.env import EpisodeOpened, EpisodeStepped, FromHost, from_host

from .base import Episode, Turn

LARGEST = 3.4028234663852886e38
"""Of float32, in which rewards are trained: a larger one is infinite there."""
LARGEST_ID = 2**31 - 1


class BadReward(ValueError):
    """A reward, or a number of ``info``, that is not finite; the message is one sentence."""


class BadAnswer(ValueError):
    """Another part of an answer that is not what `libra_hpc.tasks.base` asks for; the message is one sentence."""


def opened(name: str, episode: Episode) -> bytes:
    """The frame of `EpisodeOpened`; raises `BadAnswer`."""
    prompt = _ids("prompt", episode.prompt)
    stop_ids = episode.stop_ids
    _ids("stop_ids", stop_ids)
    if not prompt:
        raise BadAnswer("prompt is empty, and a turn needs at least one token before it")
    if not isinstance(episode.max_tokens, int) or episode.max_tokens < 1:
        raise BadAnswer(f"max_tokens is {shown(episode.max_tokens)}, not an integer >= 1")
    return _frame(EpisodeOpened(name, episode.prompt_id, prompt, episode.max_tokens, tuple(stop_ids)))


def stepped(name: str, turn: Turn) -> bytes:
    """The frame of `EpisodeStepped`; raises `BadReward` or `BadAnswer`."""
    if not isinstance(turn, Turn):
        raise BadAnswer(f"step returned {shown(turn)}, not a Turn")
    seconds = getattr(turn.signal, "seconds", 0.0)
    if isinstance(seconds, float) and not math.isfinite(seconds):
        raise BadAnswer(f"signal.seconds is {seconds}, not a finite number")
    if not turn.done:
        return _frame(EpisodeStepped(name, _ids("tokens", turn.tokens), turn.signal, False, 0.0, {}))
    if not isinstance(turn.info, Mapping):
        raise BadAnswer(f"info is {shown(turn.info)}, not a dict of numbers")
    info = {key: _number(f"info[{shown(key)}]", value) for key, value in turn.info.items()}
    return _frame(EpisodeStepped(name, b"", turn.signal, True, _number("reward", turn.reward), info))


def shown(value: object) -> str:
    """A value in an error message: short, and never an error itself."""
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
    """Frame a message, and read it as the leader will: a wrong type inside it fails here, not there."""
    try:
        frame = from_host.frame(message)
        from_host.decode(memoryview(frame)[LENGTH.size :])
    except (FrameError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise BadAnswer(f"the answer does not fit the protocol ({error})") from error
    return frame
