"""The task interface: a user adds an environment as ONE class.

A `Task` is constructed once per environment host process; `Task.open` starts an `Episode`, and `Episode.step` answers
each turn of the policy.  What crosses the boundary is token ids: the ids the environment returns are appended to the
context as they are, so a trajectory is never re-tokenised. Tools are module-level functions named in `Task.tools`; they
run in sandboxed processes and are called through `Tools`, where every failure is a value (`ToolResult`) and never an
exception.  `examples/my_task.py` is a complete task.

An episode that answers the same turns with the same tokens outlives the loss of its process and of the whole job: it is
opened again and its turns are played once more (`libra_hpc.rollout.replay`).  So draw random numbers from a generator
seeded by the arguments of `Task.open`.  One that answers otherwise is sampled anew.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import msgspec

from libra_hpc.protocol.env import Signal

from .tokenizer import TaskTokenizer

__all__ = ["Episode", "Signal", "Task", "TaskTokenizer", "ToolResult", "Tools", "Turn"]


class ToolResult(msgspec.Struct, frozen=True):
    """How a tool call ended."""

    outcome: str
    """``ok`` | ``error`` (the tool raised, died, or answered more than it may) | ``timeout``"""
    value: Any
    """What the tool returned (plain msgpack values) when ``ok``, else text that says what happened."""
    seconds: float
    """From the call to the answer, the wait for a free tool process included."""
    exit_code: int | None = None
    """Of the model-written program, -n when signal n ended it; None for a declared tool, and for a program that was
    cut off."""


class Tools(Protocol):
    """The sandbox as an episode sees it."""

    async def call(self, name: str, *args: Any) -> ToolResult:
        """Run the declared tool ``name`` on plain msgpack values (None, bool, int, float, str, bytes, list, dict).

        Raises `KeyError` for a name the task does not declare: a mistake in the task, not in the model's output.
        """

    async def python(self, code: str) -> ToolResult:
        """Run model-written Python; the value is what it printed."""


@dataclass(frozen=True)
class Turn:
    """The environment's answer to one turn of the policy."""

    tokens: list[int] = field(default_factory=list)
    """What is appended to the context; ignored when done."""
    signal: Signal | None = None
    """What the tool call says about the work that remains (`outcome.signal_of` makes one); None when no tool was
    called."""
    done: bool = False
    reward: float = 0.0
    """Read only when done."""
    info: dict[str, float] = field(default_factory=dict)
    """Numbers for monitors, read only when done."""


class Episode(ABC):
    """One trajectory's environment.  `step` calls of one episode never overlap; those of different episodes do, on
    one thread."""

    prompt_id: str
    """Equal for all samples of a prompt, different between prompts, over the whole run."""
    prompt: list[int]
    max_tokens: int
    """Most tokens the policy may generate in one turn."""
    stop_ids: tuple[int, ...]
    """Token ids that end a turn (they stay in the turn)."""

    @abstractmethod
    async def step(self, tokens: list[int], tools: Tools) -> Turn:
        """Answer one turn.  ``tokens`` ends with a stop id unless ``max_tokens`` cut it.

        An exception drops this trajectory and is reported, and so does a step beyond its limit, a reward that is not
        finite, or token ids that are not; the host and its other episodes live on.  Long computations belong in a tool:
        code in ``step`` holds up every other episode of the host.
        """


class Task(ABC):
    """An environment.  The run file's ``[task.options]`` are keyword arguments of the constructor: give yours names
    and defaults after ``seed``."""

    tools: ClassVar[Mapping[str, Callable[..., Any]]] = {}
    """Tools by name: module-level functions of plain msgpack values.  What a call starts is ended with the call."""
    tool_limits: ClassVar[Mapping[str, float]] = {}
    """Seconds a call of a tool may take, for tools that need longer than ``task.tool_timeout_s``."""
    step_limit_s: ClassVar[float] = 0.0
    """Seconds a step may take outside its tool calls, if longer than ``deadlines.first_s``; then it is cancelled."""

    def __init__(self, tokenizer: TaskTokenizer, *, seed: int = 0) -> None:
        self.tokenizer = tokenizer
        self.seed = seed

    @abstractmethod
    def open(self, index: int, sample: int, progress: float) -> Episode:
        """Start sample ``sample`` of prompt ``index`` (>= 0, any size) of the data order.

        Must be a function of (seed, options, arguments) alone, and the prompt must not depend on ``sample``.
        ``progress`` in [0, 1] is the run's; the caller passes siblings the same value.
        """

    @property
    def max_context(self) -> int:
        """Longest context an episode can reach in tokens; 0 when unknown."""
        return 0
