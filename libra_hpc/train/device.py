"""The one place that chooses the device, the collective backend and the process-wide torch settings of a training
process."""

from __future__ import annotations

import datetime
import os
import socket
import time
from typing import Any

import torch
import torch.distributed as dist

from libra_hpc.errors import invalid

POLL_S = 50e-6
"""First pause between two looks at an unfinished collective; it doubles up to `POLL_MAX_S`, so a long wait costs no
core."""
POLL_MAX_S = 2e-3


Store = Any
"""torch's key-value stores, which its type stubs leave out."""


def file_store(path: str, size: int) -> Store:
    """Meeting point of ``size`` processes on one file system; ``path`` must be fresh."""
    return dist.FileStore(path, size)  # type: ignore[attr-defined]


def local_store() -> Store:
    """Meeting point of a world of one process."""
    return dist.HashStore()  # type: ignore[attr-defined]


def choose(device: str, index: int, threads: int) -> torch.device:
    """Select the device of this process and set the thread count; raises `UserError` when CUDA is asked for and
    there is none."""
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
    # Gloo binds to the address its host name resolves to; a node whose name does not resolve can still train within
    # itself.
    if "GLOO_SOCKET_IFNAME" in os.environ:
        return
    try:
        socket.getaddrinfo(socket.gethostname(), None)
    except OSError:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"


def backend(device: torch.device) -> str:
    """torch.distributed backend of the replica's own world."""
    return "nccl" if device.type == "cuda" else "gloo"


def bare_group(device: torch.device, store: Store, rank: int, size: int, timeout_s: float) -> Any:
    """A process group outside torch's global state; collective over its members, raises `RuntimeError` when they do
    not all appear in time."""
    if device.type == "cuda":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = datetime.timedelta(seconds=timeout_s)
        return dist.ProcessGroupNCCL(store, rank, size, options)
    return dist.ProcessGroupGloo(store, rank, size, datetime.timedelta(seconds=timeout_s))


def wait(work: Any, timeout_s: float) -> None:
    """Wait for a collective; raises `RuntimeError` when a member died or ``timeout_s`` passed (NCCL does neither by
    itself)."""
    deadline = time.monotonic() + timeout_s
    pause = POLL_S
    while not work.is_completed():
        if time.monotonic() > deadline:
            raise RuntimeError(f"a collective over the replicas did not finish within {timeout_s:g} s")
        time.sleep(pause)
        pause = min(2 * pause, POLL_MAX_S)
    work.wait()
