"""What the trajectories of a start are made from, as a digest: trajectories go on between starts with the same one.

- Part of it: the settings of the environment hosts (task, options, seed, limits of tools; in a dry run the workload).
- Part of it: the user's files of task and reward, and size, beginning and end of the data's files.
- Part of it: the run's number of prompts, which tasks see as progress.
- Part of it: model, temperature, group size, longest context.
- Not part of it: the layout of the ranks, the engines and the learning algorithm.
"""

from __future__ import annotations

import hashlib
import zlib
from pathlib import Path

import msgspec

from libra_hpc.config.run import RunConfig
from libra_hpc.host.settings import made_from

END_BYTES = 1 << 20
"""Most bytes of each end of a data file that are compared; it may have gigabytes."""
RECORDS = 2
"""Version of the format of records; records of another version do not count."""


def digest(config: RunConfig) -> str:
    """Return the digest of a configuration, in hexadecimal."""
    environment = made_from(config)
    environment.get("options", {}).pop("evals", None)
    algorithm, rollout, model = config.algorithm, config.rollout, config.model
    parts = [
        RECORDS,
        environment,
        config.run.steps * algorithm.prompts_per_step,
        algorithm.group_size,
        rollout.temperature,
        rollout.max_model_len,
        model.path,
        model.dtype,
    ]
    found = hashlib.sha256(msgspec.json.encode(parts))
    for file in filter(Path.is_file, config.task.code_files):
        found.update(file.read_bytes())
    for _, table in config.task.tables.values():
        if table.data:
            data = Path(table.data)
            files = sorted(data.iterdir()) if data.is_dir() else [data]
            found.update(repr([_ends(file) for file in files]).encode())
    return found.hexdigest()[:16]


def _ends(file: Path) -> tuple[int, int]:
    """Size of a file, and a checksum of its beginning and end: rows in another order are another file."""
    size = file.stat().st_size
    with file.open("rb") as data:
        found = zlib.crc32(data.read(END_BYTES))
        data.seek(max(0, size - END_BYTES))
        return size, zlib.crc32(data.read(END_BYTES), found)
