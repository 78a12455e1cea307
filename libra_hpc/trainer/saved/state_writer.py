"""Writes this rank's files of checkpoints and snapshots while training goes on.

- `StateWriter.copy`, at a step boundary -> the shards are in host memory.
- What it returns is called -> a thread writes the files, and training goes on.
- The weights of the policy are not written here: the node's carrier has them (`libra_hpc.weights.image.write_pinned`).
- Another copy -> it waits for the end of the write before: there is one copy in host memory.

The thread takes part in no collective. Its answer has the checksums of its files; who has those of all ranks completes
the checkpoint.
"""

from __future__ import annotations

import errno
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist

from libra_hpc.protocol.trainer import Saved, SaveFailed, Tier
from libra_hpc.state import state_folders as folders
from libra_hpc.trainer.device import host_buffer, synchronize
from libra_hpc.trainer.train_engine import TrainEngine

from .checkpoint import write_companions
from .shard_files import own_pieces, rank_file, snapshot_file, snapshot_pieces, write_pieces

Answer = Saved | SaveFailed


class HostCopy:
    """This rank's shards in host memory: one buffer for all saves, because locking its pages takes seconds."""

    def __init__(self, engine: TrainEngine) -> None:
        self._engine = engine
        self._buffer: torch.Tensor | None = None

    @torch.no_grad()
    def take(self, pieces: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Copy pieces of the shards; returns the copies by their names. Raises `OSError` without memory."""
        engine = self._engine
        if self._buffer is None:
            try:
                self._buffer = host_buffer(engine.device, sum(tensor.numel() for tensor in engine.state.tensors()))
            except RuntimeError as error:
                raise OSError(errno.ENOMEM, f"no host memory for a copy of the optimizer's state: {error}") from error
        copies, begin = {}, 0
        for name, piece in pieces.items():
            copies[name] = self._buffer[begin : begin + piece.numel()]
            copies[name].copy_(piece, non_blocking=True)
            begin += piece.numel()
        synchronize(engine.device)
        return copies


class StateWriter:
    """See the module docstring; ``send`` gets the answer, from the thread."""

    def __init__(self, engine: TrainEngine, model_dir: Path, send: Callable[[Answer], None]) -> None:
        self._engine, self._model_dir, self._send = engine, model_dir, send
        self._rank = dist.get_rank()
        self._copy = HostCopy(engine)
        self._thread: threading.Thread | None = None

    def copy(self, folder: Path, tier: Tier = "checkpoint") -> Callable[[], None]:
        """Copy the state, for ``folder``. Returns what has a thread write the files and answer.

        Raises `OSError` when a copy is impossible.
        """
        began = time.monotonic()
        self.wait()
        state = folders.TrainerState(self._engine.state.step, self._engine.state.updates)
        if tier == "snapshot":
            pieces, write = snapshot_pieces(self._engine.state), self._write_part
        else:
            pieces, write = own_pieces(self._engine.state, self._engine.shape, self._engine.split), self._write_files
        copies = self._copy.take(pieces)

        def work() -> Answer:
            files = write(folder, state, copies)
            return Saved(str(folder), state.step, time.monotonic() - began, files, tier)

        return lambda: self._start(work, lambda reason: SaveFailed(str(folder), state.step, reason, tier))

    def _start(self, work: Callable[[], Answer], failed: Callable[[str], Answer]) -> None:
        def run() -> None:
            try:
                answer = work()
            except Exception as error:
                answer = failed(_reason(error))
            try:
                self._send(answer)
            except OSError:
                print("the state was written after the agent had left", file=sys.stderr)

        self._thread = threading.Thread(target=run, name="state writer", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Until nothing is being written."""
        if self._thread is not None:
            self._thread.join()

    def _write_files(
        self, folder: Path, state: folders.TrainerState, pieces: Mapping[str, torch.Tensor]
    ) -> folders.Manifest:
        own = rank_file(folder, self._rank)
        for path in (folder, own.parent):
            # Not its parents: nobody makes a run directory again that was removed.
            path.mkdir(exist_ok=True)
        write_pieces(pieces, own)
        written = [own]
        if not self._rank:
            written += write_companions(self._model_dir, folder / folders.POLICY_DIR, self._engine.dtype)
            counters = folder / folders.STATE_FILE
            counters.write_bytes(msgspec.json.encode(state))
            written.append(counters)
        return folders.seal(folder, written)

    def _write_part(
        self, folder: Path, state: folders.TrainerState, pieces: Mapping[str, torch.Tensor]
    ) -> folders.Manifest:
        """The node's agent seals it with the parts of the other processes, all of which write the same counters."""
        write_pieces(pieces, snapshot_file(folder, self._rank))
        (folder / folders.STATE_FILE).write_bytes(msgspec.json.encode(state))
        return {}


def _reason(error: Exception) -> str:
    """Why files could not be written; for an error that is not the file system's, the log has its stack."""
    if isinstance(error, OSError):
        return str(error)
    traceback.print_exception(error, file=sys.stderr)
    return f"{type(error).__name__}: {error}"
