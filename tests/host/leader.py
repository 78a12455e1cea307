"""A leader for tests: starts a real environment host process and uses its real Unix-domain socket."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import msgspec

from libra_hpc.agent.child_start import child_command
from libra_hpc.config.run import RunConfig
from libra_hpc.host.settings import write_private
from libra_hpc.protocol import env
from libra_hpc.protocol.codec import pack_i32
from libra_hpc.protocol.engine_state import Doing
from libra_hpc.protocol.env import EpisodeFailed, EpisodeOpened, EpisodeStepped, FromHost, OpenEpisode, StepEpisode
from tests.simulated.link import Link

ROOM = 1000
"""Tokens that the context of an episode has room for, where no test is about it."""

NO_LIMIT_S = 1e9

T = TypeVar("T")


def host_settings(
    *, task: str, model: str, seed: int = 0, chat: Mapping[str, Any] = MappingProxyType({}), **changes: Any
) -> RunConfig:
    """A run of ``task``, whose steps have no limit unless ``changes`` have one; ``changes``: also of ``[task]``."""
    limit = {"first_s": changes.pop("step_limit_s", NO_LIMIT_S)}
    named = {"name": task, **changes}
    return RunConfig().changed(task=named, model={"path": model}, chat=chat, run={"seed": seed}, deadlines=limit)


class Leader(Link):
    """A context manager around one host process."""

    def __init__(self, config: RunConfig) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="leader-")
        self.folder = Path(self._folder.name)
        self.settings = self.folder / "host.json"
        write_private(self.settings, msgspec.json.encode(config))
        _, _, module, *arguments = child_command(config, "host", self.settings)
        codecs = {"inbound": env.from_host, "outbound": env.to_host}
        super().__init__(self.folder, module, *arguments, **codecs, TMPDIR=str(self.folder))

    def __enter__(self) -> Leader:
        super().__enter__()
        self.ready = self.expect(env.HostReady)
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._folder.cleanup()

    def next(self) -> FromHost:
        """The next message that is no `Doing`."""
        while isinstance(message := self.receive(), Doing):
            pass
        return message

    def expect(self, kind: type[T]) -> T:
        message = self.next()
        assert isinstance(message, kind), message
        return message

    def open(self, episode: str, index: int = 0, progress: float = 0.0) -> EpisodeOpened:
        self.send(OpenEpisode(episode, index, 0, progress))
        return self.expect(EpisodeOpened)

    def step(self, episode: str, tokens: list[int]) -> EpisodeStepped | EpisodeFailed:
        self.send(StepEpisode(episode, pack_i32(tokens), ROOM))
        message = self.next()
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
        message: Any = leader.next()
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
