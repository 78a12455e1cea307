"""File names of a run directory, and reading and writing of its JSON files.

- ``run.toml config.json job.sbatch job.json``: the run file, resolved, and what was queued.
- ``sweep.json``: of a run of a sweep, its name and the run's values.
- ``plan.json``: where the planner chose the split, its inputs and result.
- ``events.jsonl metrics.jsonl status.json result.json``: written by rank 0.
- ``trajectories.jsonl decisions.jsonl experience/``: written by the rollout leader.
- ``logs/attempt-N/*.log``: one file per process.
- ``checkpoints/step-000050/ policy/``: folders that are complete once renamed into place.
- ``repartition.json``: an operator's order for another layout, until rank 0 answers it.
- ``stop.json``: a request to save and stop.

Readers skip a torn last line of a ``.jsonl`` file.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from libra_hpc.errors import UserError
from libra_hpc.files import read_object, write_atomic

_STEP = re.compile(r"^step-(\d+)$")
PRIVATE = 0o700
"""Mode of a run directory that only its owner can read: it has prompts, answers of tools and the run file."""
MODES = {"private": PRIVATE, "group": 0o750, "all": 0o755}
"""Mode of a run directory by ``run.share``."""


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of a JSON-lines file; skips torn lines, a missing file is empty."""
    if not path.exists():
        return
    with path.open("rb") as handle:
        for line in handle:
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(record, dict):
                yield record


class RunDir:
    """Paths of one run."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path).absolute()

    @classmethod
    def create(cls, parent: Path, name: str, mode: int = PRIVATE) -> RunDir:
        """Make ``<parent>/<name>-<number>`` with the next free number and with ``mode``, whatever the umask."""
        parent.mkdir(parents=True, exist_ok=True)
        pattern = re.compile(re.escape(name) + r"-(\d+)$")
        taken = [int(m.group(1)) for p in parent.iterdir() if (m := pattern.match(p.name))]
        number = max(taken, default=0) + 1
        while True:
            candidate = parent / f"{name}-{number:03d}"
            try:
                candidate.mkdir(mode=PRIVATE)
            except FileExistsError:
                number += 1
                continue
            candidate.chmod(mode)
            return cls(candidate)

    @classmethod
    def open(cls, path: Path | str) -> RunDir:
        """Open a run directory; raises `UserError` when it is none, or its configuration cannot be read."""
        run = cls(path)
        run.resolved()
        return run

    @property
    def name(self) -> str:
        """The folder's name, by which users name the run."""
        return self.path.name

    @property
    def toml(self) -> Path:
        """The run file as the user wrote it."""
        return self.path / "run.toml"

    @property
    def config(self) -> Path:
        """The resolved configuration (JSON of `RunConfig`)."""
        return self.path / "config.json"

    @property
    def plan(self) -> Path:
        """The planner's choice of the split and its alternatives; only with ``components.split = "auto"``."""
        return self.path / "plan.json"

    @property
    def sweep(self) -> Path:
        """The sweep that the run belongs to (`libra_hpc.facts.sweep_record`)."""
        return self.path / "sweep.json"

    @property
    def script(self) -> Path:
        """The sbatch script as queued."""
        return self.path / "job.sbatch"

    @property
    def job(self) -> Path:
        """Job id, executor, attempt, submit time."""
        return self.path / "job.json"

    @property
    def events(self) -> Path:
        """Event log: lines with ``t`` (epoch seconds), ``kind``, and the kind's own fields."""
        return self.path / "events.jsonl"

    @property
    def metrics(self) -> Path:
        """One line per optimizer step."""
        return self.path / "metrics.jsonl"

    @property
    def trajectories(self) -> Path:
        """One line per finished trajectory."""
        return self.path / "trajectories.jsonl"

    @property
    def decisions(self) -> Path:
        """One line per scheduling decision: the turn, its engine, and the reason."""
        return self.path / "decisions.jsonl"

    @property
    def experience(self) -> Path:
        """Folder of the recovery log (`libra_hpc.rollout.recovery.recovery_log`)."""
        return self.path / "experience"

    @property
    def status(self) -> Path:
        """Latest `Status` snapshot."""
        return self.path / "status.json"

    @property
    def order(self) -> Path:
        """An order for another layout (`libra_hpc.protocol.layout_order`) that rank 0 has not answered yet."""
        return self.path / "repartition.json"

    @property
    def stop(self) -> Path:
        """A request to save and stop, for the attempt that runs."""
        return self.path / "stop.json"

    @property
    def result(self) -> Path:
        """How the last attempt ended."""
        return self.path / "result.json"

    @property
    def policy(self) -> Path:
        """The final policy, a Hugging Face folder."""
        return self.path / "policy"

    @property
    def summary_picture(self) -> Path:
        """Reward, stage times and node roles over time."""
        return self.path / "summary.png"

    @property
    def report(self) -> Path:
        """One page about the run for others."""
        return self.path / "report.html"

    @property
    def rendezvous(self) -> Path:
        """torch FileStore files, one per membership generation."""
        return self.path / "rendezvous"

    @property
    def snapshots(self) -> Path:
        """The data position of the newest complete snapshot; its bytes are in the nodes' shared memory."""
        return self.path / "snapshots"

    def logs(self, attempt: int) -> Path:
        """Log folder of one attempt."""
        return self.path / "logs" / f"attempt-{attempt}"

    def met(self, attempt: int) -> Path:
        """Exists once the agents of an attempt have met in one world."""
        return self.logs(attempt) / "met"

    def again(self, attempt: int) -> Path:
        """Request for a restart of the ranks of an attempt; its content is the reason (`libra_hpc.slurm.outcome`)."""
        return self.logs(attempt) / "again"

    def requeued(self, attempt: int) -> Path:
        """A line for each time that an attempt's job was queued again, with the step that was saved."""
        return self.logs(attempt) / "requeued.jsonl"

    def gone(self, attempt: int) -> Path:
        """Path of the files ``gone-<rank>``, less the rank: that agent ended; the content is its process id."""
        return self.logs(attempt) / "gone-"

    @property
    def checkpoints(self) -> Path:
        """Parent of checkpoint folders."""
        return self.path / "checkpoints"

    def checkpoint(self, step: int) -> Path:
        """Folder of one checkpoint."""
        return self.checkpoints / f"step-{step:06d}"

    def latest_checkpoint(self) -> tuple[int, Path] | None:
        """The complete checkpoint with the highest step; its files are not verified."""
        return max(self.complete_checkpoints(), default=None)

    def complete_checkpoints(self) -> list[tuple[int, Path]]:
        """Step and folder of every complete checkpoint, the lowest step first."""
        if not self.checkpoints.exists():
            return []
        found = [(int(m.group(1)), path) for path in self.checkpoints.iterdir() if (m := _STEP.match(path.name))]
        return sorted((step, path) for step, path in found if (path / "state.json").exists())

    def resolved(self) -> dict[str, Any]:
        """The content of `config`, not validated; raises `UserError` when it cannot be read."""
        try:
            self.config.stat()
        except (FileNotFoundError, NotADirectoryError):
            raise UserError(f"{self.path} is not a run directory: it has no {self.config.name}.") from None
        except OSError:
            # Reading it raises the same error, with a message.
            pass
        return read_object(self.config, "the configuration of the run")

    def write_json(self, path: Path, value: Any) -> None:
        """Atomically write a JSON document of this run."""
        write_atomic(path, json.dumps(value, indent=1, sort_keys=True).encode() + b"\n")

    def read_json(self, path: Path) -> dict[str, Any]:
        """Read a JSON document of this run; empty when it is missing, unreadable or torn."""
        try:
            value = json.loads(path.read_bytes())
        except (OSError, ValueError, RecursionError):
            return {}
        return value if isinstance(value, dict) else {}
