"""The user's own Python files, copied into the run directory for each attempt: what ran can be read later.

Copies are for people. The run imports the files where they are, with whatever lies beside them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from libra_hpc.config.run import RunConfig

from .rundir import RunDir

_NAMED = re.compile(r"^(.+\.py):\w+$")
"""``path/to/file.py:Name``, as a run file names a class or function."""


def named_files(values: Any, key: str = "") -> Iterator[tuple[str, Path]]:
    """(dotted key, file) of every value that names a class or function of a file."""
    if isinstance(values, dict):
        for name, value in values.items():
            yield from named_files(value, f"{key}.{name}" if key else name)
    elif isinstance(values, list):
        for value in values:
            yield from named_files(value, key)
    elif isinstance(values, str) and (match := _NAMED.match(values)):
        yield key, Path(match[1])


def keep(run: RunDir, config: RunConfig, attempt: int) -> list[str]:
    """Copy the files of an attempt; returns a sentence for each that differs from the attempt before."""
    changed: list[str] = []
    for key, file in sorted(set(named_files(config.as_data()))):
        copy, before = (run.user_files(number) / key / file.name for number in (attempt, attempt - 1))
        content = file.read_bytes()
        if before.is_file() and before.read_bytes() != content:
            changed.append(f"{key}: {file} is not what attempt {attempt - 1} ran, which is kept in {before}")
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(content)
    return changed
