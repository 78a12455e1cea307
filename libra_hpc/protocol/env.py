"""Rollout leader <-> environment host, the process that runs the task's code and its sandboxed tools."""

from __future__ import annotations

from typing import Annotated, Union

import msgspec

from .codec import Codec
from .engine_state import Doing

EVALUATIONS, PROMPTS = 1 << 60, 1 << 32
"""First number of a prompt of an evaluation; numbers of each evaluation."""


def evaluation_index(place: int, prompt: int) -> int:
    """The number of a prompt of the evaluation in that place of ``task.eval``."""
    return EVALUATIONS + place * PROMPTS + prompt


BRANCH = "/"
"""Between an episode's name and that of another sample of it that grows beside the first, `EpisodeOpened` unasked."""


class Signal(msgspec.Struct, frozen=True, array_like=True):
    """What a tool call reports about the remaining work: structure only, never content."""

    tool: str
    outcome: str
    """``ok`` | ``error`` | ``timeout`` | a class of the task's own such as ``miss``"""
    payload_tokens: int
    """Tokens that the answer adds to the context."""
    seconds: float
    exit_code: int | None = None
    """Exit code of the tool's process."""
    passed: int | None = None
    """Passed tests, when the tool ran tests."""
    failed: int | None = None


class OpenEpisode(msgspec.Struct, tag=True, frozen=True):
    """Start sample ``sample`` of prompt ``index`` of the data order.

    ``progress`` in [0, 1] is the run's, for a task that drifts.
    """

    episode: str
    index: int
    sample: int
    progress: float


class StepEpisode(msgspec.Struct, tag=True, frozen=True):
    """The policy's turn: int32 token ids, stop id included."""

    episode: str
    tokens: bytes
    room: int
    """Tokens that the context still has room for, behind this turn."""
    versions: tuple[tuple[int, int], ...] = ()
    """(weight version, tokens generated under it), in order."""


class TruncateEpisode(msgspec.Struct, tag=True, frozen=True):
    """The context has no room for another turn: ask for the reward of what there is."""

    episode: str


class CloseEpisode(msgspec.Struct, tag=True, frozen=True):
    """Drop an episode: it was aborted, or goes on elsewhere."""

    episode: str


class EpisodeOpened(msgspec.Struct, tag=True, frozen=True):
    """The prompt and the limits of one turn; of a branch its whole context."""

    episode: str
    prompt_id: str
    """The same for all samples of a prompt, over the whole run."""
    tokens: bytes
    max_tokens: int
    """Most tokens of one turn."""
    stop_ids: tuple[int, ...]


class EpisodeStepped(msgspec.Struct, tag=True, frozen=True):
    """The environment's answer; ``reward`` is the trajectory's when ``done``, and before the turn's."""

    episode: str
    tokens: bytes
    """int32, what the environment adds to the context (empty when done)."""
    signals: tuple[Signal, ...]
    """One for each tool call of the turn."""
    done: bool
    reward: float
    info: dict[str, float]
    """The task's own numbers (solved, turns over budget, ...); one of a later turn replaces an earlier one."""
    max_tokens: int = 0
    """Most tokens of the next turn; 0: as before."""
    new_sample: bool = False
    """``tokens`` are the next turn's whole context: what was before is a finished sample of the trajectory."""
    dropped: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Tokens at the end of the policy's turn that are no part of it: neither trained nor in the context."""


class EpisodeFailed(msgspec.Struct, tag=True, frozen=True):
    """The task's code failed: the attempt is dropped and reported, the host goes on."""

    episode: str
    error: str
    """Begins with the exception's type."""
    kind: str = "raised"
    """``raised`` (the code raised) | ``environment`` (it raised `EnvironmentFailed`) | ``timeout`` (a step exceeded its
    limit) | ``reward`` (a reward or a number of ``info`` is not finite) | ``answer`` (another part of the answer
    violates the protocol)
    """


class TurnUnwanted(msgspec.Struct, tag=True, frozen=True):
    """Nobody waits any more for the turn that an engine has: what there is of it goes to the episode."""

    episode: str


class ChatChoice(msgspec.Struct, frozen=True):
    """How the policy's chat is written, and how that was found."""

    template: str
    """SHA-256 of the template's text."""
    checks: int
    """Comparisons of the self-test, all of which it passed."""
    calls: str = ""
    """How tool calls are written (`libra_hpc.chat.dialects.Calls`); empty: the task has no tools."""

    def __str__(self) -> str:
        calls = f", tool calls as {self.calls}" if self.calls else ""
        return f"template {self.template[:12]}{calls}, {self.checks} self-tests passed"


class HostReady(msgspec.Struct, tag=True, frozen=True):
    """The task is constructed."""

    task: str
    step_limit_s: float = 0.0
    """Most seconds until an answer to `StepEpisode`; 0: unknown.

    Infinite: the host itself ends overdue steps, and `Doing` shows that it works while tool calls wait.
    """
    chats: tuple[ChatChoice, ...] = ()
    """Chat formats of its chat tasks."""


class HostLost(msgspec.Struct, tag=True, frozen=True):
    """In the place of a message of a host: it ended, and another has followed it."""

    reason: str


ToHost = Union[OpenEpisode, StepEpisode, TruncateEpisode, CloseEpisode]
FromHost = Union[HostReady, Doing, EpisodeOpened, EpisodeStepped, EpisodeFailed, TurnUnwanted]

to_host: Codec[ToHost] = Codec(ToHost)
from_host: Codec[FromHost] = Codec(FromHost)
