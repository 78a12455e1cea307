"""State of the simulated trainer: weight files, checkpoints, and the rendezvous of a membership generation.

* The state is two counters, `TrainerState`; checkpoints have the layout of `libra_hpc.state.state_folders`.
* A weight file is a safetensors file with one small tensor, so transfer, checksums and storage are real.
* Rendezvous: each process writes its state to a file beside the path torch would use, and reads those of its peers.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from libra_hpc.files import write_atomic
from libra_hpc.state import state_folders as folders
from libra_hpc.trainer.link import PeerLost
from libra_hpc.weights.pieces import WHOLE, Encoded, Offer, TensorBlock, write_offer
from libra_hpc.weights.weightfile import file_header

TENSOR = "simulated.step"
ELEMENTS = 4096
"""float32 elements of a weight file (16 KiB): its transfer takes no time."""
PARTS = 4
"""Parts of the tensor; a step changes one of them, so a node that lacks an update has other weights."""
MEET_POLL_S = 0.01
"""Seconds between two checks of the rendezvous files."""


def image_shapes() -> dict[str, tuple[int, ...]]:
    """Return the shapes of the weights."""
    return {TENSOR: (ELEMENTS,)}


def weights(step: int) -> npt.NDArray[np.float32]:
    """Return the weights of a step: each part has the number of the step that changed it last."""
    parts = np.arange(ELEMENTS, dtype=np.float32) // (ELEMENTS // PARTS)
    return np.maximum(step - (step - parts) % PARTS, 0.0)


def offer(folder: Path, step: int, base: int, rank: int) -> tuple[Offer, int]:
    """The offer of a process; the first has the tensor; and elements owned.  Raises `OSError`.

    ``base``: the step whose weights it changes; `WHOLE`: none.
    """
    values = weights(step).view(np.int32)
    changed = np.flatnonzero(values != weights(base).view(np.int32)) if base != WHOLE else np.arange(ELEMENTS)
    size = ELEMENTS // PARTS
    pieces = [
        Encoded(TensorBlock(TENSOR, at, 1, size, ELEMENTS), "F32", "dense", size, (values[at : at + size],))
        for at in range(0, 0 if rank else ELEMENTS, size)
        if at in changed
    ]
    return write_offer(folder, step, base, f"t{rank}", pieces), 0 if rank else ELEMENTS


def holds(image: Path, step: int) -> bool:
    """Whether an image has the weights of a step and no others."""
    return image.read_bytes().endswith(weights(step).tobytes())


def export(path: Path, step: int) -> None:
    """Write the weights of ``step``; raises `OSError`, and leaves nothing behind, when there is no room."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, file_header(image_shapes(), "F32")[0] + weights(step).tobytes())


def write(folder: Path, step: int, updates: int) -> folders.Manifest:
    """Write the files of a checkpoint but its policy; raises `OSError` when there is no room."""
    folders.check_room(folder, ELEMENTS * 4)
    folder.mkdir(exist_ok=True)
    counters = folder / folders.STATE_FILE
    counters.write_bytes(msgspec.json.encode(folders.TrainerState(step, updates)))
    return folders.seal(folder, [counters])


def meet(
    base: str, *, position: int, size: int, own: folders.TrainerState, timeout_s: float, interrupted: Callable[[], bool]
) -> folders.TrainerState:
    """Wait for ``size`` peers, of which this is number ``position``; returns the state of the first, in the core.

    Raises `PeerLost` after ``timeout_s``, or once ``interrupted()`` returns True (a newer message waits).
    """
    paths = [Path(f"{base}-{number}") for number in range(size)]
    write_atomic(paths[position], msgspec.json.encode(own))
    missing = set(paths)
    deadline = time.monotonic() + timeout_s
    while True:
        missing = {path for path in missing if not path.exists()}
        if not missing:
            return folders.trainer_state.decode(paths[0].read_bytes())
        if interrupted() or time.monotonic() > deadline:
            raise PeerLost(f"{len(missing)} of {size} members did not appear")
        time.sleep(MEET_POLL_S)
