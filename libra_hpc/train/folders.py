"""Checkpoint and snapshot folders: what is in one, which one is newest, and how one appears all at once.

A folder holds ``policy/`` (a Hugging Face folder: config, tokenizer, ``model.safetensors``), ``optimizer.safetensors`` (``exp_avg/<HF name>``,
``exp_avg_sq/<HF name>``, and ``master/<HF name>`` when the weights are kept in less than float32) and ``trainer.json``.  It is written under a temporary
name and renamed when complete, so a folder that carries its final name is whole; a process killed while writing leaves only a temporary one behind.

Needs no torch, so an agent may use it.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import msgspec

FORMAT = 1
"""Version of the layout above."""
STATE_FILE = "trainer.json"
OPTIMIZER_FILE = "optimizer.safetensors"
POLICY_DIR = "policy"
TEMPORARY = ".partial"
"""Suffix of a folder or file that is being written."""


class TrainerState(msgspec.Struct, frozen=True):
    """``trainer.json``: the counters of a saved state."""

    step: int
    """Global batches trained."""
    updates: int
    """Optimizer updates (``step`` times minibatches, less the skipped ones), Adam's own counter."""
    format: int = FORMAT


def read_state(folder: Path) -> TrainerState:
    """Counters of the state in ``folder``; raises `ValueError` for an unknown format, `OSError` when there is none."""
    state = msgspec.json.decode((folder / STATE_FILE).read_bytes(), type=TrainerState)
    if state.format != FORMAT:
        raise ValueError(f"{folder} has checkpoint format {state.format}, this version reads {FORMAT}")
    return state


def is_state(folder: Path) -> bool:
    """True when ``folder`` is a complete checkpoint or snapshot."""
    return (folder / STATE_FILE).is_file() and not folder.name.endswith(TEMPORARY)


def latest(parent: Path) -> Path | None:
    """The complete state with the highest step directly under ``parent``, or None."""
    if not parent.is_dir():
        return None
    found = [folder for folder in parent.iterdir() if is_state(folder)]
    return max(found, key=lambda folder: read_state(folder).step, default=None)


def resolve(folder: Path) -> Path:
    """``folder`` itself when it is a state, else the newest one in it; raises `FileNotFoundError` when there is neither."""
    found = folder if is_state(folder) else latest(folder)
    if found is None:
        raise FileNotFoundError(f"no complete checkpoint in {folder}")
    return found


def sync_tree(folder: Path) -> None:
    """Flush every file under ``folder``, and the folders themselves, to the disk."""
    for path in [*folder.rglob("*"), folder]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def publish(partial: Path, final: Path) -> None:
    """Give a complete folder its final name; an older folder of that name is moved aside first and then removed."""
    sync_tree(partial)
    old = final.with_name(f"{final.name}.old{TEMPORARY}")
    shutil.rmtree(old, ignore_errors=True)
    if final.exists():
        final.rename(old)
    partial.rename(final)
    shutil.rmtree(old, ignore_errors=True)


def keep_newest(parent: Path, keep: int) -> None:
    """Remove all but the ``keep`` newest complete states directly under ``parent``, and what killed writers left."""
    states = sorted((folder for folder in parent.iterdir() if is_state(folder)), key=lambda folder: read_state(folder).step)
    leftovers = [folder for folder in parent.iterdir() if folder.name.endswith(TEMPORARY)]
    for folder in [*states[: max(0, len(states) - keep)], *leftovers]:
        shutil.rmtree(folder, ignore_errors=True)
