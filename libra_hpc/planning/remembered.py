"""Seconds of simulated batches, remembered between calls: `check`, `submit` and `sweep` simulate the same plans.

- Question, code of this library and policy file are those of before -> the seconds of before, to the last digit.
- The cache cannot be read or written -> simulated again.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

from libra_hpc import errors
from libra_hpc.files import write_atomic

from .request import PlanRequest


class RememberedSeconds:
    """The batches of one question; ``folder``: where answers are, None: nowhere."""

    def __init__(self, asked: PlanRequest, folder: Path | None) -> None:
        self._file = (
            folder / "plans" / f"{digest(asked, [Path(asked.policy.rpartition(':')[0])])}.json" if folder else None
        )
        self._seconds: dict[str, tuple[float, float]] = {}
        if self._file is not None:
            with contextlib.suppress(OSError, ValueError):
                self._seconds = msgspec.json.decode(self._file.read_bytes(), type=dict[str, tuple[float, float]])

    def of(self, asked: object, simulated: Callable[[], tuple[float, float]]) -> tuple[float, float]:
        """The answer to ``asked``, plain data; ``simulated()`` where it is not known."""
        key = hashlib.sha256(msgspec.json.encode(asked)).hexdigest()
        if key not in self._seconds:
            self._seconds[key] = simulated()
            self._save()
        return self._seconds[key]

    def _save(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.parent.mkdir(parents=True, exist_ok=True)
                write_atomic(self._file, msgspec.json.encode(self._seconds))


def digest(asked: object, files: Iterable[Path] = ()) -> str:
    """Return a digest of a question, this library and files: an answer to an equal one is the same."""
    library = Path(errors.__file__).parent
    found = (*sorted(library.rglob("*.py")), *sorted(library.rglob("*.json")), *files)
    stamps = [(str(path), path.stat().st_mtime_ns, path.stat().st_size) for path in found if path.is_file()]
    return hashlib.sha256(msgspec.json.encode((asked, stamps))).hexdigest()
