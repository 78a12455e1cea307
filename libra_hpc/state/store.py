"""Which states there are in memory (snapshots) and on disk (checkpoints), and which is the newest whole one.

A state is one of three things:

- whole -> its bytes are those of its manifest.
- damaged -> a checksum proves it, or a file that stays missing or short; an older one is taken, with a sentence.
- unreadable -> an `OSError`, which proves nothing; `libra_hpc.process.retry` reads again after growing pauses.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from libra_hpc.process.retry import ABSENT, Patience

from .state_folders import STATE_FILE, read_position, verify

AGAIN_S = 60.0
"""Longest that an NFS client caches a folder. Half: whole checkpoints move aside; double: a torn one costs more."""
DOUBTFUL = (" is missing.", " were written.", " is torn.")
"""Ends of sentences that a stale cache may cause; wrong bytes are damage at once."""

log = logging.getLogger("libra_hpc.state")
_NAME = re.compile(r"step-(\d+)(\.attempt-[\d.-]+)?")
"""Name of a checkpoint, or of a snapshot, which has the start of the ranks in it; not of one that was moved aside."""


class SavedState(NamedTuple):
    step: int
    folder: Path


class NewestWhole(NamedTuple):
    whole: SavedState | None
    damaged: list[tuple[SavedState, str]]
    """Newer ones, each with its sentence."""


def states(parent: Path) -> list[SavedState]:
    """The states in a folder by their names, the newest first; raises `OSError` where that cannot be read."""
    try:
        found = [SavedState(step_of(name), parent / name) for name in os.listdir(parent) if _NAME.fullmatch(name)]
    except ABSENT:
        return []
    return sorted(found, reverse=True)


def step_of(name: str) -> int:
    """Step of a state, by its name."""
    return int(name.partition(".")[0].removeprefix("step-"))


def damage(state: SavedState) -> str:
    """Why a state is not whole; reads all its bytes."""
    return verify(state.folder)


def position_damage(state: SavedState) -> str:
    """Why the data position of a state does not count; reads no weights."""
    try:
        position = read_position(state.folder)
    except (*ABSENT, ValueError) as error:
        return f"{error}."
    return "" if position.step == state.step else f"{state.folder.name} has the data position of step {position.step}."


def checkpoint_damage(state: SavedState) -> str:
    """Why a checkpoint is not whole; its data position is a part of it.

    A stale cache of a file system shows a file as missing or short, so such a file is read again for `AGAIN_S`.
    """
    patience = Patience(AGAIN_S, time.monotonic())
    while (why := damage(state) or position_damage(state)).endswith(DOUBTFUL):
        if (pause_s := patience.failed(time.monotonic())) is None:
            break
        log.warning("checkpoint %s: %s It is read again.", state.folder.name, why)
        time.sleep(pause_s)
    return why


def newest_whole(found: Iterable[SavedState], why_not: Callable[[SavedState], str] = damage) -> NewestWhole:
    """The newest whole one; of equal steps the first. Raises `OSError` for an unreadable one that may be it."""
    damaged: list[tuple[SavedState, str]] = []
    for state in sorted(found, key=lambda state: -state.step):
        if not (why := why_not(state)):
            return NewestWhole(state, damaged)
        damaged.append((state, why))
    return NewestWhole(None, damaged)


def newest_until(found: Iterable[SavedState], step: int) -> SavedState | None:
    """The newest state of a step or before, by its name."""
    return max((state for state in found if state.step <= step), default=None)


def resolve(folder: Path) -> Path:
    """``folder`` if it is a state, else the newest whole state in it; raises `FileNotFoundError` without one.

    A state may be removed after it was chosen, because a newer one is complete: then that one is returned.
    """
    if (folder / STATE_FILE).exists():
        return folder
    for parent in (folder, *([folder.parent] if _NAME.fullmatch(folder.name) else [])):
        if (newest := newest_whole(states(parent)).whole) is not None:
            return newest.folder
    raise FileNotFoundError(f"no complete checkpoint in {folder}")
