"""Device, collective backend and process-wide torch settings of a training process, chosen here alone."""

from __future__ import annotations

import ctypes
import datetime
import mmap
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property, partial
from typing import Any

import torch
import torch.distributed as dist

from libra_hpc.errors import invalid

POLL_S = 50e-6
"""First pause in seconds between two checks of an unfinished collective; doubles up to `POLL_MAX_S` to spare the core.
"""
POLL_MAX_S = 2e-3


Store = Any
"""torch's key-value stores, which its type stubs lack."""


def file_store(path: str, size: int) -> Store:
    """Rendezvous of ``size`` processes on one file system; ``path`` must be fresh."""
    return dist.FileStore(path, size)  # type: ignore[attr-defined]


def local_store() -> Store:
    """Rendezvous of a world of one process."""
    return dist.HashStore()  # type: ignore[attr-defined]


def choose_device(device: str, index: int, threads: int) -> torch.device:
    """Select this process's device and thread count; raises `UserError` when CUDA is wanted and missing."""
    torch.set_num_threads(threads)
    if device == "cuda":
        if not torch.cuda.is_available():
            raise invalid("slurm.device", device, "no CUDA device is visible to the trainer", ["cpu"])
        torch.cuda.set_device(index)
        return torch.device("cuda", index)
    if torch.cuda.is_available():
        raise invalid(
            "slurm.device",
            device,
            "Megatron-Core picks the GPU when torch sees one; set CUDA_VISIBLE_DEVICES empty to train on the CPU",
            ["cuda"],
        )
    _choose_interface()
    return torch.device("cpu")


def _choose_interface() -> None:
    # Gloo binds to the address of the host name. Where that does not resolve, a node can train within itself.
    if "GLOO_SOCKET_IFNAME" in os.environ:
        return
    try:
        socket.getaddrinfo(socket.gethostname(), None)
    except OSError:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"


def host_buffer(device: torch.device, elements: int) -> torch.Tensor:
    """A float32 buffer in host memory; page-locked for CUDA, so that copies into it run at the speed of the link.

    torch's own page-locked memory is rounded up to a power of two.
    """
    if device.type != "cuda" or not elements:
        return torch.empty(elements, dtype=torch.float32)
    # Of whole pages: no page is locked twice.
    buffer = torch.frombuffer(mmap.mmap(-1, 4 * elements, mmap.MAP_PRIVATE), dtype=torch.float32)
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    torch.cuda.check_error(runtime.cudaHostRegister(buffer.data_ptr(), buffer.nbytes, 0))
    return buffer


def lanes(device: torch.device, count: int) -> list[Callable[[], AbstractContextManager[Any]]]:
    """Contexts whose work on the device runs side by side, behind what is queued now; on a CPU one after the other."""
    if device.type != "cuda":
        return [nullcontext] * count
    streams = [torch.cuda.Stream(device) for _ in range(count)]  # type: ignore[no-untyped-call]
    for stream in streams:
        stream.wait_stream(torch.cuda.current_stream(device))
    return [partial(torch.cuda.stream, stream) for stream in streams]


STAGE_BYTES = 64 << 20
"""Size of each of two buffers. Half: copies are as fast; double: the first one comes later."""


class HostStage:
    """Two buffers in host memory through which tensors of a device come, in order, one ahead."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @cached_property
    def _slots(self) -> torch.Tensor:
        """Only those that offer have them."""
        return host_buffer(self._device, 2 * STAGE_BYTES // 4).view(2, -1)

    def through(self, tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
        """Flat tensors of at most `STAGE_BYTES`, each valid until the next is asked for."""
        (lane,) = lanes(self._device, 1)

        def arriving() -> Iterator[tuple[torch.Tensor, Callable[[], None]]]:
            for number, tensor in enumerate(tensors):
                with lane():
                    slot = self._slots[number % 2].view(tensor.dtype)[: len(tensor)]
                    slot.copy_(tensor, non_blocking=True)
                    arrived = _queued(self._device)
                yield slot, arrived

        ahead = arriving()
        last = next(ahead, None)
        while last is not None:
            following = next(ahead, None)
            last[1]()
            yield last[0]
            last = following


def to_host(device: torch.device) -> Callable[[Iterable[torch.Tensor]], Iterator[torch.Tensor]]:
    """How tensors of a device come to host memory, as by `HostStage.through`; those of a CPU are there."""
    return iter if device.type == "cpu" else HostStage(device).through


def _queued(device: torch.device) -> Callable[[], None]:
    """Waits for the work that is queued now."""
    if device.type == "cpu":
        return lambda: None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return event.synchronize


LAZY_FREE = 8
"""Linux's MADV_FREE: the kernel takes pages of private memory when it needs them, unless they are written before."""


def give_back(flat: torch.Tensor) -> None:
    """Free a tensor's memory, and lose its values, until `take_again`.

    Pages of a CPU stay as long as nobody needs them, and count as the process's: to clear and map 1.3 GB again takes
    longer than all else of a switch.
    """
    if not flat.is_cpu:
        flat.untyped_storage().resize_(0)
        return
    page, begin = mmap.PAGESIZE, flat.data_ptr()
    first, last = -(-begin // page) * page, (begin + flat.nbytes) // page * page
    if last > first:
        # Without it, as in some sandboxes, the pages stay.
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), LAZY_FREE)


def take_again(flat: torch.Tensor) -> None:
    """End what `give_back` did; the tensor has any values."""
    storage = flat.untyped_storage()
    if not storage.nbytes():
        storage.resize_(flat.nbytes)


def synchronize(device: torch.device) -> None:
    """Wait until all work queued on the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def backend(device: torch.device) -> str:
    return "nccl" if device.type == "cuda" else "gloo"


UNHANDLED = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_DUMP_ON_TIMEOUT": "0"}
"""Read where torch makes a group: its watchdog then leaves errors to those who wait. By default it ends the process
when a peer dies, which is right for a world that cannot go on without the peer, and wrong for replicas."""
UNWATCHED = datetime.timedelta(days=30)
"""For NCCL's watchdog, which the waits here are never to meet."""


def bare_group(device: torch.device, store: Store, rank: int, size: int, timeout_s: float) -> Any:
    """A process group outside torch's global state, whose peers may die.

    Collective, raises `RuntimeError` when a member is late.
    """
    if device.type == "cuda":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = UNWATCHED
        with _environment(UNHANDLED):
            return dist.ProcessGroupNCCL(store, rank, size, options)
    return dist.ProcessGroupGloo(store, rank, size, datetime.timedelta(seconds=timeout_s))


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.pop(name) for name in values if name in os.environ}
    os.environ.update(values)
    try:
        yield
    finally:
        for name in values:
            del os.environ[name]
        os.environ.update(before)


def end_groups(groups: list[Any]) -> None:
    """Abort process groups, which have no other reference, and empty the list."""
    for i in range(len(groups)):
        groups[i].abort()
    # Gloo's ends with its last operation, which a peer that hangs would delay.
    threading.Thread(target=groups.clear, name="end of groups", daemon=True).start()


def wait(work: Any, timeout_s: float, interrupted: Callable[[], bool] = lambda: False) -> None:
    """Wait for a collective; raises `RuntimeError` when a member died, when interrupted, or after ``timeout_s``.

    NCCL's own wait does none of these: a dead peer on the same node shows in nothing but silence.
    """
    deadline = time.monotonic() + timeout_s
    pause = POLL_S
    while not work.is_completed():
        if interrupted():
            raise RuntimeError("a newer order came")
        if time.monotonic() > deadline:
            raise RuntimeError(f"a collective over the replicas did not finish within {timeout_s:g} s")
        time.sleep(pause)
        pause = min(2 * pause, POLL_MAX_S)
    work.wait()
