"""A leader for tests: starts a real environment host process and uses its real Unix-domain socket."""

from __future__ import annotations

import os
import socket
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from libra_hpc.config.run import RunConfig
from libra_hpc.host.settings import HostConfig, host_command, host_config, write_private
from libra_hpc.protocol import env
from libra_hpc.protocol.codec import FrameBuffer, pack_i32
from libra_hpc.protocol.env import EpisodeFailed, EpisodeOpened, EpisodeStepped, FromHost, OpenEpisode, StepEpisode

ANSWER_S = 60.0
"""Seconds of silence after which a host is broken."""

ROOM = 1000
"""Tokens that the context of an episode has room for, where no test is about it."""

T = TypeVar("T")


def host_settings(**changes: Any) -> HostConfig:
    """Settings of a host: those of an empty run file without a step limit, but for ``changes``."""
    default = host_config(RunConfig())
    return msgspec.structs.replace(default, **{"step_limit_s": 0.0, **changes})


class Leader:
    """A context manager around one host process."""

    def __init__(self, config: HostConfig) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="leader-")
        self.folder = Path(self._folder.name)
        path = str(self.folder / "env.sock")
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(path)
        self._listener.listen(1)
        self._listener.settimeout(ANSWER_S)
        self.settings = self.folder / "host.json"
        write_private(self.settings, msgspec.json.encode(config))
        command, environment = host_command(self.settings), {**os.environ, "TMPDIR": str(self.folder)}
        self.process = subprocess.Popen([*command, "--socket", path], stderr=subprocess.PIPE, env=environment)
        self._frames, self._pending = FrameBuffer(), list[bytes]()
        self.link: socket.socket | None = None

    def __enter__(self) -> Leader:
        self.link, _ = self._listener.accept()
        self.link.settimeout(ANSWER_S)
        self.ready = self.expect(env.HostReady)
        return self

    def __exit__(self, *_: object) -> None:
        if self.link is not None:
            self.link.close()
        self._listener.close()
        if self.process.poll() is None:
            try:
                self.process.wait(ANSWER_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
                raise
        assert self.process.stderr is not None
        self.process.stderr.close()
        self._folder.cleanup()

    def send(self, *messages: env.ToHost) -> None:
        assert self.link is not None
        self.link.sendall(b"".join(env.to_host.frame(message) for message in messages))

    def receive(self) -> FromHost:
        """The next message that is no `HostHeartbeat`."""
        while isinstance(message := self.receive_any(), env.HostHeartbeat):
            pass
        return message

    def receive_any(self) -> FromHost:
        assert self.link is not None
        while not self._pending:
            chunk = self.link.recv(1 << 20)
            if not chunk:
                raise EOFError("the host closed its socket")
            self._pending += self._frames.feed(chunk)
        return env.from_host.decode(self._pending.pop(0))

    def expect(self, kind: type[T]) -> T:
        message = self.receive()
        assert isinstance(message, kind), message
        return message

    def open(self, episode: str, index: int = 0, progress: float = 0.0) -> EpisodeOpened:
        self.send(OpenEpisode(episode, index, 0, progress))
        return self.expect(EpisodeOpened)

    def step(self, episode: str, tokens: list[int]) -> EpisodeStepped | EpisodeFailed:
        self.send(StepEpisode(episode, pack_i32(tokens), ROOM))
        message = self.receive()
        assert isinstance(message, EpisodeStepped | EpisodeFailed)
        return message


def play(
    leader: Leader, policy: Callable[[str, list[int]], list[int]], episodes: dict[str, int], progress: float = 0.0
) -> dict[str, EpisodeStepped]:
    """Play episodes (name -> index) concurrently; ``policy(name, context)`` returns the next turn."""
    context: dict[str, list[int]] = {}
    ends: dict[str, EpisodeStepped] = {}
    leader.send(*(OpenEpisode(name, index, 0, progress) for name, index in episodes.items()))
    while len(ends) < len(episodes):
        message: Any = leader.receive()
        assert isinstance(message, EpisodeOpened | EpisodeStepped), message
        before = [] if isinstance(message, EpisodeStepped) and message.new_sample else context.get(message.episode, [])
        context[message.episode] = before + _ids(message.tokens)
        if isinstance(message, EpisodeStepped) and message.done:
            ends[message.episode] = message
            continue
        turn = policy(message.episode, context[message.episode])
        context[message.episode] += turn
        leader.send(StepEpisode(message.episode, pack_i32(turn), ROOM))
    return ends


def _ids(data: bytes) -> list[int]:
    return list(memoryview(data).cast("i")) if data else []
