"""Alerts: the command of ``[notify]``, started when a fact is written that its user wants to hear of.

- The arguments of ``notify.command``, never a shell, and one more: the alert in one line.
- stdin -> the event as JSON, with ``alert``, ``text``, ``run`` and ``path``.
- It takes longer than `LIMIT_S` -> it is killed with its process group.
- It fails -> a sentence in `failures`; the run goes on.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import msgspec

from libra_hpc.errors import error_text

LIMIT_S = 10.0
"""A message to a server takes a second.  Double: the end of a run, which waits for its alert, takes as long."""
OUTPUT_BYTES = 200
"""Last bytes of a failed command's output that are shown."""


class Alerts:
    """Every method but `close` returns at once."""

    def __init__(self, notify: Mapping[str, Any], run: Path) -> None:
        """``notify``: that section of the run file; ``run``: the run's folder."""
        self._command, self._on, self._run = notify.get("command", []), notify.get("on", []), run
        self._threads: list[threading.Thread] = []
        self.failures: list[str] = []
        """Why alerts did not reach anybody; whoever logs them takes them out."""

    def add(self, alert: str, event: Mapping[str, Any]) -> None:
        """Start the command, if ``notify.on`` has this alert; ``event``: the line of ``events.jsonl``."""
        if not self._command or alert not in self._on:
            return
        at = f" at step {event['step']}" if "step" in event else ""
        text = f"libra-hpc: run {self._run.name}: {alert}{at}: {event.get('reason') or event.get('message', '')}"
        facts = {"alert": alert, "text": text, "run": self._run.name, "path": str(self._run), **event}
        thread = threading.Thread(target=self._send, args=(text, msgspec.json.encode(facts)), daemon=True)
        self._threads.append(thread)
        thread.start()

    def close(self) -> None:
        """Wait for the commands that run."""
        for thread in self._threads:
            thread.join(2.0 * LIMIT_S)

    def _send(self, text: str, facts: bytes) -> None:
        try:
            # A file, not a pipe: what the command leaves running may hold its output open.
            with tempfile.TemporaryFile() as output:
                why = self._call(text, facts, output)
        except OSError as error:
            why = error_text(error)
        if why:
            self.failures.append(f"{self._command[0]}: {why}")

    def _call(self, text: str, facts: bytes, output: IO[bytes]) -> str:
        """Run the command; returns why it failed, or an empty text."""
        with subprocess.Popen(
            [*self._command, text], stdin=subprocess.PIPE, stdout=output, stderr=subprocess.STDOUT, process_group=0
        ) as process:
            try:
                process.communicate(facts, LIMIT_S)
            except subprocess.TimeoutExpired:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                return f"no end within {LIMIT_S:.0f} s"
        if process.returncode == 0:
            return ""
        output.seek(0)
        line = output.read(OUTPUT_BYTES).decode(errors="replace").split("\n")[0]
        return f"exit code {process.returncode}" + (f": {line}" if line else "")
