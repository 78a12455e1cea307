"""What the trajectories of a start are made from, as a digest: starts with the same one sample the same groups, so
those of one may go on in another.

That is what the environment hosts are told (task, options, seed, limits of tools; in a dry run the workload) with the
user's own task file, the number of prompts of the run, which tasks see as progress, and what shapes a trajectory:
model, temperature, group size, longest context.  The layout of the ranks, the engines and the learning algorithm are
not part of it.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec

from libra_hpc.config.run import RunConfig

from .commands import host_settings

RECORDS = 1
"""Of the format of records: another number, and nothing of before counts."""


def digest(config: RunConfig) -> str:
    """The digest, in hexadecimal.  The limit of a step decides whether a trajectory ends, not what it is made from."""
    told = msgspec.json.decode(host_settings(config))
    told.pop("step_limit_s", None)
    algorithm, rollout, model = config.algorithm, config.rollout, config.model
    parts = [
        RECORDS,
        told,
        config.run.steps * algorithm.prompts_per_step,
        algorithm.group_size,
        rollout.temperature,
        rollout.max_model_len,
        model.path,
        model.dtype,
    ]
    found = hashlib.sha256(msgspec.json.encode(parts))
    file = Path(config.task.name.rsplit(":", 1)[0])
    if ":" in config.task.name and file.is_file():
        found.update(file.read_bytes())
    return found.hexdigest()[:16]
