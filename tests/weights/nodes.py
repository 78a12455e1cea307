"""Carriers of several nodes on this machine: real processes, real sockets, and links that can be slow or faulty."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from libra_hpc.config.run import RunConfig
from libra_hpc.protocol.carriers import CarrierReady, Peer, from_carrier, to_carrier
from libra_hpc.protocol.codec import FrameBuffer
from libra_hpc.protocol.joining import is_guest
from libra_hpc.weights.carrier import CarrierConfig

SECRET = secrets.token_bytes(32)
WAIT_S = 60.0


class CarrierNode:
    """A carrier process and the agent's end of its socket."""

    def __init__(
        self,
        folder: Path,
        rank: int,
        shapes: Mapping[str, tuple[int, ...]],
        secret: bytes = SECRET,
        parts: str = "",
        pull_mb_s: float = 0.0,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """In a folder that has files of an earlier one it goes on with them, as an agent's next carrier does."""
        self.rank, self.folder = rank, folder
        folder.mkdir(exist_ok=True)
        run = RunConfig().changed(model={"dtype": "bfloat16"})
        config = CarrierConfig(
            run=run,
            rank=rank,
            folder=str(folder),
            addresses=("127.0.0.1",),
            secret=secret,
            shapes=dict(shapes),
            parts=parts,
            guest=is_guest(rank),
            pull_mb_s=pull_mb_s,
        )
        (folder / "carrier.json").write_bytes(msgspec.json.encode(config))
        self._stream, theirs = socket.socketpair()
        command = [sys.executable, "-m", "libra_hpc.weights.carrier", "--config", str(folder / "carrier.json")]
        with theirs:
            self.process = subprocess.Popen(
                [*command, "--socket", str(theirs.fileno())],
                env={**os.environ, **(environment or {})},
                pass_fds=(theirs.fileno(),),
            )
        self.messages: list[tuple[float, Any]] = []
        self._heard = threading.Condition()
        threading.Thread(target=self._read, daemon=True).start()
        self.port: int = self.wait(CarrierReady).port

    def _read(self) -> None:
        buffer = FrameBuffer()
        with contextlib.suppress(OSError):
            while chunk := self._stream.recv(1 << 16):
                with self._heard:
                    self.messages += [(time.monotonic(), from_carrier.decode(body)) for body in buffer.feed(chunk)]
                    self._heard.notify_all()

    @property
    def peer(self) -> Peer:
        return Peer(self.rank, ("127.0.0.1",), self.port)

    def all(self, kind: type) -> list[Any]:
        return [message for _, message in self.messages if isinstance(message, kind)]

    def wait(self, kind: type, found: Callable[[Any], bool] = lambda message: True) -> Any:
        """The first message of a kind that fits."""

        def first() -> Any:
            return next((m for m in self.all(kind) if found(m)), None)

        with self._heard:
            assert self._heard.wait_for(lambda: first() is not None, WAIT_S), [m for _, m in self.messages][-5:]
            return first()

    def when(self, message: object) -> float:
        return next(at for at, other in self.messages if other is message)

    def send(self, message: Any) -> None:
        self._stream.sendall(to_carrier.frame(message))

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        self._stream.close()
        self.kill()


class FaultyLink:
    """A port that leads to another one: bytes to the caller may be slowed, changed, held or cut off."""

    def __init__(
        self, port: int, bytes_per_s: float = float("inf"), flip_at: int = -1, hold_at: int = -1, cut_at: int = -1
    ) -> None:
        """``flip_at``, ``hold_at``, ``cut_at``: counts of bytes to callers, over all connections."""
        self._port, self._rate, self._flip, self._hold = port, bytes_per_s, flip_at, hold_at
        self._cut = cut_at
        self.passed = 0
        self._counting = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                caller, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._port))
                for ends in ((caller, server, False), (server, caller, True)):
                    threading.Thread(target=self._pass, args=ends, daemon=True).start()

    def _pass(self, source: socket.socket, sink: socket.socket, answers: bool) -> None:
        with contextlib.suppress(OSError):
            while chunk := bytearray(source.recv(1 << 16)):
                if answers:
                    self._harm(chunk)
                sink.sendall(chunk)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _harm(self, chunk: bytearray) -> None:
        with self._counting:
            first, self.passed = self.passed, self.passed + len(chunk)
            if first <= self._flip < self.passed:
                chunk[self._flip - first] ^= 4
            hold = first <= self._hold < self.passed
            if first <= self._cut < self.passed:
                raise ConnectionError("cut off")
            time.sleep(len(chunk) / self._rate)
        while hold:
            time.sleep(0.1)

    def close(self) -> None:
        self._listener.close()


@contextlib.contextmanager
def node_folders() -> Iterator[Path]:
    """A folder in shared memory, as agents have one."""
    place = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with tempfile.TemporaryDirectory(dir=place, ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def bits(seed: int, count: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(-(1 << 15), 1 << 15, count, dtype=np.int16)
