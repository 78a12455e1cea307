"""Workers as processes of one that has imported torch and Megatron already."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
from multiprocessing.context import ForkServerContext
from pathlib import Path

import torch

WAIT_S = 120.0

FORKS = multiprocessing.get_context("spawn" if torch.cuda.is_available() else "forkserver")
"""Importing torch and Megatron takes 4 s of processor time, so one process does it, and workers are forked from it.

Where there is a GPU each imports them: Megatron's import opens the GPU, and a fork cannot use it.
"""
if isinstance(FORKS, ForkServerContext):
    FORKS.set_forkserver_preload(["libra_hpc.trainer.worker"])


def _work(link: socket.socket, place: Path) -> None:
    from libra_hpc.process.entry import leave, run
    from libra_hpc.trainer.worker import work

    with place.with_suffix(".log").open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    arguments = ["--socket", str(link.detach()), "--config", str(place.with_suffix(".json"))]
    leave(run("libra_hpc.trainer.worker", work, arguments))


class WorkerProcess:
    """One worker, with the methods of ``subprocess.Popen`` that the tests need."""

    def __init__(self, link: socket.socket, place: Path) -> None:
        """``place``: its configuration and log, without their suffixes."""
        self._process = FORKS.Process(target=_work, args=(link, place), daemon=True)
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        """Exit code of a process that has ended."""
        return self._process.exitcode

    def wait(self, timeout: float = WAIT_S) -> int:
        """Its exit code, once it has ended."""
        self._process.join(timeout)
        code = self._process.exitcode
        assert code is not None, f"worker {self.pid} has not ended within {timeout:.0f} s"
        return code

    def send_signal(self, number: signal.Signals) -> None:
        """Send to a process that has not ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)
