"""What the owner reads and writes in the run directory; it writes while no rank 0 lives.

A file system that takes no writes ends nothing: status and result have reserved blocks, and the rest is only printed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from pathlib import Path
from typing import Any

import msgspec

from libra_hpc.errors import UserError
from libra_hpc.facts.fact_writer import RESULT_BYTES, Reserve, status_reserve
from libra_hpc.facts.journal import LineLog
from libra_hpc.facts.rundir import RunDir, read_lines
from libra_hpc.facts.status import renewed_status
from libra_hpc.files import write_once
from libra_hpc.protocol.ranks_stop import RanksStop, ranks_stop


def log_line(line: str) -> None:
    """Print a line; a full disk or a closed terminal ends nothing."""
    with contextlib.suppress(OSError):
        os.write(1, f"{line}\n".encode())


def newest_step(run: RunDir) -> int:
    """Step of the newest checkpoint, 0 without one; raises `OSError`."""
    try:
        newest = run.latest_checkpoint()
    except UserError as error:
        raise PermissionError(errno.EACCES, "Permission denied", str(run.checkpoints)) from error
    return 0 if newest is None else newest[0]


def saved_step(run: RunDir) -> int:
    """The same, 0 where it cannot be read."""
    with contextlib.suppress(OSError):
        return newest_step(run)
    return 0


def met_before(run: RunDir) -> bool:
    """Whether the ranks of a run have met, in any attempt: an event or a checkpoint proves it."""
    with contextlib.suppress(OSError):
        return any(event.get("kind") == "agent_joined" for event in read_lines(run.events)) or newest_step(run) > 0
    return False


def refuse(run: RunDir, attempt: int, message: str) -> None:
    """Leave a result of a start that has not the run, unless there is one."""
    log_line(message)
    step = saved_step(run)
    content = {"attempt": attempt, "message": message, "state": "failed", "step": step, "t": time.time()}
    with contextlib.suppress(OSError):
        write_once(run.result, msgspec.json.encode(content) + b"\n")


class OwnerRecords:
    def __init__(self, run: RunDir, attempt: int) -> None:
        self._run, self._attempt = run, attempt
        self._result, self._status = Reserve(run.result, RESULT_BYTES), status_reserve(run)
        self._end = Reserve(run.ended(attempt), RESULT_BYTES)
        """Rank 0 writes it, and finds the blocks reserved."""
        with contextlib.suppress(OSError):
            # A requeued job must not find the result of its previous start.
            run.result.unlink(missing_ok=True)

    def clear(self) -> None:
        """Remove what an earlier start left for the owner; raises `OSError`."""
        self._run.ended(self._attempt).unlink(missing_ok=True)

    def has(self, path: Path) -> bool:
        with contextlib.suppress(OSError):
            return path.exists()
        return False

    def end(self) -> RanksStop | None:
        """Why rank 0 ended the ranks; None where it could not write it.  Raises `OSError`."""
        with contextlib.suppress(FileNotFoundError, msgspec.DecodeError):
            return ranks_stop.decode(self._run.ended(self._attempt).read_bytes())
        return None

    def position(self) -> tuple[bool, int]:
        """Whether somebody wants the run to end, and the step of its newest checkpoint; raises `OSError`."""
        return self._run.stop.exists(), newest_step(self._run)

    def idle(self) -> tuple[int, ...]:
        """Steps of the newest checkpoint at the requeues of this attempt."""
        with contextlib.suppress(OSError):
            return tuple(line.get("step", -1) for line in read_lines(self._run.requeued(self._attempt)))
        return ()

    def event(self, kind: str, **fields: Any) -> None:
        self._append(self._run.events, {"t": time.time(), "kind": kind, **fields})

    def requeue(self, reason: str, step: int) -> None:
        """The job is about to be queued again."""
        self._append(self._run.requeued(self._attempt), {"step": step})
        self.event("job_requeued", reason=reason, step=step)

    def _append(self, path: Path, record: dict[str, Any]) -> None:
        try:
            lines = LineLog(path)
            lines.write(record)
            lines.close()
        except OSError as error:
            log_line(f"{path.name} cannot be written: {error}")

    def saved_rows(self, step: int) -> None:
        """Append the metrics of steps that were saved while no rank 0 lived; the checkpoint of ``step`` has them."""
        with contextlib.suppress(OSError):
            last = max((int(line.get("step", 0)) for line in read_lines(self._run.metrics)), default=0)
            for row in self._run.read_json(self._run.checkpoint(step) / "state.json").get("reports", []):
                if row["step"] > last:
                    known = {name: value for name, value in row["metrics"].items() if value is not None}
                    self._append(self._run.metrics, {"t": row["t"], "step": row["step"], **known})

    def step(self) -> int:
        """The last one that rank 0 wrote of."""
        return int(self._run.read_json(self._run.status).get("step", 0))

    def status(self, state: str = "", message: str = "") -> None:
        """Write a status that is true now, and names a fault of the disk; without a state that of rank 0 stands."""
        for _ in range(2):
            fault = self._status.fault
            changes = {"state": state, "message": "; ".join(filter(None, (message, fault)))} if state else {}
            if content := renewed_status(self._run, self._attempt, **changes):
                self._write(self._status, content)
            if self._status.fault == fault:
                break

    def result(self, state: str, message: str, step: int) -> None:
        now = time.time()
        content = {"attempt": self._attempt, "message": message, "state": state, "step": step, "t": now}
        self._write(self._result, msgspec.json.encode(content) + b"\n")
        found = self._run.read_json(self._run.status)
        if found.get("attempt") == self._attempt:
            self._write(self._status, msgspec.json.encode({**found, "state": state, "message": message}) + b"\n")
        self.event("job_finished", state=state, message=message, step=step)

    def _write(self, reserve: Reserve, content: bytes) -> None:
        try:
            reserve.write(content)
        except OSError as error:
            log_line(f"{'the result' if reserve is self._result else 'the status'} cannot be written: {error}")

    def close(self) -> None:
        for reserve in (self._result, self._status, self._end):
            reserve.close()
