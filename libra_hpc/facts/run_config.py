"""The configuration of a run, from its run directory."""

from __future__ import annotations

from pathlib import Path

from libra_hpc.config.load import validate
from libra_hpc.config.run import RunConfig
from libra_hpc.errors import UserError
from libra_hpc.files import read_object


def load_resolved(path: Path) -> RunConfig:
    """Read a `RunDir.config` file; raises `UserError` naming the file when it is no valid configuration."""
    data = read_object(path, "the configuration of the run")
    try:
        return validate(data)
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
