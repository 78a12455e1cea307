"""Replace files and folders atomically, keep what can be made again, and read JSON with errors that name the file."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from .errors import UserError, error_text, invalid

OWNER_ONLY = 0o600
"""Mode of a file that may have secrets."""
OTHERS_WRITE = 0o022
"""Bits of a mode."""
NEW = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
"""Flags to replace the content of a file, or make it, and never through a link."""

T = TypeVar("T")

NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV)
"""Numbers of the errors of a file system without hard links."""


def cache_folder() -> Path:
    """What can be made again is there: ``$LIBRA_HPC_CACHE`` or ``~/.cache/libra-hpc``."""
    return Path(os.environ.get("LIBRA_HPC_CACHE") or Path.home() / ".cache" / "libra-hpc").absolute()


def write_atomic(path: Path, data: bytes, mode: int | None = None) -> None:
    """Replace ``path``: a reader sees the old or the new content, never a part, even after a crash.

    ``mode``: its permissions; None: those of a new file, which nobody else can write.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(os.open(temporary, NEW, 0o644 if mode is None else mode), "wb") as handle:
            if mode is not None:
                os.fchmod(handle.fileno(), mode)
            handle.write(data)
            handle.flush()
            os.fsync(handle.fileno())
        temporary.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        # A write names no file, and who reads of the temporary one does not know it.
        error.filename = str(path)
        raise


def sync(path: Path) -> None:
    """Have a file, or the names in a folder, survive a loss of power."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def complete_folder(partial: Path, final: Path) -> None:
    """Rename a written folder to ``final``, in place of an older one."""
    old = final.with_name(f"{final.name}.old.partial")
    shutil.rmtree(old, ignore_errors=True)
    if final.exists():
        final.rename(old)
    partial.rename(final)
    sync(final.parent)
    shutil.rmtree(old, ignore_errors=True)


def read_own(path: Path) -> bytes:
    """The content of a file of this user; raises `OSError` for a link, and where others may have put the file."""
    # A pipe of somebody else is opened without waiting for its writer.
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as handle:
        for found in (os.fstat(handle.fileno()), path.parent.stat()):
            if found.st_uid != os.geteuid() or found.st_mode & OTHERS_WRITE:
                raise PermissionError(errno.EPERM, "it may be another user's", str(path))
        return handle.read()


def write_result(path: Path, data: bytes) -> None:
    """Write a file that a user named, like `write_atomic`; raises `UserError` when it cannot be written."""
    try:
        write_atomic(path, data)
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror}).") from None


def write_once(path: Path, data: bytes) -> bool:
    """Write like `write_atomic`, but return False and change nothing when ``path`` exists; of several writers one
    wins.

    - The file system has no hard links -> exclusive creation; a reader may then see a part.
    - ``path`` has this content -> True: the answer to the link was lost, as over NFS.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        write_atomic(temporary, data)
        os.link(temporary, path)
    except FileExistsError:
        return path.read_bytes() == data
    except OSError as error:
        if error.errno not in NO_LINKS:
            error.filename = str(path)
            raise
        return _create(path, data)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
    return True


def _create(path: Path, data: bytes) -> bool:
    """Create a file with its content; returns whether there was none."""
    try:
        handle = path.open("xb")
    except FileExistsError:
        return False
    try:
        with handle:
            handle.write(data)
    except OSError:
        # Nobody else would make it.
        path.unlink(missing_ok=True)
        raise
    return True


def read_object(path: Path, what: str) -> dict[str, Any]:
    """Read a JSON object; raises `UserError` with the file, ``what`` it is, and the reason."""
    try:
        value = json.loads(path.read_bytes())
    except RecursionError as error:
        raise UserError(f"{path}: {what} cannot be read: it is nested too deeply.") from error
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: {what} cannot be read: {error_text(error).rstrip('.')}.") from error
    if not isinstance(value, dict):
        raise UserError(f"{path}: {what} is not a JSON object.")
    return value


def read_or_none(path: Path, decoder: msgspec.json.Decoder[T]) -> T | None:
    """What a JSON file has; None where it is absent, cannot be read, or is no such JSON."""
    try:
        return decoder.decode(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None


def read_named(field: str, path: Path, decoder: msgspec.json.Decoder[T], valid: str) -> T:
    """What a JSON file has that ``field`` of the user names; raises `UserError`."""
    try:
        return decoder.decode(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise invalid(field, str(path), error_text(error), valid) from error


def digest(asked: object, files: Iterable[Path] = ()) -> str:
    """Return a digest of a question, this library and files: an answer to an equal one is the same."""
    library = Path(__file__).parent
    found = (*sorted(library.rglob("*.py")), *sorted(library.rglob("*.json")), *files)
    stamps = [(str(path), path.stat().st_mtime_ns, path.stat().st_size) for path in found if path.is_file()]
    return hashlib.sha256(msgspec.json.encode((asked, stamps))).hexdigest()
