"""The task interface: a user adds an environment as ONE class (`examples/my_task.py`); `task_class` finds it by name.

- A `Task` is constructed once per environment host process; `Task.open` makes an `Episode`, `Episode.start` awaits what
  takes time, and `Episode.close` is called once at its end.
- `Episode.step` answers each turn with token ids, which are appended to the context without re-tokenisation, or are a
  new context: a trajectory is one *sample* or more, with one reward (`Turn.new_sample`).
- Tools are module-level functions in `Task.tools`, run in sandboxed processes. Every failure is a value
  (`ToolResult`) but `EnvironmentFailed`, which any code of a task may raise: the trajectory is sampled again.
- An episode that repeats its answers token for token survives the loss of its process and job: its turns are replayed
  (`rollout.replay`). So seed random numbers by the arguments of `Task.open`. Others are sampled again.
"""

from __future__ import annotations

import importlib
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

import msgspec

from libra_hpc.config.learn import AGENT, GYM, MIXTURE, VERIFIERS
from libra_hpc.errors import EnvironmentFailed, UserError, invalid
from libra_hpc.protocol.env import ChatChoice, Signal
from libra_hpc.user_file import FORM, load_class

from .tokenizer import TaskTokenizer

__all__ = [
    "EnvironmentFailed",
    "Episode",
    "PolicyTurn",
    "Signal",
    "Task",
    "TaskMaker",
    "TaskTokenizer",
    "ToolResult",
    "Tools",
    "Turn",
    "Why",
]

Why = Literal["done", "failed", "dropped", "shutdown"]
"""How an episode ended: with a reward, truncated or not; by an error of its own; aborted, or sampled again elsewhere;
with its host.
"""


class ToolResult(msgspec.Struct, frozen=True):
    """How a tool call ended."""

    outcome: str
    """``ok`` | ``error`` (the tool raised, died, or answered more than it may) | ``timeout``"""
    value: Any
    """What the tool returned (plain msgpack values) when ``ok``, else a text about the failure."""
    seconds: float
    """From the call to the answer, including the wait for a free tool process."""
    exit_code: int | None = None
    """Exit code of the model-written program, -n after signal n; None for a declared tool or a program that was cut
    off."""


class Tools(Protocol):
    """The sandbox, for an episode."""

    async def call(self, name: str, *args: Any, **named: Any) -> ToolResult:
        """Run the declared tool ``name`` on plain msgpack values (None, bool, int, float, str, bytes, list, dict).

        Raises `OperationError` for an undeclared name, a mistake in the task; `EnvironmentFailed` where the tool does,
        or where memory or a mapped file ends its process.
        """

    async def python(self, code: str) -> ToolResult:
        """Run model-written Python; the value is its output."""


@dataclass(frozen=True)
class PolicyTurn:
    """One turn of the policy."""

    tokens: list[int]
    stop: Literal["stop", "length"] = "stop"
    """Why it ended: ``tokens`` ends with a stop id; or ``max_tokens`` or the context's room cut it."""
    room: int = 2**31 - 1
    """Tokens that the context still has room for, behind this turn: the answer and one token of the next turn must fit,
    else the trajectory is truncated.
    """
    versions: tuple[tuple[int, int], ...] = ()
    """(weight version, tokens generated under it), in order."""


@dataclass(frozen=True)
class Turn:
    """The environment's answer to one turn of the policy."""

    tokens: list[int] = field(default_factory=list)
    """Appended to the context, or the next turn's whole context (``new_sample``); ignored when done."""
    signals: Sequence[Signal] = ()
    """What each tool call of the turn reports about the remaining work (`tool_outcome.signal_of` makes one)."""
    done: bool = False
    reward: float = 0.0
    """The trajectory's when done; before, that of the turn alone, which your own ``algorithm.advantage`` may read."""
    info: dict[str, float] = field(default_factory=dict)
    """Numbers for `metrics.jsonl`: of any turn, so that a truncated trajectory has them; the last of a name counts."""
    new_sample: bool = False
    """End the sample: ``tokens`` begin the next one of the same trajectory. All of them get its advantage, each on the
    tokens that were sampled in it; earlier turns in ``tokens`` are prompt there. For a template that drops old
    thinking; compaction, when `PolicyTurn.room` is short; a sub-agent's own context, and after it the caller's again.
    """
    dropped: int = 0
    """Tokens at the end of the policy's turn that are no part of it, as those behind a stop string: neither trained nor
    in the context. A replay gives the turn without them, and must be answered equally, with ``dropped`` = 0."""

    @classmethod
    def end(cls, reward: float | Mapping[str, float], signals: Sequence[Signal] = (), **info: float) -> Turn:
        """The end of an episode. Parts of a reward are numbers too; it is the part ``reward``, else their sum."""
        parts = dict(reward) if isinstance(reward, Mapping) else {"reward": reward}
        total = parts.pop("reward") if "reward" in parts else sum(parts.values())
        return cls(signals=signals, done=True, reward=total, info={**info, **parts})


class Episode(ABC):
    """One trajectory's environment; calls of one episode never overlap, those of several share one thread."""

    prompt_id: str
    """Unique per prompt, equal for its samples, over the whole run."""
    prompt: list[int]
    """Read, as the limits below, when `start` has returned."""
    max_tokens: int
    """Most generated tokens of the next turn; a step may change it."""
    stop_ids: tuple[int, ...]
    """Token ids that end a turn; they are part of it."""
    unwanted: Callable[[], object] = staticmethod(lambda: None)
    """The host's, to be called when nobody waits any more for the turn that was asked for: its engine stops, and `step`
    gets what there is of it."""
    outside: Callable[[], AbstractContextManager[object]] = staticmethod(nullcontext)
    """The host's: a context whose time no limit of the running call counts."""
    branch: Callable[[Episode], object]
    """The host's, to be called with another sample of the trajectory, which grows beside this one: an episode with
    everything of its own but ``prompt_id`` and reward. It ends before this one does."""

    async def start(self, tools: Tools) -> None:
        """Await what takes time before the first turn: a container, a first request. Limits are those of `step`."""
        return None

    @abstractmethod
    async def step(self, turn: PolicyTurn, tools: Tools) -> Turn:
        """Answer one turn.

        An exception, a step beyond its limit, a reward that is not finite or invalid token ids drop this trajectory.
        Put long computations into a tool: here they block all other episodes.
        """

    async def truncated(self, tools: Tools) -> Turn:
        """Reward and more ``info`` of a trajectory that ends because its context has no room for another turn.

        Every turn went to `step` before, whose last answer did not fit. ``info`` gets ``truncated`` = 1.
        """
        return Turn(done=True)

    async def close(self, why: Why) -> None:
        """Free what the episode holds: called once at every end while the host lives, if `Task.open` returned it."""
        return None


class Task(ABC):
    """An environment; ``[task.options]`` of the run file are keyword arguments of its constructor, after ``seed``."""

    tools: Mapping[str, Callable[..., Any]] = {}
    """Tools by name: module-level functions of plain msgpack values. Processes that a call starts end with the call."""
    tool_limits: Mapping[str, float] = {}
    """Seconds per call of tools that need longer than ``task.tool_timeout_s``."""
    step_limit_s: float = 0.0
    """Seconds per step outside tool calls, if longer than ``deadlines.first_s``; then the step is cancelled."""
    work: Mapping[str, float] = {}
    """What its trajectories are like: keys of ``[task.work]``, of which those of the run file go first. It is written
    out in the class itself, which is parsed and not run."""
    chats: tuple[ChatChoice, ...] = ()
    """How a chat task writes the policy's chat: a fact of the run."""

    def __init__(self, tokenizer: TaskTokenizer, *, seed: int = 0) -> None:
        self.tokenizer = tokenizer
        self.seed = seed

    @abstractmethod
    def open(self, index: int, sample: int, progress: float) -> Episode:
        """Make sample ``sample`` of prompt ``index`` (>= 0, any size) of the data order; `Episode.start` may wait.

        The result must depend on (seed, options, arguments) alone, the prompt not on ``sample``. ``progress`` in [0,
        1] is the run's; all samples of a prompt get the same value.
        """

    def check(self) -> None:
        """Raise `UserError` for data that cannot be used: `libra-hpc check` asks, before anything is queued."""
        return None


class TaskMaker(ABC):
    """Another class that a run file may name, with the same constructor: it makes the task."""

    @abstractmethod
    def make(self, settings: Mapping[str, Any]) -> Task:
        """``settings`` is the run file's ``[chat]`` table, its ``[env]`` table by that name, and most tokens of a
        ``context``."""


if TYPE_CHECKING:
    from .base import Task, TaskMaker
    from .tokenizer import TaskTokenizer

TASKS = {
    "data": ("libra_hpc.tasks.data_task", "DataTask"),
    AGENT: ("libra_hpc.endpoint.agent_task", "AgentTask"),
    VERIFIERS: ("libra_hpc.endpoint.verifiers_task", "VerifiersTask"),
}
_CLASSES = {**TASKS, MIXTURE: ("libra_hpc.tasks.mixture", "Mixture")}
"""Names of a run file that need no file."""
GYM_TASK = ("libra_hpc.chat.gym_task", "GymTask")
"""Module and class of the data sets of `reasoning-gym`."""


def unknown_task(field: str, name: str) -> UserError:
    """The mistake of a name that no task has and that names no file."""
    why = "unknown task" if name else "neither a task nor rows (task.data) are given"
    return invalid(field, name, why, [*TASKS, f"{GYM}:NAME", FORM])


def task_class(name: str) -> type[Task] | type[TaskMaker]:
    """Find a task's class; raises `UserError` for an unknown name, a bad file, or a class that is no task."""
    from .base import Task, TaskMaker

    if name.startswith(f"{GYM}:"):
        found = importlib.import_module(GYM_TASK[0]).gym_class(name)
    elif ":" in name:
        found = load_class("task.name", name, "Task class", lambda one: issubclass(one, (Task, TaskMaker)))
    elif name in _CLASSES:
        module_name, class_name = _CLASSES[name]
        found = getattr(importlib.import_module(module_name), class_name)
    else:
        raise unknown_task("task.name", name)
    if inspect.isabstract(found):
        raise invalid(
            "task.name", name, f"{found.__name__!r} does not define {', '.join(sorted(found.__abstractmethods__))}"
        )
    return found


def check_options(found: type[Task] | type[TaskMaker], options: Mapping[str, Any]) -> None:
    """Raise `UserError` for an option that the constructor lacks."""
    parameters = inspect.signature(found).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return
    valid = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)][1:]
    kinds = {p.name: getattr(p.annotation, "__name__", p.annotation) for p in parameters}
    for key, value in options.items():
        if key not in valid:
            raise invalid("task.options", key, f"{found.__name__} has no such option", valid)
        wanted = {"int": (int,), "float": (int, float), "bool": (bool,), "str": (str,)}.get(str(kinds[key]))
        if wanted and (not isinstance(value, wanted) or (isinstance(value, bool) and bool not in wanted)):
            raise invalid(f"task.options.{key}", value, f"{found.__name__} takes {kinds[key]}")


def build_task(
    name: str, options: Mapping[str, Any], seed: int, tokenizer: TaskTokenizer, *, chat: Mapping[str, Any] | None = None
) -> Task:
    """Construct a task; ``options`` may have a ``seed``. Raises `UserError` for bad names or options."""
    from .base import TaskMaker

    found = task_class(name)
    check_options(found, options)
    try:
        made = found(tokenizer, **{"seed": seed, **options})  # type: ignore[call-arg]
        return made.make(chat or {}) if isinstance(made, TaskMaker) else made
    except (TypeError, ValueError, AttributeError) as error:
        raise invalid("task.options", dict(options), f"{found.__name__} does not accept them ({error})") from error
