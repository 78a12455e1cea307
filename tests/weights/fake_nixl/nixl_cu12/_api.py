"""What `libra_hpc.weights.transport.nixl` uses of NIXL, over Unix sockets, with the same traps.

The fault is in ``FAKE_NIXL``: ``start`` (no agent), ``stuck`` (an agent takes for ever), or at a count of bytes that
this process has sent ``flip:N`` (a bit, once), ``break:N`` (no more are sent) or ``hang:N`` (READs do not end).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import struct
import threading
import time
from typing import Any

import msgspec

REQUEST = struct.Struct("<QQQ")
"""Device, address and length."""


class nixl_thread_sync_t:
    NIXL_THREAD_SYNC_STRICT = 1


def nixl_agent_config(**settings: Any) -> None:
    assert settings == {"enable_prog_thread": False, "backends": ["UCX"], "sync_mode": 1}


class nixl_agent:
    def __init__(self, name: str, config: None) -> None:
        self._fault, _, at = os.environ.get("FAKE_NIXL", "").partition(":")
        self._at, self._sent = int(at or 0), 0
        if self._fault == "start":
            raise RuntimeError("NIXL_ERR_BACKEND")
        while self._fault == "stuck":
            time.sleep(0.1)
        self._name, self._address = name, f"\0{name}"
        self._registered: dict[int, tuple[int, int]] = {}
        self._remotes: dict[str, Any] = {name: (self._address, None)}
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(self._address)
        self._listener.listen()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            stream, _ = self._listener.accept()
            threading.Thread(target=self._send, args=(stream,), daemon=True).start()

    def _send(self, stream: socket.socket) -> None:
        # A READ may be released before it ends.
        with stream, contextlib.suppress(OSError):
            request = stream.recv(REQUEST.size, socket.MSG_WAITALL)
            if len(request) < REQUEST.size:
                return
            device, address, count = REQUEST.unpack(request)
            first, size = self._registered[device]
            assert first <= address <= address + count <= first + size
            data = bytearray(ctypes.string_at(address, count))
            before, self._sent = self._sent, self._sent + count
            if self._fault == "flip" and before <= self._at < self._sent:
                data[self._at - before] ^= 1
            if self._fault in ("break", "hang") and self._sent > self._at:
                time.sleep(1e6 if self._fault == "hang" else 0.0)
                return
            stream.sendall(data)

    def register_memory(self, parts: list[tuple[int, int, int, str]], kind: str) -> Any:
        ((address, size, device, _),) = parts
        assert device not in self._registered
        self._registered[device] = address, size
        return parts

    def deregister_memory(self, parts: list[tuple[int, int, int, str]]) -> None:
        del self._registered[parts[0][2]]

    def get_partial_agent_metadata(self, parts: Any, connection: bool, backends: list[str]) -> bytes:
        return msgspec.msgpack.encode((self._name, self._address, parts[0]))

    def add_remote_agent(self, metadata: bytes) -> bytes:
        name, address, (first, size, device, _) = msgspec.msgpack.decode(metadata)
        _, known = self._remotes.setdefault(name, (address, {}))
        # As NIXL does: what was loaded before is not replaced.
        known.setdefault((first, size, device), None)
        return name.encode()

    def remove_remote_agent(self, name: bytes) -> None:
        del self._remotes[name.decode()]

    def get_new_notifs(self) -> dict[str, list[bytes]]:
        return {}

    def get_xfer_descs(self, parts: list[tuple[int, int, int]], kind: str) -> tuple[int, int, int]:
        return parts[0]

    def initialize_xfer(self, operation: str, own: Any, theirs: Any, name: Any) -> Any:
        address, known = self._remotes[name if isinstance(name, str) else name.decode()]
        at, count, device = own
        first, size = self._registered[device]
        assert first <= at <= at + count <= first + size
        assert known is None or any(device == theirs[2] for *_, device in known)
        return Transfer(address, own, theirs)

    def transfer(self, handle: Transfer) -> str:
        handle.thread.start()
        return "PROC"

    def check_xfer_state(self, handle: Transfer) -> str:
        return handle.state

    def release_xfer_handle(self, handle: Transfer) -> None:
        handle.stream.close()


class Transfer:
    def __init__(self, address: str, own: tuple[int, int, int], theirs: tuple[int, int, int]) -> None:
        self.stream, self.state = socket.socket(socket.AF_UNIX), "PROC"
        self.stream.connect(address)
        self.thread = threading.Thread(target=self._read, args=(own, theirs), daemon=True)

    def _read(self, own: tuple[int, int, int], theirs: tuple[int, int, int]) -> None:
        at, count, _ = own
        try:
            self.stream.sendall(REQUEST.pack(theirs[2], theirs[0], theirs[1]))
            while count:
                data = self.stream.recv(count)
                if not data:
                    raise ConnectionError
                ctypes.memmove(at, data, len(data))
                at, count = at + len(data), count - len(data)
            self.state = "DONE"
        except OSError:
            self.state = "ERR"
