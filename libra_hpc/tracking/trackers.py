"""Where metrics go: TensorBoard files in the run directory, and Weights & Biases.

Both are libraries, installed only by those who want them (`pip install 'libra-hpc[track]'`).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
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
    """Writes event files itself: the library's own writer has a queue, which its flush does not wait for."""

    name = "tensorboard"

    def __init__(self, folder: Path, sent: int) -> None:
        self._events = _library("tensorboardX.proto.event_pb2", self.name)
        self._summary = _library("tensorboardX.proto.summary_pb2", self.name).Summary
        self._make = _library("tensorboardX.event_file_writer", self.name).EventsWriter
        self._folder, self._files = folder, 0
        folder.mkdir(parents=True, exist_ok=True)
        # Whatever a killed process has sent beyond its record is shown from this one alone.
        self._begin(sent)

    def _begin(self, sent: int) -> None:
        """A file of its own, which purges the steps behind ``sent``; files are named by the second."""
        self._files += 1
        self._writer = self._make(str(self._folder / "events"), f".{os.getpid()}.{self._files}")
        log = self._events.SessionLog(status=self._events.SessionLog.START)
        self._writer.write_event(self._events.Event(wall_time=time.time(), step=sent + 1, session_log=log))

    def send(self, step: int, values: Mapping[str, float]) -> None:
        numbers = {key: value for key, value in values.items() if key not in ("step", "t")}
        shown = [self._summary.Value(tag=key, simple_value=value) for key, value in numbers.items()]
        wall_time, summary = values.get("t", time.time()), self._summary(value=shown)
        self._writer.write_event(self._events.Event(wall_time=wall_time, step=step, summary=summary))

    def again(self, step: int) -> bool:
        self._writer.close()
        self._begin(step)
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
            config={key: table for key, table in config.as_data().items() if key not in ("compute", "track")},
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
        library = module.partition(".")[0]
        raise UserError(
            f"track.{name}: {library} is not installed where the run is tracked ({error}); `pip install {library}`"
        ) from error


def trackers(run: RunDir, config: RunConfig, sent: Callable[[str], int]) -> list[Tracker]:
    """Return the trackers that the run file asks for, which have the steps up to ``sent(name)``.

    Raises `UserError` for one whose library is missing.
    """
    found: list[Tracker] = []
    if config.track.tensorboard:
        found.append(TensorBoard(run.path / "track" / TensorBoard.name, sent(TensorBoard.name)))
    if config.track.wandb.project:
        # Its own messages would go between those of the run.
        os.environ.setdefault("WANDB_SILENT", "true")
        found.append(Wandb(run, config))
    return found
