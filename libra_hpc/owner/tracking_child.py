"""The process that sends a run's metrics to its trackers: started again when it dies, ended with the run."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

from libra_hpc.facts.rundir import RunDir

RETRY_S = 30.0
"""Between two starts: a tracker that kills the process kills the next one too."""
ENDS_S = 20.0
"""To send the last steps; what is not sent then, ``python -m libra_hpc.tracking`` sends later."""
MISTAKE = 2
"""Exit code where no other start can help: a library is missing."""


class TrackingChild:
    def __init__(self, run: RunDir, attempt: int) -> None:
        track: dict[str, Any] = run.read_json(run.config).get("track", {})
        self._wanted = bool(track.get("tensorboard") or track.get("wandb", {}).get("project"))
        self._run, self._log = run, run.logs(attempt) / "track.log"
        self._process: subprocess.Popen[bytes] | None = None
        self._next_at = 0.0

    def keep(self, now: float) -> None:
        """Start it where it is wanted and does not live; ``now`` in monotonic seconds."""
        if self._process is not None and (code := self._process.poll()) is not None:
            self._process = None
            self._wanted = self._wanted and code != MISTAKE
        if not self._wanted or self._process is not None or now < self._next_at:
            return
        self._next_at = now + RETRY_S
        self._start()

    def _start(self, *options: str) -> None:
        command = [sys.executable, "-m", "libra_hpc.tracking", str(self._run.path), *options]
        try:
            with self._log.open("ab") as log:
                self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        except OSError:
            return  # a full disk; the next try is later

    def close(self) -> None:
        """Have it send what is left, and end; another does so for one that is dead, or too young to obey."""
        if self._process is not None:
            self._process.terminate()
            self._wanted = self._wanted and self._ended() < 0
        if self._wanted:
            self._start("--once")
            self._ended()

    def _ended(self) -> int:
        """Wait for the end; returns the exit code, 0 without a process."""
        if self._process is None:
            return 0
        try:
            return self._process.wait(ENDS_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            return 0
