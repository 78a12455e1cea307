"""The environment host process: ``python -m libra_hpc.host.host --socket FD --config PATH``.

It has a socket of its starter's, constructs the task, sends `HostReady`, and serves
`libra_hpc.protocol.env` for all episodes on one asyncio loop.

- The task's code raises, overruns a step (`step.py`) or returns an invalid answer (`answers.py`) -> `EpisodeFailed`.
- More than `OPENINGS` start at once -> the others wait, and no limit counts the wait.
- An episode ends, however -> its `close` is called once (`live_episode.py`).
- The socket closes -> all episodes are closed, then the host exits, and kills its tool processes and what they started.
- The host is killed -> the kernel kills its tool processes; what those started falls to the starter, a subreaper
  (`libra_hpc.process.reaper`).

Exit codes: 0 socket closed, 1 tools cannot start or the peer broke the protocol, 2 a user's mistake (one sentence on
stderr).
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import selectors
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Coroutine
from dataclasses import replace
from functools import partial
from hashlib import blake2b
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

from libra_hpc.config.run import RunConfig, run_config
from libra_hpc.errors import EnvironmentFailed, OperationError
from libra_hpc.files import read_named
from libra_hpc.process.child_environment import clean_own
from libra_hpc.process.entry import leave, run
from libra_hpc.process.progress import PULSE_S
from libra_hpc.process.reaper import become_subreaper, children
from libra_hpc.protocol.codec import FrameBuffer, FrameError, pack_i32, unpack_i32
from libra_hpc.protocol.engine_state import FIRST_STEPS, SERVING, Doing
from libra_hpc.protocol.env import (
    BRANCH,
    EpisodeFailed,
    HostReady,
    OpenEpisode,
    StepEpisode,
    ToHost,
    TruncateEpisode,
    TurnUnwanted,
    from_host,
    to_host,
)
from libra_hpc.tasks.base import Episode, PolicyTurn, Task, Tools, Turn, Why
from libra_hpc.tasks.tokenizer import TaskTokenizer

from . import answers
from .answers import busy_limit, step_limit, tool_limits
from .contain import hide_memory
from .live_episode import LiveEpisode, StepTimeout
from .sandbox import Sandbox
from .settings import task_of

C = TypeVar("C")

ERROR_CHARS = 500
"""Most characters of `EpisodeFailed.error`; the traceback goes to stderr."""

LEAVE_S, CANCEL_S = 3.0, 0.5
"""Seconds for all episodes to close at the end of the host, which its starter kills 5 s after the socket closed
(`libra_hpc.process.child`); then for cancelled work to end.
"""

OPENINGS = 4
"""Most episodes in their `Episode.start`, for each tool process. Half: starts that wait for a network queue up.
Double: 32 containers start at once by default.
"""

KINDS: dict[type[Exception], str] = {
    EnvironmentFailed: "environment",
    StepTimeout: "timeout",
    answers.BadReward: "reward",
    answers.BadAnswer: "answer",
}


class Host(asyncio.Protocol):
    """One connection, one task, many episodes; ``closed`` gets the exit code."""

    def __init__(
        self, name: str, task: Task, tools: Tools, step_limit_s: float = 0.0, openings: int = OPENINGS
    ) -> None:
        self._name, self._task, self._tools, self._step_limit_s = name, task, tools, step_limit_s
        self._openings = openings
        self._episodes: dict[str, LiveEpisode] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._frames = FrameBuffer()
        self._out: list[bytes] = []
        self._loop = asyncio.get_running_loop()
        self._alive_at = self._loop.time()
        """Time of the last report."""
        self._doing = FIRST_STEPS
        self.closed: asyncio.Future[int] = self._loop.create_future()
        self._transport: asyncio.WriteTransport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport = transport
        self._send(from_host.frame(HostReady(self._name, math.inf, self._task.chats)))
        self._alive()

    def data_received(self, data: bytes) -> None:
        for body in self._frames.feed(data):
            try:
                self._handle(to_host.decode(body))
            except FrameError as error:
                print(f"host: unreadable frame: {error}", file=sys.stderr)
                self._close(1)
                return

    def connection_lost(self, exc: Exception | None) -> None:
        self._close(0)

    def _close(self, code: int) -> None:
        for name in list(self._episodes):
            self._end(name, "shutdown")
        if not self.closed.done():
            self.closed.set_result(code)

    def _handle(self, message: ToHost) -> None:
        match message:
            case OpenEpisode():
                self._open(message)
            case StepEpisode():
                self._step(message)
            case TruncateEpisode(episode=name):
                self._run(name, lambda episode, tools: episode.truncated(tools), truncated=True)
            case _:
                self._end(message.episode, "dropped")

    def _send(self, frame: bytes) -> None:
        if not self._out:
            self._loop.call_soon(self._flush)
        self._out.append(frame)
        self._progress()

    def _progress(self) -> None:
        """Each of many slow openings or steps in one loop iteration is progress."""
        if self._loop.time() - self._alive_at > PULSE_S:
            self._send_alive()

    def _flush(self) -> None:
        data, self._out = b"".join(self._out), []
        self._transport.write(data)

    def _send_alive(self) -> None:
        self._alive_at = self._loop.time()
        self._out.append(self._report())
        self._flush()

    def _report(self) -> bytes:
        """This loop reports, not a thread: the task's code may block it."""
        return from_host.frame(Doing({self._doing: 0.0}, silence_s=busy_limit(self._task)))

    def _alive(self) -> None:
        if not self.closed.done():
            self._send_alive()
            self._loop.call_later(PULSE_S, self._alive)

    def _fail(self, episode: str, error: str, kind: str = "raised") -> None:
        self._end(episode, "failed")
        text = error[:ERROR_CHARS].encode(errors="replace").decode()
        self._send(from_host.frame(EpisodeFailed(episode, text, kind)))

    def _raised(self, episode: str, error: BaseException) -> None:
        kind = next((kind for found, kind in KINDS.items() if isinstance(error, found)), "raised")
        if kind in ("raised", "environment"):
            traceback.print_exception(error)
        try:
            text = f"{type(error).__name__}: {error}"
        except Exception:
            text = f"{type(error).__name__}, which has no text"
        self._fail(episode, text, kind)

    def _open(self, message: OpenEpisode) -> None:
        name = message.episode
        if name in self._episodes:
            self._fail(name, "this episode is already open")
            return
        try:
            episode = self._task.open(message.index, message.sample, message.progress)
            episode.branch = partial(self._branch, name)
            self._add(name, episode)
        except BaseException as error:
            self._raised(name, error)
            return
        if type(episode).start is Episode.start:
            self._opened(name, None)
        else:
            self._start_waiting()
            self._progress()

    def _add(self, name: str, episode: Episode) -> LiveEpisode:
        episode.unwanted = partial(self._send, from_host.frame(TurnUnwanted(name)))
        live = self._episodes[name] = LiveEpisode(episode, self._tools, self._step_limit_s)
        return live

    def _branch(self, whole: str, episode: Episode) -> None:
        """Open another sample of an open episode, by a name that a replay gives to the same one."""
        own = blake2b(pack_i32(episode.prompt), digest_size=8).hexdigest()
        names = (f"{whole}{BRANCH}{own}.{number}" for number in count())
        name = next(one for one in names if one not in self._episodes)
        self._add(name, episode).ready = True
        self._send(answers.opened(name, episode))

    def _start_waiting(self) -> None:
        """Start the episodes that wait for it, the oldest first, up to the most at once."""
        fresh = [(name, live) for name, live in self._episodes.items() if not live.ready]
        room = self._openings - sum(live.busy for _, live in fresh)
        for name, live in [(name, live) for name, live in fresh if not live.busy][: max(0, room)]:
            live.run(live.episode.start, partial(self._opened, name))

    def _opened(self, name: str, outcome: BaseException | None) -> None:
        live = self._episodes[name]
        if isinstance(outcome, BaseException):
            self._raised(name, outcome)
            return
        try:
            frame = answers.opened(name, live.episode)
        except Exception as error:
            self._raised(name, error)
            return
        live.ready = True
        self._send(frame)
        self._start_waiting()

    def _end(self, name: str, why: Why) -> None:
        """Close an episode and its branches, if it is open."""
        live = self._episodes.pop(name, None)
        if live is None:
            return
        if BRANCH not in name:
            for branch in [one for one in self._episodes if one.startswith(f"{name}{BRANCH}")]:
                self._end(branch, why)
        closing = live.end(why)
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)
        self._start_waiting()

    async def left(self) -> None:
        """Wait until all episodes are closed, at most `LEAVE_S`."""
        if self._closing:
            await asyncio.wait(self._closing, timeout=LEAVE_S)

    def _step(self, message: StepEpisode) -> None:
        live = self._episodes.get(message.episode)
        tokens = unpack_i32(message.tokens)
        stopped = live is not None and live.ready and tokens[-1:] and tokens[-1] in live.episode.stop_ids
        turn = PolicyTurn(tokens, "stop" if stopped else "length", message.room, message.versions)
        self._run(message.episode, lambda episode, tools: episode.step(turn, tools))

    def _run(
        self, name: str, work: Callable[[Episode, Tools], Coroutine[Any, Any, Turn]], truncated: bool = False
    ) -> None:
        live = self._episodes.get(name)
        if live is None or not live.ready:
            self._fail(name, "no such episode is open")
        elif live.busy:
            self._fail(name, "a step of this episode is still running")
        else:
            live.run(partial(work, live.episode), partial(self._stepped, name, truncated))

    def _stepped(self, name: str, truncated: bool, outcome: Turn | BaseException) -> None:
        if isinstance(outcome, BaseException):
            self._raised(name, outcome)
            return
        try:
            if truncated and isinstance(outcome, Turn):
                outcome = replace(outcome, done=True)
            frame = answers.stepped(name, outcome, self._episodes[name].episode.max_tokens)
            done = bool(outcome.done)
        except Exception as error:
            self._raised(name, error)
            return
        self._send(frame)
        if self._doing != SERVING:
            self._doing = SERVING
            self._send(self._report())
        if done:
            self._end(name, "done")


async def serve(link: int, config: RunConfig) -> int:
    """Connect, serve until the socket closes, return the exit code; raises `UserError` and `OperationError` before."""
    task, own = task_of(config, TaskTokenizer(config.model.path)), config.task
    # Children up to here are the task's own; what a tool leaves behind is killed with this process.
    become_subreaper()
    limits = tool_limits(task, own.tool_timeout_s)
    # In the temporary folder, which the starter removes even when this process is killed.
    tools = Sandbox(task.tools, own, spared=children(), limits=limits)
    try:
        await tools.start()
        limit_s = step_limit(task, config.deadlines.first_s)
        host = Host(own.host_task, task, tools, limit_s, OPENINGS * own.tool_processes)
        await asyncio.get_running_loop().create_connection(lambda: host, sock=socket.socket(fileno=link))
        await asyncio.wait((host.closed, tools.broken), return_when=asyncio.FIRST_COMPLETED)
        if not host.closed.done():
            raise OperationError(f"No tool process can be started: {await tools.broken}.")
        await host.left()
        return await host.closed
    finally:
        await tools.close()


def _run(serving: Coroutine[Any, Any, int]) -> int:
    """`asyncio.run`, but a step that refuses its cancellation does not delay the exit."""
    selector = selectors.DefaultSelector()
    loop = asyncio.SelectorEventLoop(selector)
    # A process that a task forks and that comes back to this loop would take messages and answer them again.
    os.register_at_fork(after_in_child=lambda: setattr(selector, "select", lambda timeout: os._exit(1)))
    try:
        code = loop.run_until_complete(serving)
        left = asyncio.all_tasks(loop)
        for task in left:
            task.cancel()
        stuck = left and loop.run_until_complete(asyncio.wait(left, timeout=CANCEL_S))[1]
        if stuck or threading.active_count() > 1:
            leave(code)  # a regular exit closes coroutines and waits for threads, for ever if they never end
        return code
    finally:
        loop.close()


def main(module: str, serve: Callable[[int, RunConfig], Coroutine[Any, Any, int]]) -> int:
    """Entry point of a host process: run ``serve(descriptor, config)``; returns the exit code."""

    def work(link: int, file: Path) -> int:
        clean_own()
        config = read_named("--config", file, run_config, "a file with the configuration of a run")
        with contextlib.suppress(KeyboardInterrupt):
            return _run(serve(link, config))
        return 0

    return run(module, work)


if __name__ == "__main__":
    hide_memory()
    sys.exit(main("libra_hpc.host.host", serve))
