"""What a node agent supervises: an engine or an environment host, made of processes that live and end together.

- A process ends by itself -> the telling line of its own log is the reason.
- A process is late -> event ``slow``; stalled -> event ``hung``, stacks into the logs, SIGKILL (`ProgressWatch`).
- A process lives `KILL_S` after that (a call into a device or file system) -> ``hung`` again every `REPEAT_S`.
- The kernel killed one because memory ran out -> the reason, with what it used and the key that lessens it; a second
  time within `MEMORY_S` fails the run.
- It ends more often than `RestartBudget` allows, or `MAX_STARTS` times before it was ready -> all ranks restart; the
  same once more at the same step fails the run.

It outlives its processes: what is restarted keeps its name and its budget. Times are monotonic seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from libra_hpc.mesh.agent_context import AgentContext
from libra_hpc.process.child import MOST_BYTES, Child, cut, send_all, spawn
from libra_hpc.process.memory_kills import MemoryKills
from libra_hpc.process.progress import WAITS, ProgressWatch, Stall, ticks
from libra_hpc.process.retry import RestartBudget
from libra_hpc.protocol.agents import Fatal
from libra_hpc.protocol.codec import Codec
from libra_hpc.protocol.engine_state import START, Doing, ObservedEngine, StateName
from libra_hpc.slurm.queue.cause import tail, telling_line

MAX_STARTS = 3
"""Starts of an engine that never became ready: once may be an accident of the node, thrice is the configuration."""
WATCH_S = 1.0
"""Between two checks of the deadlines; the shortest deadline is a minute."""
KILL_S = 10.0
"""After SIGKILL; a process that still lives then waits inside the kernel, for a file system or a device."""
NO_START_S = 5.0
"""Until the next start where the system refuses a process or its log: a full disk has 75 s to get room before the
budget is spent."""
MEMORY_S = 3600.0
"""Between two ends for want of memory that are one cause.  Half: a run of long steps goes on in vain; double: two
accidents of a day end one that could go on."""
CAUSE_S = 2.0
"""For the last lines of a log.  Half: a slow file system hides the cause; double: turns wait for another engine."""
REPEAT_S = 60.0
"""Between two events about a process that does not end."""


class ChildCommand(NamedTuple):
    """How to start one process; its name is also that of its log."""

    name: str
    argv: list[str]
    environment: dict[str, str]


class Supervisor(ABC):
    """Who starts it and acts upon what it sends."""

    outbound: Codec[Any]
    inbound: Codec[Any]
    progress: ProgressWatch
    memory: MemoryKills
    less_memory: str
    """What makes its processes smaller, as a key of the run file; empty: none does."""

    @abstractmethod
    def received(self, one: Any, process: int, message: Any) -> None:
        """A message of a process, by its place among the commands."""

    @abstractmethod
    def exited(self, one: Any, child: Child, reason: str) -> None:
        """A process of the last start ended, asked or not."""


class Supervised:
    def __init__(self, context: AgentContext, supervisor: Supervisor, name: str, title: str = "") -> None:
        """``name`` in events, ``title`` in sentences."""
        self._context, self._supervisor = context, supervisor
        self.name, self.title = name, title or name
        self.children: list[Child] = []
        self._state: StateName = "lost"
        self.ends, self.reason, self.ordered, self.world = 0, "", 0, 0
        """See `ObservedEngine`; ``ordered``: its ``starts``."""
        self.starts = 0
        """Since it was last ready."""
        self.hung = ""
        """Why it was ended; empty: it was not."""
        self.budget = RestartBudget(context.config.deadlines.restarts)
        self._memory_budget = RestartBudget(1, MEMORY_S)
        self.out_of_memory = False
        """Whether that ended it."""
        self._blamed = ""
        """Its process that ended first, whose log has the cause."""
        self._killed_at: float | None = None
        """When all its processes were to end."""
        self._limits: asyncio.Task[None] | None = None
        self._cut: set[Path] = set()
        """Logs that were cut."""
        self._logged_at = float("-inf")
        """When an event last named one that does not."""

    @property
    def state(self) -> StateName:
        return self._state

    @state.setter
    def state(self, state: StateName) -> None:
        self._state = state
        self._context.changed()

    def observed(self, kind: str) -> ObservedEngine:
        return ObservedEngine(
            kind, self.state, ends=self.ends, reason=self.reason, starts=self.ordered, world=self.world
        )

    @property
    def alive(self) -> bool:
        return any(not child.ended for child in self.children)

    @property
    def pids(self) -> dict[str, int]:
        return {child.name: child.pid for child in self.children if not child.ended}

    async def start(self, commands: Sequence[ChildCommand]) -> None:
        """Start its processes; raises `OSError` where the system refuses one or its log."""
        self.limit_logs()
        self.children, self.hung, self._blamed, self._killed_at, self.out_of_memory = [], "", "", None, False
        self.starts += 1
        for command in commands:
            child = Child(
                command.name,
                outbound=self._supervisor.outbound,
                inbound=self._supervisor.inbound,
                on_message=self._received,
                on_exit=self._exited,
            )
            self.children.append(child)
            self._supervisor.progress.begin(child.name, START, time.monotonic())
            await child.start(command.argv, command.environment, self._context.logs / f"{command.name}.log")
            if self._killed_at is not None:
                child.kill()  # another has ended meanwhile

    def send(self, message: Any) -> None:
        send_all(self.children, message)

    async def stop(self) -> None:
        self._watch_no_more()
        for child in self.children:
            child.stopping = True
        await asyncio.gather(*(child.stop() for child in self.children))
        with contextlib.suppress(TimeoutError):
            # What they wrote last stays.
            await asyncio.wait_for(self._limit_logs([child.name for child in self.children]), CAUSE_S)

    async def reset(self) -> None:
        """End all processes unreported."""
        self._watch_no_more()
        children, self.children, self.state, self.starts = self.children, [], "lost", 0
        self._killed_at = None
        await asyncio.gather(*(child.stop(0.0) for child in children))

    def kill(self) -> None:
        self._watch_no_more()
        self._killed_at = self._killed_at or time.monotonic()
        for child in self.children:
            child.kill()

    def _watch_no_more(self) -> None:
        for child in self.children:
            self._supervisor.progress.drop(child.name)

    def limit_logs(self) -> None:
        """Begin to cut logs that have grown too long, unless that is going on."""
        if self._limits is None or self._limits.done():
            names = [child.name for child in self.children]
            self._limits = spawn(self._limit_logs(names))

    async def _limit_logs(self, names: Sequence[str]) -> None:
        """Cut long logs, in a thread: a shared file system may hang; the first cut of each is an event."""
        for name in names:
            path = self._context.logs / f"{name}.log"
            if await asyncio.to_thread(cut, path) and path not in self._cut:
                self._cut.add(path)
                reason = f"it wrote more than {MOST_BYTES >> 20} MiB; the last part of that is in {path.name}.old"
                self._context.log("log_cut", rank=self._context.rank, part=name, reason=reason)

    def slow(self, late: Stall) -> None:
        self._context.log(
            "slow", rank=self._context.rank, part=self.name, reason=late.sentence, waits=late.beside == WAITS
        )

    async def end_hung(self, reason: str) -> None:
        """End it with its stacks."""
        self._watch_no_more()
        self.hung = reason
        self._log_hung(reason)
        self._killed_at = time.monotonic()
        await asyncio.gather(*(child.end_hung() for child in self.children))

    def stuck(self, now: float) -> str:
        """Log processes that SIGKILL has not ended, at most every `REPEAT_S`; returns the sentence, or nothing."""
        if self._killed_at is None:
            return ""
        stuck = [child for child in self.children if child.pid and not child.ended]
        if not stuck:
            self._killed_at = None
        logged = self._killed_at is not None and self._logged_at >= self._killed_at
        if self._killed_at is None or now - self._killed_at <= KILL_S or (logged and now - self._logged_at < REPEAT_S):
            return ""
        names = ", ".join(f"{child.name} (process {child.pid})" for child in stuck)
        reason = f"{names} lives {now - self._killed_at:.0f} s after SIGKILL, so it waits inside the kernel"
        self._logged_at, self._blamed = now, self._blamed or stuck[0].name
        self._log_hung(reason)
        return reason

    def ends_too_often(self, reason: str, now: float) -> bool:
        """Note an end; True when it has ended too often for another start: all ranks restart, or the run fails."""
        if self.out_of_memory and not self._memory_budget.spend(now):
            self._context.send(0, Fatal(self._context.rank, f"{self.title} ended a second time: {reason}"))
            return True
        if not self.budget.spend(now):
            often = f"{self.budget.spent} times in {self.budget.window_s:.0f} s"
        elif self.starts >= MAX_STARTS:
            often = f"{self.starts} times before it was ready"
        else:
            return False
        self.restart_all(f"{self.title} ended {often}, the last time because {reason}", defect=True)
        return True

    def restart_all(self, reason: str, defect: bool = False) -> None:
        """Restart all ranks, with a sentence that names the log; ``defect`` as in `Fatal`."""
        name = next(filter(None, [self._blamed, *(child.name for child in self.children)]), self.name)
        log = self._context.logs / f"{name}.log"
        self._context.send(0, Fatal(self._context.rank, f"{reason}; see {log}", restart=True, defect=defect))

    def _log_hung(self, reason: str) -> None:
        self._context.log("hung", rank=self._context.rank, part=self.name, reason=reason)

    def _received(self, child: Child, message: Any) -> None:
        if child in self.children:
            if isinstance(message, Doing):
                self._supervisor.progress.report(child.name, message, time.monotonic())
            self._supervisor.received(self, self.children.index(child), message)

    def _exited(self, child: Child, code: int) -> None:
        if child not in self.children:
            return
        self._supervisor.progress.drop(child.name)
        self._blamed = self._blamed or child.name
        how = f"ended with {code}" if code >= 0 else f"was killed by signal {-code}"
        known, how = self.hung or child.fault, f"process {child.name} {how}"
        by_itself = code == -signal.SIGKILL and not (known or child.stopping or self._killed_at)
        known = known or (self._memory_cause(child.pid) if by_itself else "")
        if known or child.stopping or code in (0, -signal.SIGKILL):
            self._supervisor.exited(self, child, f"{how}: {known}" if known else how)
            return
        spawn(self._exited_by_itself(child, how))

    def _memory_cause(self, pid: int) -> str:
        """Whether a process was killed for want of memory, and what to change; empty: it was not."""
        why, part = self._supervisor.memory.cause(pid), self._context.component
        limited = self._context.config.slurm.executor != "local" and part != "guest"
        ways = [f"more of components.{part}.mem"] * limited + [self._supervisor.less_memory]
        self.out_of_memory, helps = bool(why), " or ".join(filter(None, ways))
        return f"{why}; {helps} helps" if why and helps else why

    async def _exited_by_itself(self, child: Child, how: str) -> None:
        """Report an end with its cause from the process's own log, which a file system may be slow to show."""
        log, cause = self._context.logs / f"{child.name}.log", ""
        with contextlib.suppress(TimeoutError):
            lines = await asyncio.wait_for(asyncio.to_thread(tail, log, child.log_start), CAUSE_S)
            cause = telling_line([("", lines)])
        if child in self.children:
            self._supervisor.exited(self, child, f"{how}{cause}")


E = TypeVar("E", bound=Supervised)


class EngineNode(Supervisor, Generic[E]):
    """What a node has of one kind, each an engine, a carrier or an environment host."""

    engine: type[E]
    kind: str

    def __init__(self, context: AgentContext, names: Sequence[str], title: str = "engine {}", less: str = "") -> None:
        self._context, self.progress = context, ProgressWatch(context.config.deadlines)
        self.memory, self.less_memory = MemoryKills(), less
        self._engines = {name: self.engine(context, self, name, title.format(name)) for name in names}
        self._stopping = False
        self._changing = asyncio.Lock()
        """Held while processes are started or all of them ended."""
        self._ordered_at = 0.0
        """When a start was last ordered."""
        self.beside: EngineNode[Any] | None = None
        """What has the same devices in turn with these."""
        self.trained = -1
        """Step of the weights that it had in training last."""
        self._frees: set[str] = set()
        """Engines that were sent into standby, and have not freed their memory yet."""
        self._freed = asyncio.Event()

    @abstractmethod
    async def start(self, starts: int = 0, world: int = 0) -> None:
        """Start them, or wake them; both as in `ObservedEngine`."""

    @abstractmethod
    async def reset(self) -> None:
        """End them unreported: a lost node is readmitted."""

    def standby(self) -> None:
        """Free the node's devices; the processes stay."""
        return

    def on_image(self) -> None:
        """The image has another version, or is lost."""
        return

    async def folder_lost(self, reason: str) -> None:
        """The folder in shared memory was made again, and is empty."""
        return

    @property
    def weights(self) -> int:
        """Version of the weights that all have, or step of trainers; -1: neither."""
        return -1

    @property
    def alive(self) -> bool:
        """Whether there are processes, or will be."""
        return any(engine.alive for engine in self._engines.values())

    async def room(self) -> None:
        """Wait until the other kind on the node has freed its memory: both have no room at once."""
        while self.beside is not None and self.beside._frees:
            self.beside._freed.clear()
            await self.beside._freed.wait()

    def has_freed(self, name: str) -> None:
        """An engine has freed its memory, or has ended."""
        self._frees.discard(name)
        self._freed.set()

    @property
    def observed(self) -> dict[str, ObservedEngine]:
        """All that were started."""
        return {
            name: engine.observed(self.kind)
            for name, engine in self._engines.items()
            if engine.children or engine.ordered
        }

    def acted(self, starts: int) -> None:
        """All of them were started, or woken, for this `Row.starts`."""
        for engine in self._engines.values():
            engine.ordered = starts
        self._context.changed()

    @property
    def pids(self) -> dict[str, int]:
        return {name: pid for engine in self._engines.values() for name, pid in engine.pids.items()}

    async def watch(self) -> None:
        """Check the progress of all, until cancelled."""
        async for stall in ticks(WATCH_S):
            self.discount(stall)
            await self.check(time.monotonic())
            for engine in self._engines.values():
                engine.limit_logs()

    async def stop(self) -> None:
        self._stopping = True
        await asyncio.gather(*(engine.stop() for engine in self._engines.values()))

    def discount(self, stall: float) -> None:
        self.progress.discount(stall)

    async def check(self, now: float) -> None:
        """Log what is late, end what is stalled, and note what memory all use."""
        self.memory.measure(self.pids.values(), now)
        for late in self.progress.late(now):
            self._having(late).slow(late)
        found = {self._having(stall): stall for stall in reversed(self.progress.stalled(now))}
        await asyncio.gather(*(self.stalled(engine, stall) for engine, stall in found.items()))
        for engine in self._engines.values():
            self.stuck(engine, engine.stuck(now))

    def _having(self, stall: Stall) -> E:
        return next(e for e in self._engines.values() if any(child.name == stall.key for child in e.children))

    async def stalled(self, engine: E, stall: Stall) -> None:
        """A process of it is stalled."""
        await engine.end_hung(stall.sentence)

    def stuck(self, engine: E, reason: str) -> None:
        """SIGKILL has not ended a process of it, if there is a reason."""
