"""The environment host process: ``python -m libra_hpc.tasks.host --socket PATH --config PATH``.

It connects to the Unix-domain socket of whoever started it, constructs the task, sends `HostReady`, and serves `libra_hpc.protocol.env` for any number of
concurrent episodes on one asyncio loop; the answers of one loop iteration leave in one write.  An exception in the task's code becomes `EpisodeFailed`.
The host exits when the socket closes.  Its tool processes never outlive it: it kills them on the way out, and the kernel does when it is killed itself.
What they have started is killed with them, or becomes the child of whoever started this process (`libra_hpc.process.reaper`).

Exit codes: 0 the socket closed, 1 the tools cannot start or the peer broke the protocol, 2 a user's mistake (one sentence on stderr).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
import traceback
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from libra_hpc.errors import OperationError, UserError, invalid, said
from libra_hpc.process.reaper import become_subreaper, children
from libra_hpc.protocol.codec import FrameBuffer, FrameError, pack_i32, unpack_i32
from libra_hpc.protocol.env import (
    EpisodeFailed,
    EpisodeOpened,
    EpisodeStepped,
    FromHost,
    HostReady,
    OpenEpisode,
    StepEpisode,
    ToHost,
    from_host,
    to_host,
)

from .base import Episode, Task, Tools
from .contain import hide_memory
from .registry import build_task
from .sandbox import Sandbox
from .settings import HostConfig
from .tokenizer import TaskTokenizer

C = TypeVar("C")

ERROR_CHARS = 500
"""Longest error text sent in `EpisodeFailed`; the traceback goes to stderr."""


class Host(asyncio.Protocol):
    """One connection, one task, many episodes.  ``closed`` gets the exit code."""

    def __init__(self, name: str, task: Task, tools: Tools) -> None:
        self._name, self._task, self._tools = name, task, tools
        self._episodes: dict[str, Episode] = {}
        self._steps: dict[str, asyncio.Task[None]] = {}
        self._frames = FrameBuffer()
        self._out: list[bytes] = []
        self._loop = asyncio.get_running_loop()
        self.closed: asyncio.Future[int] = self._loop.create_future()
        self._transport: asyncio.WriteTransport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The peer is there: report ready."""
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport = transport
        self._send(HostReady(self._name))

    def data_received(self, data: bytes) -> None:
        """Handle every complete frame."""
        for body in self._frames.feed(data):
            try:
                self._handle(to_host.decode(body))
            except FrameError as error:
                print(f"host: unreadable frame: {error}", file=sys.stderr)
                self._close(1)
                return

    def connection_lost(self, exc: Exception | None) -> None:
        """The peer is gone: nothing left to do."""
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

    def _send(self, message: FromHost) -> None:
        if not self._out:
            self._loop.call_soon(self._flush)
        self._out.append(from_host.frame(message))

    def _flush(self) -> None:
        data, self._out = b"".join(self._out), []
        self._transport.write(data)

    def _fail(self, episode: str, error: str) -> None:
        self._forget(episode)
        self._send(EpisodeFailed(episode, error[:ERROR_CHARS]))

    def _raised(self, episode: str, error: Exception) -> None:
        traceback.print_exception(error)
        self._fail(episode, f"{type(error).__name__}: {error}")

    def _open(self, message: OpenEpisode) -> None:
        name = message.episode
        if name in self._episodes:
            self._fail(name, "this episode is already open")
            return
        try:
            episode = self._task.open(message.index, message.sample, message.progress)
            opened = EpisodeOpened(name, episode.prompt_id, pack_i32(episode.prompt), episode.max_tokens, tuple(episode.stop_ids))
        except Exception as error:
            self._raised(name, error)
            return
        self._episodes[name] = episode
        self._send(opened)

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
            self._steps[name] = self._loop.create_task(self._run(name, self._episodes[name], unpack_i32(message.tokens)))

    async def _run(self, name: str, episode: Episode, tokens: list[int]) -> None:
        try:
            turn = await episode.step(tokens, self._tools)
            answer = EpisodeStepped(
                name, b"" if turn.done else pack_i32(turn.tokens), turn.signal, turn.done, float(turn.reward) if turn.done else 0.0,
                {key: float(value) for key, value in turn.info.items()} if turn.done else {},
            )  # fmt: skip
        except Exception as error:
            self._steps.pop(name, None)
            self._raised(name, error)
            return
        self._steps.pop(name, None)
        if turn.done:
            self._episodes.pop(name, None)
        self._send(answer)


async def serve(path: str, config: HostConfig) -> int:
    """Connect, serve until the socket closes, and return the exit code.  Raises `UserError` and `OperationError` before the first frame."""
    task = build_task(config.task, config.options, config.seed, TaskTokenizer(config.model))
    # Beside the socket: the starter removes that folder even when this process is killed.
    # What the task has started so far is the task's own; nothing that a tool leaves behind outlives this process.
    become_subreaper()
    tools = Sandbox(task.tools, config, Path(path).parent, children())
    try:
        await tools.start()
        host = Host(config.task, task, tools)
        await asyncio.get_running_loop().create_unix_connection(lambda: host, path)
        return await host.closed
    finally:
        tools.close()


def main(module: str, kind: type[C], serve: Callable[[str, C], Coroutine[Any, Any, int]]) -> int:
    """Entry point of a host process: parse the command line and run ``serve(socket, config)``, the config being a ``kind``.

    Exit codes: 0 the socket closed, 1 the peer broke the protocol, 2 a user's mistake (one sentence on stderr).
    """
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description="Environment host of libra-hpc.")
    parser.add_argument("--socket", required=True, help="Unix-domain socket to connect to")
    parser.add_argument("--config", required=True, help=f"file with a {kind.__name__} as JSON")
    options = parser.parse_args()
    try:
        config = msgspec.json.decode(Path(options.config).read_bytes(), type=kind)
        with contextlib.suppress(KeyboardInterrupt):
            return asyncio.run(serve(options.socket, config))
    except (msgspec.DecodeError, OSError) as error:
        mistake = invalid("--config", options.config, said(error), f"a file with a {kind.__name__} as JSON")
        print(f"libra-hpc: {mistake}", file=sys.stderr)
        return UserError.exit_code
    except (UserError, OperationError) as error:
        print(f"libra-hpc: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    hide_memory()
    sys.exit(main("libra_hpc.tasks.host", HostConfig, serve))
