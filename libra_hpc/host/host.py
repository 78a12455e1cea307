"""The environment host process: ``python -m libra_hpc.host.host --socket PATH --config PATH``.

It connects to its starter's Unix-domain socket, constructs the task, sends `HostReady`, and serves
`libra_hpc.protocol.env` for all episodes on one asyncio loop.

- The task's code raises, overruns a step (`step.py`) or returns an invalid answer (`answers.py`) -> `EpisodeFailed`.
- The socket closes -> the host exits, and kills its tool processes and what they started.
- The host is killed -> the kernel kills its tool processes; what those started falls to the starter, a subreaper
  (`libra_hpc.process.reaper`).

Exit codes: 0 socket closed, 1 tools cannot start or the peer broke the protocol, 2 a user's mistake (one sentence on
stderr).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import math
import sys
import traceback
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from libra_hpc.errors import OperationError, UserError, error_text, invalid
from libra_hpc.process.dump import dump_on_request
from libra_hpc.process.leave import leave
from libra_hpc.process.reaper import become_subreaper, children
from libra_hpc.protocol.codec import FrameBuffer, FrameError, unpack_i32
from libra_hpc.protocol.env import (
    EpisodeFailed,
    HostHeartbeat,
    HostReady,
    OpenEpisode,
    StepEpisode,
    ToHost,
    from_host,
    to_host,
)
from libra_hpc.tasks.base import Episode, Task, Tools, Turn
from libra_hpc.tasks.task_registry import build_task
from libra_hpc.tasks.tokenizer import TaskTokenizer

from . import answers
from .contain import hide_memory
from .declared import busy_limit, step_limit, tool_limits
from .sandbox import Sandbox
from .settings import HostConfig
from .step import Step, StepTimeout

C = TypeVar("C")

ERROR_CHARS = 500
"""Most characters of `EpisodeFailed.error`; the traceback goes to stderr."""

CANCEL_S = 0.5
"""Seconds for cancelled steps to end, at the end of the host."""

ALIVE_S = 1.0
"""Seconds between two `HostHeartbeat`."""

KINDS = {StepTimeout: "timeout", answers.BadReward: "reward", answers.BadAnswer: "answer"}


class Host(asyncio.Protocol):
    """One connection, one task, many episodes; ``closed`` gets the exit code."""

    def __init__(self, name: str, task: Task, tools: Tools, step_limit_s: float = 0.0) -> None:
        self._name, self._task, self._tools, self._step_limit_s = name, task, tools, step_limit_s
        self._episodes: dict[str, Episode] = {}
        self._steps: dict[str, Step] = {}
        self._frames = FrameBuffer()
        self._out: list[bytes] = []
        self._loop = asyncio.get_running_loop()
        self._alive_at = self._loop.time()
        """Time of the last `HostHeartbeat`."""
        self.closed: asyncio.Future[int] = self._loop.create_future()
        self._transport: asyncio.WriteTransport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport = transport
        self._send(from_host.frame(HostReady(self._name, math.inf, busy_limit(self._task))))
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
        for step in self._steps.values():
            step.cancel()
        if not self.closed.done():
            self.closed.set_result(code)

    def _handle(self, message: ToHost) -> None:
        if isinstance(message, StepEpisode):
            self._step(message)
        elif isinstance(message, OpenEpisode):
            self._open(message)
        else:
            self._forget(message.episode)

    def _send(self, frame: bytes) -> None:
        if not self._out:
            self._loop.call_soon(self._flush)
        self._out.append(frame)
        if self._loop.time() - self._alive_at > ALIVE_S:
            self._send_alive()  # each of many slow openings or steps in one loop iteration is progress

    def _flush(self) -> None:
        data, self._out = b"".join(self._out), []
        self._transport.write(data)

    def _send_alive(self) -> None:
        self._alive_at = self._loop.time()
        self._out.append(from_host.frame(HostHeartbeat()))
        self._flush()

    def _alive(self) -> None:
        if not self.closed.done():
            self._send_alive()
            self._loop.call_later(ALIVE_S, self._alive)

    def _fail(self, episode: str, error: str, kind: str = "raised") -> None:
        self._forget(episode)
        text = error[:ERROR_CHARS].encode(errors="replace").decode()
        self._send(from_host.frame(EpisodeFailed(episode, text, kind)))

    def _raised(self, episode: str, error: BaseException) -> None:
        kind = next((kind for found, kind in KINDS.items() if isinstance(error, found)), "raised")
        if kind == "raised":
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
            frame = answers.opened(name, episode)
        except (Exception, SystemExit) as error:
            self._raised(name, error)
            return
        self._episodes[name] = episode
        self._send(frame)

    def _forget(self, name: str) -> None:
        self._episodes.pop(name, None)
        step = self._steps.pop(name, None)
        if step is not None:
            step.cancel()

    def _step(self, message: StepEpisode) -> None:
        name = message.episode
        if name in self._steps:
            self._fail(name, "a step of this episode is still running")
        elif name not in self._episodes:
            self._fail(name, "no such episode is open")
        else:
            episode, over = self._episodes[name], partial(self._stepped, name)
            self._steps[name] = Step(
                episode, unpack_i32(message.tokens), self._tools, limit_s=self._step_limit_s, over=over
            )

    def _stepped(self, name: str, outcome: Turn | BaseException) -> None:
        del self._steps[name]
        if isinstance(outcome, BaseException):
            self._raised(name, outcome)
            return
        try:
            frame = answers.stepped(name, outcome)
            done = bool(outcome.done)
        except Exception as error:
            self._raised(name, error)
            return
        if done:
            del self._episodes[name]
        self._send(frame)


async def serve(path: str, config: HostConfig) -> int:
    """Connect, serve until the socket closes, return the exit code; raises `UserError` and `OperationError` before."""
    task = build_task(config.task, config.options, config.seed, TaskTokenizer(config.model), chat=config.chat)
    # Children up to here are the task's own; what a tool leaves behind is killed with this process.
    become_subreaper()
    limits = tool_limits(task, config.tool_timeout_s)
    # The folder of the socket: the starter removes it even when this process is killed.
    tools = Sandbox(task.tools, config, folder=Path(path).parent, spared=children(), limits=limits)
    try:
        await tools.start()
        host = Host(config.task, task, tools, step_limit(task, config.step_limit_s))
        await asyncio.get_running_loop().create_unix_connection(lambda: host, path)
        return await host.closed
    finally:
        tools.close()


def _run(serving: Coroutine[Any, Any, int]) -> int:
    """`asyncio.run`, but a step that refuses its cancellation does not delay the exit."""
    loop = asyncio.new_event_loop()
    try:
        code = loop.run_until_complete(serving)
        left = asyncio.all_tasks(loop)
        for task in left:
            task.cancel()
        if left and loop.run_until_complete(asyncio.wait(left, timeout=CANCEL_S))[1]:
            leave(code)  # a regular exit closes coroutines; one that catches everything would loop for ever
        return code
    finally:
        loop.close()


def main(module: str, kind: type[C], serve: Callable[[str, C], Coroutine[Any, Any, int]]) -> int:
    """Entry point of a host process: run ``serve(socket, config)`` with a ``kind`` as config; returns the exit code."""
    dump_on_request()
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description="Environment host of libra-hpc.")
    parser.add_argument("--socket", required=True, help="Unix-domain socket to connect to")
    parser.add_argument("--config", required=True, help=f"file with a {kind.__name__} as JSON")
    options = parser.parse_args()
    try:
        config = msgspec.json.decode(Path(options.config).read_bytes(), type=kind)
        with contextlib.suppress(KeyboardInterrupt):
            return _run(serve(options.socket, config))
    except (msgspec.DecodeError, OSError) as error:
        mistake = invalid("--config", options.config, error_text(error), f"a file with a {kind.__name__} as JSON")
        print(f"libra-hpc: {mistake}", file=sys.stderr)
        return UserError.exit_code
    except (UserError, OperationError) as error:
        print(f"libra-hpc: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    hide_memory()
    sys.exit(main("libra_hpc.host.host", HostConfig, serve))
