"""The register of a user's runs: where they are, with tags and notes, for a shell in any folder.

- The file is `runs.jsonl` in ``$XDG_DATA_HOME/libra-hpc``, by default `~/.local/share/libra-hpc`.
- ``LIBRA_HPC_REGISTER`` names another file; ``LIBRA_HPC_REGISTER=none``: no register.
- One line a fact, appended by one `write`, so that several login shells may write; readers skip a torn line.
- It cannot be written -> ``note`` fails; other verbs do without it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Literal

import msgspec

from libra_hpc.errors import OperationError, UserError, error_text
from libra_hpc.facts.rundir import RunDir

from .output import print_note

VARIABLE = "LIBRA_HPC_REGISTER"
NONE = "none"
Kind = Literal["run", "note", "tag", "untag", "forget"]


class RegisterLine(msgspec.Struct, frozen=True, omit_defaults=True):
    """One fact of a run; every kind but ``forget`` registers it."""

    run: str
    """Its folder, without symbolic links."""
    kind: Kind = "run"
    text: str = ""
    """The note or the tag."""
    t: float = msgspec.field(default_factory=time.time)
    """Epoch seconds."""


class RunNote(msgspec.Struct, frozen=True):
    """What a user wrote about a run."""

    t: float
    text: str


class RegisteredRun(msgspec.Struct, frozen=True):
    """What the register has of one run."""

    tags: list[str] = []
    notes: list[RunNote] = []
    """The oldest first."""

    @property
    def words(self) -> str:
        """Tags and the last note in one line; empty without any."""
        tags = " ".join(f"#{tag}" for tag in self.tags)
        return "  ".join(filter(None, (tags, self.notes[-1].text if self.notes else "")))


_decoder = msgspec.json.Decoder(RegisterLine)


def place(environ: Mapping[str, str] = os.environ) -> Path | None:
    """The file of the register; None: there is to be none."""
    named = environ.get(VARIABLE, "")
    if named:
        return None if named == NONE else Path(named).expanduser()
    data = environ.get("XDG_DATA_HOME", "")
    # The standard wants a relative path to be ignored.
    folder = Path(data) if os.path.isabs(data) else Path("~/.local/share").expanduser()
    return folder / "libra-hpc" / "runs.jsonl"


def registered() -> dict[Path, RegisteredRun]:
    """All runs by folder, as first registered; empty where the register is missing or unreadable."""
    found: dict[Path, RegisteredRun] = {}
    for line in _lines():
        path, known = Path(line.run), found.get(Path(line.run), RegisteredRun())
        if line.kind == "forget":
            found.pop(path, None)
            continue
        tags = [tag for tag in known.tags if tag != line.text or line.kind not in ("tag", "untag")]
        new = [line.text] if line.kind == "tag" else []
        notes = [RunNote(line.t, line.text)] if line.kind == "note" else []
        found[path] = RegisteredRun([*tags, *new], [*known.notes, *notes])
    return found


def of_run(run: RunDir) -> RegisteredRun:
    """What the register has of ``run``."""
    return registered().get(real(run), RegisteredRun())


def real(run: RunDir) -> Path:
    """The folder of a run as the register has it: two paths with symbolic links name one run."""
    return Path(os.path.realpath(run.path))


def add(facts: Iterable[RegisterLine]) -> None:
    """Append facts; raises `OperationError` when the register cannot be written."""
    path = place()
    if path is None:
        raise UserError(f"{VARIABLE} = {NONE!r}: there is no register to write to; valid: a file, or unset.")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            end = os.fstat(handle).st_size
            if end and os.pread(handle, 1, end - 1) != b"\n":
                os.write(handle, b"\n")
            for fact in facts:
                os.write(handle, msgspec.json.encode(fact) + b"\n")
        finally:
            os.close(handle)
    except OSError as error:
        raise OperationError(f"The register of runs {path} cannot be written: {error_text(error)}.") from error


def note_down(facts: Iterable[RegisterLine]) -> None:
    """Add facts for a verb that can do without: a register that cannot be written is only a note."""
    if place() is None:
        return
    try:
        add(facts)
    except OperationError as error:
        print_note(f"`libra-hpc list` finds runs in their folders only: {error}")


def remember(run: RunDir) -> None:
    """Register a run that was queued, unless it is."""
    if real(run) not in registered():
        note_down([RegisterLine(str(real(run)))])


def _lines() -> Iterator[RegisterLine]:
    path = place()
    try:
        data = b"" if path is None else path.read_bytes()
    except OSError:
        return
    for line in data.splitlines():
        try:
            yield _decoder.decode(line)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            continue
