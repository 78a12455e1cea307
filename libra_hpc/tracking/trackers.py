"""Where metrics go: TensorBoard files in the run directory, and Weights & Biases.

Each is a library of its own, which is installed only by those who want it (`pip install 'libra-hpc[track]'`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from libra_hpc.config.run import RunConfig
from libra_hpc.errors import UserError
from libra_hpc.facts.rundir import RunDir


class Tracker(Protocol):
    """Gets every step once, in order."""

    name: str

    def send(self, step: int, values: Mapping[str, float]) -> None:
        """The metrics of a step."""

    def again(self, step: int) -> bool:
        """The steps behind ``step`` are trained again; whether they may be sent again."""

    def flush(self) -> None:
        """What was sent survives a kill of this process."""

    def close(self) -> None: ...


class TensorBoard:
    name = "tensorboard"

    def __init__(self, folder: Path, sent: int) -> None:
        self._make, self._folder = _library("tensorboardX", self.name).SummaryWriter, folder
        # Whatever a killed process has sent beyond its record is shown from this one alone.
        self._writer = self._make(str(folder), purge_step=sent + 1)

    def send(self, step: int, values: Mapping[str, float]) -> None:
        wall_time = values.get("t")
        for key, value in values.items():
            if key not in ("step", "t"):
                self._writer.add_scalar(key, value, step, walltime=wall_time)

    def again(self, step: int) -> bool:
        self._writer.close()
        self._writer = self._make(str(self._folder), purge_step=step + 1)
        return True

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class Wandb:
    """A run there is the run here: it has its name, and is continued by every attempt."""

    name = "wandb"

    def __init__(self, run: RunDir, config: RunConfig) -> None:
        settings = config.track.wandb
        folder = run.path / "track" / self.name
        folder.mkdir(parents=True, exist_ok=True)
        self._run = _library("wandb", self.name).init(
            project=settings.project,
            entity=settings.entity or None,
            mode=settings.mode,
            id=run.name,
            name=run.name,
            resume="allow",
            dir=str(folder),
            config=config.model_dump(exclude={"compute", "track"}),
        )

    def send(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def again(self, step: int) -> bool:
        """Its steps only grow: what was sent stays."""
        return False

    def flush(self) -> None:
        """It writes in a process of its own, which outlives this one until all is on disk."""

    def close(self) -> None:
        self._run.finish()


def _library(module: str, name: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        raise UserError(
            f"track.{name}: {module} is not installed where the run is tracked ({error}); `pip install {module}`"
        ) from error


def trackers(run: RunDir, config: RunConfig, sent: Mapping[str, int]) -> list[Tracker]:
    """Those that the run file asks for; raises `UserError` for one whose library is missing."""
    found: list[Tracker] = []
    if config.track.tensorboard:
        found.append(TensorBoard(run.path / "track" / TensorBoard.name, sent.get(TensorBoard.name, 0)))
    if config.track.wandb.project:
        # Its own messages would go between those of the run.
        os.environ.setdefault("WANDB_SILENT", "true")
        found.append(Wandb(run, config))
    return found
