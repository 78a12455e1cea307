"""File names of a run directory, and reading and writing of its JSON files.

- From the user and the launcher: the run file, its resolved form, what was queued.
- From rank 0: events, Layouts, metrics, status, result.  From the rollout leader: trajectories, decisions, and
  the folders of transcripts and experience.
- ``logs/attempt-N/*.log``: one file per process.  Folders are complete once renamed into place.

Readers skip a torn last line of a ``.jsonl`` file.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from libra_hpc.config.run_file_text import without_secrets
from libra_hpc.errors import UserError
from libra_hpc.files import OTHERS_WRITE, OWNER_ONLY, read_object, write_atomic

_STEP = re.compile(r"^step-(\d+)$")
PRIVATE = 0o700
"""Mode of a run directory that only its owner can read: it has prompts, answers of tools and the run file."""
MODES = {"private": PRIVATE, "group": 0o750, "all": 0o755}
"""Mode of a run directory by ``run.share``."""


@contextmanager
def readable(share: str) -> Iterator[None]:
    """What is made within can be read by whom ``run.share`` names, and written by its owner alone."""
    before = os.umask(OTHERS_WRITE)
    os.umask(before | OTHERS_WRITE if MODES[share] == PRIVATE else 0o777 & ~MODES[share])
    try:
        yield
    finally:
        os.umask(before)


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of a JSON-lines file; skips torn lines, a missing file is empty."""
    if not path.exists():
        return
    with path.open("rb") as handle:
        yield from filter(None, map(parse, handle))


def parse(text: bytes) -> dict[str, Any]:
    """A JSON object; empty for anything else, such as a torn line."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _json(value: Any) -> bytes:
    return json.dumps(value, indent=1, sort_keys=True).encode() + b"\n"


class _Part:
    """A file or folder of a run directory."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, run: RunDir, owner: type[RunDir]) -> Path:
        return run.path / self._name


class RunDir:
    """Paths of one run."""

    toml = _Part("run.toml")
    """The run file as the user wrote it."""
    config = _Part("config.json")
    """The resolved configuration (JSON of `RunConfig`); its owner alone may read it."""
    shared_config = _Part("config-shared.json")
    """`config` for other readers, without what may be a secret; only with ``run.share``."""
    plan = _Part("plan.json")
    """The planner's choice of the split and its alternatives; only with ``components.split = "auto"``."""
    sweep = _Part("sweep.json")
    """The sweep that the run belongs to (`libra_hpc.facts.sweep_record`)."""
    script = _Part("job.sbatch")
    """The sbatch script as queued."""
    spot_script = _Part("spot.sbatch")
    """The script of the jobs that the run queues for itself; with ``borrow.spot.nodes`` or ``planner.fewer_nodes``."""
    job = _Part("job.json")
    """Job id, executor, attempt, submit time."""
    events = _Part("events.jsonl")
    """Event log: lines with ``t`` (epoch seconds), ``kind``, and the kind's own fields."""
    layouts = _Part("layouts.jsonl")
    """What changed in the Layout, by number (`libra_hpc.facts.layout_log`)."""
    metrics = _Part("metrics.jsonl")
    """One line per optimizer step."""
    trajectories = _Part("trajectories.jsonl")
    """One line per finished trajectory."""
    decisions = _Part("decisions.jsonl")
    """One line per scheduling decision: the turn, its engine, and the reason."""
    transcripts = _Part("transcripts")
    """Folder of the trajectories that each step was trained on (`libra_hpc.rollout.records.transcripts`)."""
    evaluations = _Part("evaluations.jsonl")
    """One line per evaluation (`libra_hpc.rollout.evaluation.result_line`)."""
    policies = _Part("policies.json")
    """Folders of the policies that an evaluation of its own has, by step."""
    experience = _Part("experience")
    """Folder of the recovery log (`libra_hpc.rollout.recovery.recovery_log`)."""
    status = _Part("status.json")
    """Latest `Status` snapshot."""
    stop = _Part("stop.json")
    """A request to save and stop, for the attempt that runs."""
    result = _Part("result.json")
    """How the last attempt ended."""
    policy = _Part("policy")
    """The final policy, a Hugging Face folder."""
    summary_picture = _Part("summary.svg")
    """Reward, stage times and node roles over time."""
    report = _Part("report.html")
    """One page about the run for others."""
    rendezvous = _Part("rendezvous")
    """torch FileStore files, one per membership generation."""
    snapshots = _Part("snapshots")
    """Folder with the entry of the newest complete snapshot; its bytes are in the nodes' shared memory."""
    door = _Part("door.json")
    """How an agent joins the running job (`libra_hpc.protocol.joining.DoorRecord`); only its owner may read it."""
    offers = _Part("offers")
    """Folder with a file of each lender that would lend to the run, or does (`libra_hpc.protocol.joining.Offer`)."""
    leases = _Part("lease")
    """Who owns the run (`libra_hpc.process.lease`)."""
    checkpoints = _Part("checkpoints")
    """Parent of checkpoint folders."""

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

    @property
    def name(self) -> str:
        """The folder's name, by which users name the run."""
        return self.path.name

    def logs(self, attempt: int) -> Path:
        """Log folder of one attempt."""
        return self.path / "logs" / f"attempt-{attempt}"

    def user_files(self, attempt: int) -> Path:
        """Copies of the user's Python files of an attempt, by the key that names them."""
        return self.path / "files" / f"attempt-{attempt}"

    def from_step(self, attempt: int) -> Path:
        """Exists once an attempt has begun at the step that its user chose."""
        return self.logs(attempt) / "from-step"

    def ended(self, attempt: int) -> Path:
        """Why rank 0 ended the ranks of the last start (`libra_hpc.protocol.ranks_stop`)."""
        return self.logs(attempt) / "ended.json"

    def requeued(self, attempt: int) -> Path:
        """A line for each time that an attempt's job was queued again, with the step that was saved."""
        return self.logs(attempt) / "requeued.jsonl"

    def checkpoint(self, step: int) -> Path:
        """Folder of one checkpoint."""
        return self.checkpoints / f"step-{step:06d}"

    def latest_checkpoint(self) -> tuple[int, Path] | None:
        """The complete checkpoint with the highest step; its files are not verified."""
        return max(self.complete_checkpoints(), default=None)

    def complete_checkpoints(self) -> list[tuple[int, Path]]:
        """Step and folder of every complete checkpoint, the lowest first; `UserError`: nobody may list them."""
        try:
            names = list(self.checkpoints.iterdir())
        except (FileNotFoundError, NotADirectoryError):
            return []
        except PermissionError as error:
            raise UserError(f"{self.checkpoints} cannot be read ({error.strerror}).") from error
        found = [(int(m.group(1)), path) for path in names if (m := _STEP.match(path.name))]
        return sorted((step, path) for step, path in found if (path / "state.json").exists())

    @property
    def readable_config(self) -> Path:
        """`config`, or what others may read of it."""
        return self.config if os.access(self.config, os.R_OK) else self.shared_config

    def write_config(self, values: dict[str, Any]) -> None:
        """Write `config`, and what others may read of it."""
        write_atomic(self.config, _json(values), OWNER_ONLY)
        if MODES[values["run"]["share"]] == PRIVATE:
            self.shared_config.unlink(missing_ok=True)
        else:
            shown = {name: without_secrets(name, section) for name, section in values.items()}
            self.write_json(self.shared_config, shown)

    def resolved(self) -> dict[str, Any]:
        """The content of `config`, not validated; raises `UserError` when it cannot be read."""
        try:
            self.config.stat()
        except (FileNotFoundError, NotADirectoryError):
            raise UserError(f"{self.path} is not a run directory: it has no {self.config.name}.") from None
        except OSError:
            # Reading it raises the same error, with a message.
            pass
        return read_object(self.readable_config, "the configuration of the run")

    def write_json(self, path: Path, value: Any) -> None:
        """Atomically write a JSON document of this run."""
        write_atomic(path, _json(value))

    def read_json(self, path: Path) -> dict[str, Any]:
        """Read a JSON document of this run; empty when it is missing, unreadable or torn."""
        try:
            return parse(path.read_bytes())
        except OSError:
            return {}


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


def keep_user_files(run: RunDir, config: Mapping[str, Any], attempt: int) -> list[str]:
    """Copy the files of an attempt; returns a sentence for each that differs from the attempt before."""
    changed: list[str] = []
    for key, file in sorted(set(named_files(config))):
        copy, before = (run.user_files(number) / key / file.name for number in (attempt, attempt - 1))
        content = file.read_bytes()
        if before.is_file() and before.read_bytes() != content:
            changed.append(f"{key}: {file} is not what attempt {attempt - 1} ran, which is kept in {before}")
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(content)
    return changed
