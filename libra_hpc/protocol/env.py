"""Rollout leader <-> environment host process (which runs the task's code and its sandboxed tools, never in the
leader's own process)."""

from __future__ import annotations

from typing import Union

import msgspec

from .codec import Codec


class Signal(msgspec.Struct, frozen=True, array_like=True):
    """What a tool call says about the work that remains: structure only, never content."""

    tool: str
    outcome: str
    """``ok`` | ``error`` | ``timeout`` | a task's own short class such as ``miss``"""
    payload_tokens: int
    """What the answer adds to the context."""
    seconds: float
    exit_code: int | None = None
    """Of a process the tool ran; None when it ran none."""
    passed: int | None = None
    """Tests that passed, when the tool ran tests."""
    failed: int | None = None


class OpenEpisode(msgspec.Struct, tag=True, frozen=True):
    """Start sample ``sample`` of prompt number ``index`` of the data order; ``progress`` in [0, 1] is the run's, for
    a drifting mix."""

    episode: str
    index: int
    sample: int
    progress: float


class StepEpisode(msgspec.Struct, tag=True, frozen=True):
    """The policy's turn: int32 token ids, stop id included."""

    episode: str
    tokens: bytes


class CloseEpisode(msgspec.Struct, tag=True, frozen=True):
    """Forget an episode (aborted or re-submitted elsewhere)."""

    episode: str


class EpisodeOpened(msgspec.Struct, tag=True, frozen=True):
    """The prompt and the limits of one turn."""

    episode: str
    prompt_id: str
    """Same prompt = same id, over the whole run."""
    tokens: bytes
    max_tokens: int
    """Most tokens of one turn."""
    stop_ids: tuple[int, ...]


class EpisodeStepped(msgspec.Struct, tag=True, frozen=True):
    """The environment's answer; ``reward`` only when ``done``."""

    episode: str
    tokens: bytes
    """int32, what the environment adds to the context (empty when done)."""
    signal: Signal | None
    done: bool
    reward: float
    info: dict[str, float]
    """Numbers for monitors (solved, turns over budget, ...), when done."""


class EpisodeFailed(msgspec.Struct, tag=True, frozen=True):
    """The task's code failed; the trajectory is dropped and reported, the host lives on."""

    episode: str
    error: str
    """Begins with the exception's type."""
    kind: str = "raised"
    """``raised`` (its code raised) | ``timeout`` (a step beyond its limit) | ``reward`` (a reward or a number of
    ``info`` that is not finite) | ``answer`` (another part of an answer that is not what the protocol asks for)"""


class HostReady(msgspec.Struct, tag=True, frozen=True):
    """The task is constructed."""

    task: str
    step_limit_s: float = 0.0
    """Most seconds until an answer to `StepEpisode`; 0: unknown.  Infinite: the host itself ends overdue steps,
    whose tool calls have limits of their own and may wait long for a free process; `HostAlive` says that it can."""
    busy_s: float = 0.0
    """Longest time the task declares for a step or a tool: for so long its code may hold up `HostAlive`."""


class HostAlive(msgspec.Struct, tag=True, frozen=True):
    """Sent once a second by the host's event loop: while it is missing, code of the task holds up every episode."""


ToHost = Union[OpenEpisode, StepEpisode, CloseEpisode]
FromHost = Union[HostReady, HostAlive, EpisodeOpened, EpisodeStepped, EpisodeFailed]

to_host: Codec[ToHost] = Codec(ToHost)
from_host: Codec[FromHost] = Codec(FromHost)
