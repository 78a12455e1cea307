"""Answers remembered between calls: `check`, `submit` and `sweep` ask for the same plan.

- Question, code of this library and policy file are those of before -> the answer of before, to the last digit.
- The cache cannot be read or written -> the search runs.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import msgspec

from libra_hpc.files import digest, read_or_none, write_atomic
from libra_hpc.policies.search.run_plan import PlanResult

_result = msgspec.json.Decoder(PlanResult)


class Remembered:
    """The answer to one question, plain data; ``folder``: where answers are, None: nowhere."""

    def __init__(self, asked: object, policy: str, folder: Path | None) -> None:
        self._file = folder / "plans" / f"{digest(asked, [Path(policy.rpartition(':')[0])])}.json" if folder else None

    def result(self) -> PlanResult | None:
        """The answer of before."""
        return read_or_none(self._file, _result) if self._file else None

    def keep(self, result: PlanResult) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.parent.mkdir(parents=True, exist_ok=True)
                write_atomic(self._file, msgspec.json.encode(result))
