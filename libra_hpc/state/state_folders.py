"""Checkpoint and snapshot folders: contents, choice of the newest, atomic publication.

- ``policy/``: a Hugging Face folder (config, tokenizer, ``model.safetensors``)
- ``optimizer/rank-NNNNN.safetensors``: every rank's shards (`libra_hpc.trainer.saved.shard_files`)
- ``trainer.json``: counters
- ``manifest.json``, written last: size and checksum of every other file, for `verify`
- ``state.json``: the data position; the train leader adds it to a checkpoint

A snapshot has ``snapshot-NNNNN.safetensors`` of the ranks of one node (`trainer.saved.snapshot`), ``trainer.json``
and ``manifest.json``.

A folder is written under a temporary name and renamed when complete. Needs no torch: agents use it.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from libra_hpc.protocol.agents import StepReport
from libra_hpc.weights.checksum import file_crc32

from .data_order import DataOrder

FORMAT = 2
"""Version of this layout."""
STATE_FILE = "trainer.json"
POLICY_DIR = "policy"
MANIFEST_FILE = "manifest.json"
POSITION_FILE = "state.json"
TEMPORARY = ".partial"
"""Suffix of an unfinished folder or file."""
DAMAGED = ".damaged"
"""Suffix of a damaged checkpoint folder that was moved aside."""
SPARE = 0.05
"""Share of the written bytes that must stay free beyond them, for blocks, folders and others' files."""
THREADS = 8
"""Checksums computed at a time; zlib releases the interpreter's lock."""


Manifest = dict[str, tuple[int, int]]
"""Size and CRC-32 of files, by their path below a folder."""


class TrainerState(msgspec.Struct, frozen=True):
    """``trainer.json``: the counters of a saved state."""

    step: int
    updates: int
    """Optimizer updates (``step`` times minibatches, less the skipped ones): Adam's counter."""
    format: int = FORMAT


class StepRecord(msgspec.Struct, frozen=True):
    """A committed step whose line in `metrics.jsonl` was not yet known to be durable at the checkpoint."""

    step: int
    t: float
    metrics: dict[str, float | None]
    """As `StepReport.metrics`; None: not finite."""


class DataPosition(msgspec.Struct, frozen=True):
    """``state.json``: trained prompts at a checkpoint, all below ``low`` and those in ``extra``."""

    step: int
    low: int
    extra: tuple[int, ...]
    reports: tuple[StepRecord, ...] = ()


def position_of(step: int, order: DataOrder, reports: Iterable[StepReport]) -> DataPosition:
    """The data position at a step."""
    records = tuple(StepRecord(r.step, r.t, dict(r.metrics)) for r in reports)
    return DataPosition(step, order.low, tuple(sorted(order.extra)), records)


def read_position(folder: Path) -> DataPosition:
    """Data position of a checkpoint; raises `ValueError` when it is torn, `OSError` when it cannot be read."""
    try:
        return msgspec.json.decode((folder / POSITION_FILE).read_bytes(), type=DataPosition)
    except msgspec.DecodeError as error:
        raise ValueError(f"{POSITION_FILE} is torn: {error}") from error


def write_position(folder: Path, position: DataPosition) -> None:
    """Complete a checkpoint: without a data position it does not count."""
    path = folder / POSITION_FILE
    partial = path.with_name(f".{path.name}{TEMPORARY}")
    partial.write_bytes(msgspec.json.encode(position))
    sync(partial)
    partial.rename(path)


def read_state(folder: Path) -> TrainerState:
    """Counters of a state; raises `ValueError` for an unknown format, `OSError` when there is none."""
    state = msgspec.json.decode((folder / STATE_FILE).read_bytes(), type=TrainerState)
    if state.format != FORMAT:
        raise ValueError(f"{folder} has checkpoint format {state.format}, this version reads {FORMAT}")
    return state


def is_state(folder: Path) -> bool:
    return (folder / STATE_FILE).is_file() and not folder.name.endswith(TEMPORARY)


def latest(parent: Path) -> Path | None:
    """The complete state with the highest step in ``parent``, or None."""
    if not parent.is_dir():
        return None
    found = [folder for folder in parent.iterdir() if is_state(folder)]
    return max(found, key=_step, default=None)


def _step(folder: Path) -> int:
    """Step of a state; an unreadable one counts as the oldest."""
    try:
        return read_state(folder).step
    except (OSError, ValueError):
        return -1


def latest_whole(parent: Path) -> Path | None:
    """As `latest`, of the states that pass `verify`; reads all their bytes."""
    found = [folder for folder in parent.iterdir() if is_state(folder)] if parent.is_dir() else []
    for folder in sorted(found, key=lambda folder: folder.name, reverse=True):
        if not verify(folder):
            return folder
    return None


def verify(folder: Path) -> str:
    """Compare a state with its manifest: empty when it is whole, else a sentence that names the first bad file.

    Without a manifest (older versions) it counts as whole.
    """
    try:
        data = (folder / MANIFEST_FILE).read_bytes()
    except FileNotFoundError:
        return ""
    except OSError as error:
        return f"{MANIFEST_FILE} cannot be read: {error}."
    try:
        manifest = msgspec.json.decode(data, type=Manifest)
    except (msgspec.DecodeError, ValueError):
        # Bytes that are not UTF-8 raise a plain ValueError.
        return f"{MANIFEST_FILE} is torn."
    for name, (size, _) in manifest.items():
        try:
            found = (folder / name).stat().st_size
        except (FileNotFoundError, NotADirectoryError):
            return f"{name} is missing."
        except (OSError, ValueError) as error:
            return f"{name!r} cannot be read: {error}."
        if found != size:
            return f"{name} has {found} bytes, {size} were written."
    for name, crc in _checksums(folder, manifest).items():
        if isinstance(crc, OSError):
            return f"{name} cannot be read: {crc}."
        if crc != manifest[name][1]:
            return f"{name} has not the checksum with which it was written."
    return ""


def _checksums(folder: Path, names: Iterable[str]) -> dict[str, int | OSError]:
    def checksum(name: str) -> int | OSError:
        try:
            return file_crc32(folder / name)
        except OSError as error:
            return error

    with ThreadPoolExecutor(THREADS) as pool:
        return dict(zip(names, pool.map(checksum, names), strict=True))


def check_room(folder: Path, needed: int) -> None:
    """Raise `OSError` when the file system of ``folder``, existing or not, lacks room for ``needed`` bytes."""
    existing = folder
    while not existing.exists():
        existing = existing.parent
    free = shutil.disk_usage(existing).free
    if free < needed * (1.0 + SPARE):
        raise OSError(errno.ENOSPC, f"{folder} needs {needed} bytes, and its file system has {free} bytes free")


def resolve(folder: Path) -> Path:
    """``folder`` if it is a state, else the newest state in it; raises `FileNotFoundError` when there is none.

    A checkpoint (its name ends with its step) may be removed after it was chosen: then a newer one is complete, and
    is returned.
    """
    found = folder if is_state(folder) else latest(folder)
    if found is None and not folder.exists() and folder.name[-1:].isdigit():
        found = latest(folder.parent)
    if found is None:
        raise FileNotFoundError(f"no complete checkpoint in {folder}")
    return found


def sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def seal(folder: Path, paths: Iterable[Path]) -> Manifest:
    """Make files below ``folder`` durable; returns their entries of the manifest."""
    names = sorted(str(path.relative_to(folder)) for path in paths)
    with ThreadPoolExecutor(1) as pool:
        # The disk writes while the processor sums.
        synced = pool.submit(_sync_all, [folder / name for name in names])
        checksums = _checksums(folder, names)
        synced.result()
    found = {}
    for name, crc in checksums.items():
        if isinstance(crc, OSError):
            raise crc
        found[name] = (folder.joinpath(name).stat().st_size, crc)
    return found


def _sync_all(paths: list[Path]) -> None:
    for path in [*paths, *{path.parent for path in paths}]:
        sync(path)


def publish(partial: Path, final: Path, manifest: Manifest | None = None) -> None:
    """Write the manifest of a complete folder and rename it to ``final``, replacing an older one.

    ``manifest``: default: all files of the folder, which become durable.
    """
    if manifest is None:
        manifest = seal(partial, [path for path in partial.rglob("*") if path.is_file()])
    (partial / MANIFEST_FILE).write_bytes(msgspec.json.encode(manifest))
    for path in (partial / MANIFEST_FILE, partial):
        sync(path)
    old = final.with_name(f"{final.name}.old{TEMPORARY}")
    shutil.rmtree(old, ignore_errors=True)
    if final.exists():
        final.rename(old)
    partial.rename(final)
    shutil.rmtree(old, ignore_errors=True)


def remove_leftovers(parent: Path) -> None:
    """Remove what killed writers left in ``parent``; nobody may be writing there."""
    for folder in parent.iterdir():
        if folder.name.endswith(TEMPORARY):
            shutil.rmtree(folder, ignore_errors=True)
