"""Payloads of weights read out of another node's memory with NIXL, which uses UCX over InfiniBand or RoCE.

- A payload is served or filled -> its memory is registered, until it is freed; `Place` has its address.
- A payload is read -> the other process' metadata is loaded. Its last reader drops it, so that a connection lives as
  long as a transfer, and is made again after a failure.
- Anything fails -> `DirectError`, for all who read from that process; none goes on before its connection is closed.
- Others read here -> one thread makes UCX's progress. NIXL's own would take a whole core, also without transfers.

UCX gets none of the job's ``UCX_`` variables, which are meant for MPI; it gets ``WEIGHTS_UCX_X`` as ``UCX_X``.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import itertools
import os
import queue
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from libra_hpc.errors import error_text
from libra_hpc.protocol.carriers import NIXL_WHEEL

UCX_TLS = {"auto": "ib,sm,self", "nixl": "all"}
"""Transports of UCX. Over its TCP, plain sockets are three times as fast, and its port asks nobody for a secret."""
DEVICES = Path("/sys/class/infiniband")
"""Has an entry for every InfiniBand or RoCE device of this node."""
PROBE_S = 20.0
"""For NIXL to start and to read a few bytes; usually a second. Double: a carrier that never starts costs 40 s."""
READ_S = 5.0
"""For one frame, 4 MiB. Half: slow networks fall back; double: longer than the server waits for a sign of life."""
POLL_S = 5e-5
"""Between two looks at a transfer; 4 MiB take 0.2 ms at 200 Gb/s."""
MEMORY = "DRAM"

Read = Callable[[int, int], None]
"""Gets bytes [begin, end) of a payload."""


class DirectError(ConnectionError):
    """NIXL failed; TCP goes on."""


class Place(msgspec.Struct, frozen=True, array_like=True):
    """Where a payload is in its process; another one reads it with this."""

    metadata: bytes
    address: int
    device: int
    """Unlike that of any other payload of the process: NIXL keeps what it once loaded of an address and a device."""


class _Source:
    """Another process while it is read from."""

    readers, failed = 0, False


class DirectReads:
    def __init__(self, name: str, ucx_tls: str) -> None:
        """``name``: unique among all processes. Raises `DirectError`."""
        _own_environment(ucx_tls)
        with _failures():
            api = importlib.import_module(f"{NIXL_WHEEL}._api")

            sync = api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
            settings = api.nixl_agent_config(enable_prog_thread=False, backends=["UCX"], sync_mode=sync)
            self._agent = api.nixl_agent(name, settings)
        self._name = name
        self._numbers = itertools.count(1)
        self._places: dict[int, Place] = {}
        """By the identity of their views."""
        self._registering = threading.RLock()  # a view may be freed while another one is registered
        self._sources: dict[Any, _Source] = {}
        self._left = threading.Condition()
        self._served = 0
        self._serving = threading.Condition()
        threading.Thread(target=self._progress, name="nixl", daemon=True).start()

    def check(self) -> None:
        """Read a few bytes of this process; raises `DirectError`."""
        theirs, own = memoryview(bytearray(b"weights")), memoryview(bytearray(7))
        self._read(self._name, _Source(), self.place(theirs), self.place(own), 0, 7)
        if own != theirs:
            raise DirectError("a READ brought other bytes")

    def place(self, view: memoryview) -> Place:
        """Register a payload, once; raises `DirectError`."""
        with self._registering:
            if id(view) not in self._places:
                address, device = np.frombuffer(view, np.uint8).ctypes.data, next(self._numbers)
                with _failures():
                    registered = self._agent.register_memory([(address, len(view), device, "")], MEMORY)
                    metadata = self._agent.get_partial_agent_metadata(registered, True, ["UCX"])
                self._places[id(view)] = Place(metadata, address, device)
                weakref.finalize(view, self._freed, id(view), registered).atexit = False
            return self._places[id(view)]

    def _freed(self, view: int, registered: Any) -> None:
        with self._registering, contextlib.suppress(Exception):
            del self._places[view]
            self._agent.deregister_memory(registered)

    @contextlib.contextmanager
    def serving(self) -> Iterator[None]:
        """Another process may read payloads of this one."""
        with self._serving:
            self._served += 1
            self._serving.notify_all()
        try:
            yield
        finally:
            with self._serving:
                self._served -= 1

    def _progress(self) -> None:
        while True:
            with self._serving:
                self._serving.wait_for(lambda: self._served > 0)
            with contextlib.suppress(Exception):
                self._agent.get_new_notifs()
            time.sleep(POLL_S)

    @contextlib.contextmanager
    def reading(self, place: Place, view: memoryview) -> Iterator[Read]:
        """Reads of a payload into ``view``; raises `DirectError`, and then nothing more arrives in ``view``."""
        own = self.place(view)
        with self._left:
            with _failures():
                name = self._agent.add_remote_agent(place.metadata)
            source = self._sources.setdefault(name, _Source())
            if source.failed:
                raise DirectError("its connection is being closed")
            source.readers += 1
        try:
            yield lambda begin, end: self._read(name, source, place, own, begin, end)
        except DirectError:
            source.failed = True
            raise
        finally:
            with self._left:
                source.readers -= 1
                if not source.readers:
                    del self._sources[name]
                    with contextlib.suppress(Exception):
                        self._agent.remove_remote_agent(name)
                        self._agent.get_new_notifs()
                    self._left.notify_all()
                elif source.failed:
                    self._left.wait_for(lambda: not source.readers, READ_S)

    def _read(self, name: Any, source: _Source, theirs: Place, own: Place, begin: int, end: int) -> None:
        def part(place: Place) -> Any:
            return self._agent.get_xfer_descs([(place.address + begin, end - begin, place.device)], MEMORY)

        deadline = time.monotonic() + READ_S
        with _failures():
            handle = self._agent.initialize_xfer("READ", part(own), part(theirs), name)
            try:
                state = self._agent.transfer(handle)
                while state == "PROC":
                    if source.failed or time.monotonic() > deadline:
                        raise TimeoutError("a READ failed beside it" if source.failed else "a READ did not end")
                    time.sleep(POLL_S)
                    state = self._agent.check_xfer_state(handle)
                if state != "DONE":
                    raise ConnectionError("a READ failed")
            finally:
                self._agent.release_xfer_handle(handle)


def probe(wanted: str, rank: int) -> tuple[DirectReads | None, str]:
    """What this process reads weights with, or None and why they travel by TCP. ``wanted``: auto, tcp or nixl."""
    if wanted == "tcp":
        return None, 'rollout.weights_transport = "tcp"'
    if importlib.util.find_spec(NIXL_WHEEL) is None:
        return None, "NIXL is not installed"
    if wanted == "auto" and not (DEVICES.is_dir() and any(DEVICES.iterdir())):
        return None, "this node has no InfiniBand or RoCE device"
    answers: queue.SimpleQueue[tuple[DirectReads | None, str]] = queue.SimpleQueue()

    def start() -> None:
        try:
            direct = DirectReads(f"{rank}-{secrets.token_hex(8)}", UCX_TLS[wanted])
            direct.check()
            answers.put((direct, ""))
        except Exception as error:
            answers.put((None, error_text(error) or type(error).__name__))

    threading.Thread(target=start, name="probe", daemon=True).start()
    try:
        return answers.get(timeout=PROBE_S)
    except queue.Empty:
        return None, f"NIXL did not start within {PROBE_S:.0f} s"


def _own_environment(ucx_tls: str) -> None:
    prefix = "WEIGHTS_"
    own = {name.removeprefix(prefix): os.environ[name] for name in os.environ if name.startswith(f"{prefix}UCX_")}
    for name in [name for name in os.environ if name.startswith("UCX_")]:
        del os.environ[name]
    os.environ.update({"UCX_TLS": ucx_tls, "UCX_LOG_LEVEL": "fatal", **own})


@contextlib.contextmanager
def _failures() -> Iterator[None]:
    """Whatever NIXL raises is a `DirectError`."""
    try:
        yield
    except Exception as error:
        raise DirectError(f"NIXL: {error_text(error) or type(error).__name__}") from error
