"""The sandbox of an environment host: pools of tool processes, one call each at a time, on one asyncio loop.

- A call waits for a free process of its pool, then has its time limit. While calls wait the pool grows.
- A process overruns, dies or answers nonsense -> it and all it started are killed, and the call ends as a
  `ToolResult`. Memory or a mapped file ends it, or the tool raises it -> `EnvironmentFailed`.
- Declared tools and model-written code have separate pools, so that slow code delays no tool.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import signal
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from shutil import rmtree
from typing import Any

from libra_hpc.config.learn import TaskSection
from libra_hpc.errors import EnvironmentFailed, OperationError, error_text
from libra_hpc.process.child import Child, spawn
from libra_hpc.process.reaper import end_strangers
from libra_hpc.tasks.base import ToolResult

from .answers import tool_refs
from .toolproc import ENVIRONMENT, FAULTS, Call, Ready, RunCode, Setup, ToolDone, ToolRef, from_tool, to_tool

START_S = 30.0
"""Most seconds from the start of a tool process to `Ready`: Python and the tools' imports, from a busy file system."""

CODE_GRACE_S = 2.0
"""Seconds beyond the limit of model-written code, which its tool process enforces, until the host kills that process.
"""

REAP_S = 0.02
"""Seconds between two rounds that kill what tools left behind."""

STRANGER_ROUNDS = 100
"""Most attempts at the end of a sandbox to kill what its tools left behind."""

_BOOT = "import json, sys; sys.path[:] = json.loads(sys.argv.pop(1)); from libra_hpc.host.toolproc import main; main()"


def _draw() -> int:
    """Random id of a call (see `Call.call`), never 0."""
    return secrets.randbits(62) + 1


MOST_FAILED_STARTS = 5
"""In a row, until a host gives up and is started again: what it lacks, a descriptor or a folder, is often its own."""


class _Job:
    """A call in flight: id, frame, limit, and the future of its answer."""

    def __init__(self, call: int, frame: bytes, limit_s: float, future: asyncio.Future[ToolDone]) -> None:
        self.call, self.frame, self.limit_s, self.future = call, frame, limit_s, future


class _Process:
    """One tool process: starting, then idle or busy with one job."""

    def __init__(self, pool: _Pool, folder: str) -> None:
        self.pool, self.folder = pool, folder
        self.job: _Job | None = None
        self.ready = self._over = False
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(START_S, self._overdue)
        self.child = Child("tool process", to_tool, from_tool, self._received, self._exited)
        self.child.send(pool.setup(folder))
        self._begun = spawn(self._begin())

    async def _begin(self) -> None:
        argv = [sys.executable, "-I", "-c", _BOOT, json.dumps(sys.path)]
        try:
            await self.child.start(argv, {"TMPDIR": self.folder, "LC_ALL": "C.UTF-8"}, Path(os.devnull))
        except OSError as error:
            self._end(ToolDone("error", error_text(error)))
            self.pool.sandbox.ended(self)
        if self._over:
            self.child.kill()

    def start(self, job: _Job) -> None:
        self.job = job
        self._timer = self._loop.call_later(job.limit_s, self._overdue)
        self.child.send_frame(job.frame)

    def _received(self, child: Child, message: Ready | ToolDone) -> None:
        if self._over:
            return
        if self.ready and (isinstance(message, Ready) or self.job is None or message.call != self.job.call):
            print("sandbox: a tool process sent an answer to no call, and another replaces it", file=sys.stderr)
            self._end(ToolDone("error", "the tool process sent an answer to no call"))
            return
        if isinstance(message, ToolDone) and not self.ready:
            self._end(message)
            return
        self._timer.cancel()
        # Behind all that has come, as what follows an answer must not reach the next call, and before its caller.
        self._loop.call_soon(self.pool.free, self)
        if isinstance(message, ToolDone):
            self._answer(message)
        else:
            self.ready = True
            self.pool.sandbox.count_start("")

    def _exited(self, child: Child, code: int) -> None:
        """By its memory, which is no answer to the policy, or otherwise."""
        done = ToolDone("error", "the tool process died" + (child.fault and f": {child.fault}"))
        if -code in FAULTS:
            limit = f"task.tool_memory_mb = {self.pool.sandbox.config.tool_memory_mb} limits memory and mapped files"
            done = ToolDone(ENVIRONMENT, f"the tool process died of {signal.Signals(-code).name}; {limit}")
        self._end(done)
        self.pool.sandbox.ended(self)

    def _answer(self, done: ToolDone) -> None:
        job, self.job = self.job, None
        if job is not None and not job.future.done():
            job.future.set_result(done)

    def _overdue(self) -> None:
        limit_s = START_S if self.job is None else self.job.limit_s
        self._end(ToolDone("timeout" if self.ready else "error", f"no answer within {limit_s:g} s"))

    def _end(self, done: ToolDone) -> None:
        if not self._over:
            self._over = True
            self._timer.cancel()
            self.child.kill()
            self._answer(done)
            self.pool.lost(self, "" if self.ready else str(done.value))

    def kill_unused(self) -> None:
        """End a process without a call; another replaces it."""
        self._end(ToolDone("error", "its folder was removed"))

    async def close(self) -> None:
        """End it, and wait for that; nobody replaces it."""
        self._over = True
        self._timer.cancel()
        await self._begun
        await self.child.stop(0.0)


class _Pool:
    """Up to ``tool_processes`` processes of one purpose, and the waiting calls."""

    def __init__(self, sandbox: Sandbox, refs: tuple[ToolRef, ...]) -> None:
        self.sandbox, self.refs = sandbox, refs
        self.processes: list[_Process] = []
        self._idle: deque[_Process] = deque()
        self._waiting: deque[_Job] = deque()
        self.started: asyncio.Future[None] | None = None

    def setup(self, folder: str) -> Setup:
        config = self.sandbox.config
        return Setup(
            tools=self.refs,
            parent=os.getpid(),
            folder=folder,
            timeout_s=config.tool_timeout_s,
            memory_bytes=config.tool_memory_mb << 20,
            output_bytes=config.tool_output_bytes,
        )

    def grow(self) -> None:
        """Start the first process, or as many more as calls wait for."""
        if self.started is None:
            self.started = asyncio.get_running_loop().create_future()
        starting = sum(not process.ready for process in self.processes)
        wanted = max(len(self._waiting) - starting, int(not self.processes))
        for _ in range(min(wanted, self.sandbox.config.tool_processes - len(self.processes))):
            try:
                self.processes.append(_Process(self, self.sandbox.new_folder()))
            except OSError as error:
                self._not_started(error_text(error))
                return

    def submit(self, call: int, frame: bytes, limit_s: float) -> asyncio.Future[ToolDone]:
        job = _Job(call, frame, limit_s, asyncio.get_running_loop().create_future())
        self._waiting.append(job)
        self._dispatch()
        if self._waiting:
            self.grow()
        return job.future

    def _dispatch(self) -> None:
        while self._idle and self._waiting:
            if not os.path.isdir(self._idle[0].folder):  # removed: what it starts would have no working folder
                self._idle.popleft().kill_unused()
                continue
            job = self._waiting.popleft()
            if not job.future.done():  # its episode was closed while it waited
                self._idle.popleft().start(job)

    def free(self, process: _Process) -> None:
        if process not in self.processes:
            return
        if self.started is not None and not self.started.done():
            self.started.set_result(None)
        self._idle.append(process)
        self._dispatch()

    def lost(self, process: _Process, start_error: str) -> None:
        """A process ended: replace it, unless it could not start."""
        self.processes.remove(process)
        with contextlib.suppress(ValueError):
            self._idle.remove(process)
        self.sandbox.ending.add(process)
        if not start_error:
            self.grow()
            return
        self._not_started(start_error)

    def _not_started(self, why: str) -> None:
        """Fail all waiting calls if there is no other process; the next call tries again."""
        error = EnvironmentFailed(f"a tool process cannot start: {why}")
        self.sandbox.count_start(why)
        if self.started is not None and not self.started.done():
            self.started.set_exception(error)
            self.started.exception()  # waited for by `Sandbox.start` alone
        if not self.processes:
            self.started = None
            for job in self._waiting:
                if not job.future.done():
                    job.future.set_exception(error)
            self._waiting.clear()


class Sandbox:
    """`Tools` of all episodes of a host; create it on a running loop, `close` it before the loop ends.

    ``limits``: seconds per call by tool name, where they differ from ``tool_timeout_s``. ``spared``: children that
    are not the sandbox's, when this process is a subreaper. Then orphans of killed tool processes are killed too
    (`libra_hpc.process.reaper.end_strangers`).
    """

    def __init__(
        self,
        tools: Mapping[str, Callable[..., Any]],
        config: TaskSection,
        folder: str | Path | None = None,
        spared: Collection[int] | None = None,
        limits: Mapping[str, float] | None = None,
    ) -> None:
        self.config, self._spared = config, spared
        self._limits = dict.fromkeys(tools, config.tool_timeout_s) | dict(limits or {})
        self._parent, self._folder = folder, tempfile.mkdtemp(prefix="tools-", dir=folder)
        self.broken = asyncio.get_running_loop().create_future()
        """Why no process can be started."""
        self._failed_starts = 0
        self._tools = _Pool(self, tool_refs(tools))
        self._code = _Pool(self, ())
        self.ending = set[_Process]()
        """Killed processes that have not ended."""
        self._made = 0

    async def start(self) -> None:
        """Start the first of the declared tools' processes; raises `OperationError` when it cannot."""
        if self._limits:
            self._tools.grow()
            assert self._tools.started is not None
            await self._tools.started

    async def call(self, name: str, *args: Any, **named: Any) -> ToolResult:
        if name not in self._limits:
            raise OperationError(f"The task declares no tool {name!r}.")
        call = _draw()
        return await self._result(self._tools, call, to_tool.frame(Call(call, name, args, named)), self._limits[name])

    async def python(self, code: str) -> ToolResult:
        call = _draw()
        limit_s = self.config.tool_timeout_s + CODE_GRACE_S
        return await self._result(self._code, call, to_tool.frame(RunCode(call, code)), limit_s)

    async def _result(self, pool: _Pool, call: int, frame: bytes, limit_s: float) -> ToolResult:
        begin = time.perf_counter()
        done = await pool.submit(call, frame, limit_s)
        if done.outcome == ENVIRONMENT:
            raise EnvironmentFailed(done.value)
        return ToolResult(done.outcome, done.value, time.perf_counter() - begin, done.exit_code)

    @property
    def pids(self) -> list[int]:
        return [p.child.pid for pool in (self._tools, self._code) for p in pool.processes]

    def new_folder(self) -> str:
        """Make a folder for a process, and that of all again where it was removed; raises `OSError`."""
        self._made += 1
        if not os.path.isdir(self._folder):
            self._folder = tempfile.mkdtemp(prefix="tools-", dir=self._parent)
        path = Path(self._folder) / str(self._made)
        path.mkdir()
        path.chmod(0o700)  # whatever the umask
        return str(path)

    def count_start(self, failure: str) -> None:
        """Note that a process started, or why not; `broken` has the last of `MOST_FAILED_STARTS` in a row."""
        self._failed_starts = self._failed_starts + 1 if failure else 0
        if self._failed_starts == MOST_FAILED_STARTS and not self.broken.done():
            self.broken.set_result(failure)

    def ended(self, process: _Process) -> None:
        rmtree(process.folder, ignore_errors=True)
        self.ending.discard(process)
        self._clear()

    def _clear(self) -> None:
        """Kill what ended processes have left behind, without blocking the loop."""
        if self._end_strangers():
            asyncio.get_running_loop().call_later(REAP_S, self._clear)

    def _end_strangers(self) -> bool:
        """One round; whether another one must follow."""
        if self._spared is None:
            return False
        return bool(Child.starting or end_strangers({*self._spared, *Child.live}))

    async def close(self) -> None:
        """Kill every tool process and what it started, wait for their end, remove their folders."""
        processes = [p for pool in (self._tools, self._code) for p in pool.processes]
        await asyncio.gather(*(process.close() for process in (*processes, *self.ending)))
        for _ in range(STRANGER_ROUNDS):
            if not self._end_strangers():
                break
            await asyncio.sleep(REAP_S)
        rmtree(self._folder, ignore_errors=True)
