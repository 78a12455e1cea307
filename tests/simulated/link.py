"""An agent for tests: starts one simulated process and talks to it over its socket."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from libra_hpc.config.run import RunConfig
from libra_hpc.protocol.codec import Codec, FrameBuffer

PATIENCE_S = 60.0
"""Seconds without a message after which a process counts as broken."""

T = TypeVar("T")


def dry_run(**simulated: Any) -> RunConfig:
    """An A800, a 14B model, and eight generated prompts of two samples; ten thousand times as fast, ready at once."""
    times = dict.fromkeys(("start_s", "wake_s", "sync_s"), 0.0)
    return RunConfig().changed(
        run={"engine": "simulated", "steps": 1},
        algorithm={"prompts_per_step": 8, "group_size": 2},
        rollout={"max_model_len": 16384},
        planner={"device": "a800", "model": "qwen3-14b"},
        simulated={"speedup": 10_000.0, **times, **simulated},
    )


class Link:
    """A context manager around one process: ``python -m <module> <arguments> --socket FD``."""

    def __init__(
        self, folder: Path, module: str, *arguments: str, inbound: Codec[Any], outbound: Codec[Any], **environ: str
    ) -> None:
        self._inbound, self._outbound = inbound, outbound
        self.link, theirs = socket.socketpair()
        self.link.settimeout(PATIENCE_S)
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", module, *arguments, "--socket", str(theirs.fileno())],
                cwd=folder,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env={**os.environ, "PYTHONPATH": os.getcwd(), **environ},
                pass_fds=(theirs.fileno(),),
            )
        self._frames, self._pending = FrameBuffer(), list[bytes]()

    def __enter__(self) -> Link:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.link.close()
        try:
            self.process.communicate(timeout=PATIENCE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise

    def send(self, *messages: Any) -> None:
        self.link.sendall(b"".join(self._outbound.frame(message) for message in messages))

    def receive(self) -> Any:
        while not self._pending:
            chunk = self.link.recv(1 << 20)
            if not chunk:
                raise EOFError("the process closed its socket")
            self._pending += self._frames.feed(chunk)
        return self._inbound.decode(self._pending.pop(0))

    def until(self, kind: type[T]) -> T:
        """The next message of a kind; others before it are dropped."""
        while not isinstance(message := self.receive(), kind):
            pass
        return message

    def close(self) -> int:
        """Close the socket and return the exit code."""
        self.link.close()
        return self.process.wait(PATIENCE_S)
