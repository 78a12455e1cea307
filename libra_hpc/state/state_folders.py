"""One saved state: the files of its folder, how it is written, what proves that it is whole, and which prompts it has.

- ``manifest.json``, written last: size and checksum of every other file
- ``trainer.json``: counters
- a checkpoint: ``policy/`` (a Hugging Face folder), ``optimizer/rank-NNNNN.safetensors`` (every rank's shards,
  `libra_hpc.trainer.saved.shard_files`), and ``state.json``, the data position
- a snapshot's part on a node: ``snapshot-NNNNN.safetensors`` of its ranks (`libra_hpc.trainer.saved.shard_files`)
- a snapshot's entry in the run directory: ``state.json``

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

from libra_hpc.checksum import file_crc32
from libra_hpc.files import complete_folder, sync
from libra_hpc.process.retry import ABSENT
from libra_hpc.protocol.agents import StepReport

FORMAT = 2
"""Version of this layout."""
STATE_FILE = "trainer.json"
POLICY_DIR, WEIGHTS_FILE = "policy", "model.safetensors"
"""The latter is in the former."""
MANIFEST_FILE = "manifest.json"
POSITION_FILE = "state.json"
TEMPORARY = ".partial"
"""Suffix of an unfinished folder or file."""
SPARE = 0.05
"""Share of the written bytes that must stay free beyond them, for blocks, folders and others' files."""
THREADS = 8
"""Checksums computed at a time; they do not hold the interpreter's lock."""


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
    """See `StepReport.metrics`; None: not finite."""


class DataPosition(msgspec.Struct, frozen=True):
    """``state.json``: trained prompts at a saved state, all below ``low`` and those in ``extra``."""

    step: int
    low: int
    extra: tuple[int, ...]
    reports: tuple[StepRecord, ...] = ()
    layout: str = ""
    """Digest of what decides which process owns what in a snapshot."""


_position, trainer_state, _manifest = (
    msgspec.json.Decoder(DataPosition),
    msgspec.json.Decoder(TrainerState),
    msgspec.json.Decoder(Manifest),
)


def position_of(step: int, order: DataOrder, reports: Iterable[StepReport]) -> DataPosition:
    """The data position at a step."""
    records = tuple(StepRecord(r.step, r.t, dict(r.metrics)) for r in reports)
    return DataPosition(step, order.low, tuple(sorted(order.extra)), records)


def read_position(folder: Path) -> DataPosition:
    """Data position of a state; raises `ValueError` when it is torn, `OSError` when it cannot be read."""
    try:
        return _position.decode((folder / POSITION_FILE).read_bytes())
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{POSITION_FILE} is torn: {error}") from error


def read_state(folder: Path) -> TrainerState:
    """Counters of a state; raises `ValueError` for an unknown format, `OSError` when there is none."""
    state = trainer_state.decode((folder / STATE_FILE).read_bytes())
    if state.format != FORMAT:
        raise ValueError(f"{folder} has checkpoint format {state.format}, this version reads {FORMAT}")
    return state


def verify(folder: Path, *, sizes_only: bool = False) -> str:
    """What proves a state damaged, as a sentence that names the first bad file; empty: it is whole.

    Raises `OSError` when a file cannot be read now, which proves nothing; a file more is none of ours.
    ``sizes_only``: reads no content.
    """
    try:
        manifest = _manifest.decode((folder / MANIFEST_FILE).read_bytes())
    except ABSENT:
        return f"{MANIFEST_FILE} is missing."
    except ValueError:
        # Also a `msgspec.DecodeError`; bytes that are not UTF-8 raise a plain one.
        return f"{MANIFEST_FILE} is torn."
    try:
        found = _files(folder)
        for name in sorted(manifest.keys() - found):
            return f"{name} is missing."
        for name, (size, _) in manifest.items():
            if (there := (folder / name).stat().st_size) != size:
                return f"{name} has {there} bytes, {size} were written."
        for name, crc in ({} if sizes_only else _checksums(folder, manifest)).items():
            if crc != manifest[name][1]:
                return f"{name} has not the checksum with which it was written."
    except ABSENT as error:
        return f"{error.filename} is missing."
    return "" if manifest else f"{MANIFEST_FILE} lists no file."


def _files(folder: Path) -> set[str]:
    """All files below a folder but the manifest, and hidden ones, which file systems make; raises `OSError`."""
    found: set[str] = set()
    left = [""]
    while left:
        below = left.pop()
        with os.scandir(folder / below) as entries:
            for entry in entries:
                name = f"{below}{entry.name}"
                if entry.is_dir(follow_symlinks=False):
                    left.append(f"{name}/")
                elif not entry.name.startswith("."):
                    found.add(name)
    return found - {MANIFEST_FILE}


def _checksums(folder: Path, names: Iterable[str]) -> dict[str, int]:
    def checksum(name: str) -> int:
        try:
            return file_crc32(folder / name)
        except OSError as error:
            # One of a read has no file name.
            error.filename = error.filename or str(folder / name)
            raise

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


def seal(folder: Path, paths: Iterable[Path]) -> Manifest:
    """Make files below ``folder`` durable; returns their entries of the manifest."""
    names = sorted(str(path.relative_to(folder)) for path in paths)
    with ThreadPoolExecutor(1) as pool:
        # The disk writes while the processor sums.
        synced = pool.submit(_sync_all, [folder / name for name in names])
        checksums = _checksums(folder, names)
        synced.result()
    return {name: ((folder / name).stat().st_size, crc) for name, crc in checksums.items()}


def _sync_all(paths: list[Path]) -> None:
    for path in [*paths, *{path.parent for path in paths}]:
        sync(path)


def publish(partial: Path, final: Path, files: Manifest = {}, position: DataPosition | None = None) -> None:  # noqa: B006
    """Complete a written folder with its position and manifest and rename it to ``final``, replacing an older one.

    ``files``: those that are durable already; all others become so.
    """
    if position is not None:
        (partial / POSITION_FILE).write_bytes(msgspec.json.encode(position))
    manifest = {**files, **seal(partial, [partial / name for name in _files(partial) - files.keys()])}
    (partial / MANIFEST_FILE).write_bytes(msgspec.json.encode(manifest))
    for path in (partial / MANIFEST_FILE, partial):
        sync(path)
    complete_folder(partial, final)


class DataOrder:
    """Trained prompt indices: all below `low`, and those in `extra`."""

    def __init__(self, low: int = 0, extra: Iterable[int] = ()) -> None:
        self.low, self.extra = low, set(extra)

    def has(self, index: int) -> bool:
        """Whether the prompt is trained."""
        return index < self.low or index in self.extra

    def trained(self, indices: Iterable[int]) -> None:
        for index in indices:
            if self.has(index):
                raise ValueError(f"prompt {index} is trained already")
            self.extra.add(index)
        while self.low in self.extra:
            self.extra.remove(self.low)
            self.low += 1
