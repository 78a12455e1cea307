"""The guest of a lender: `libra-hpc join` as a child process, for one run, with its engines behind the gate.

- The page closes -> it frees the memory of its device until the page opens; it does not within `FREE_S` -> SIGKILL.
- `leave` -> SIGTERM, so that its turns go on elsewhere; it lives on after `LEAVE_S` -> SIGKILL.
- Its report is not renewed for `SILENT_S` -> SIGKILL.
- The lender is killed -> the kernel sends it SIGTERM.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import subprocess
import sys
import time
from fnmatch import fnmatchcase
from pathlib import Path

import msgspec

from libra_hpc.facts.rundir import RunDir, parse
from libra_hpc.files import NEW, OWNER_ONLY, read_own
from libra_hpc.gate.gated_steps import Behind, GateConfig, read_report
from libra_hpc.process.reaper import die_with
from libra_hpc.protocol.joining import door_record

from .lender_record import LendTerms, folder, log_file

LEAVE_S = FREE_S = 13.0
"""From SIGTERM, or the owner's order, to SIGKILL: 10 s for its turns, and seconds for its engines."""
SILENT_S = 10.0
"""Without a heartbeat; its engines end some seconds later.  Half: a busy machine ends guests that live; double: the
next run waits as long."""
START_S = 180.0
"""Until the first heartbeat: the interpreter starts, and the run admits it."""


def wanting(runs: Path, lender: str) -> list[RunDir]:
    """Runs below a folder that take guests now and may want this lender (``borrow.lenders``), by name."""
    with contextlib.suppress(OSError):
        return [run for name in sorted(os.listdir(runs)) if _open(run := RunDir(runs / name), lender)]
    return []


def _open(run: RunDir, lender: str) -> bool:
    """False also where the run may be another user's, or a file of it is torn."""
    with contextlib.suppress(OSError, msgspec.DecodeError, UnicodeDecodeError):
        names = parse(read_own(run.config)).get("borrow", {}).get("lenders")
        wants = names == "any" or (isinstance(names, list) and any(fnmatchcase(lender, name) for name in names))
        return wants and not run.path.is_symlink() and door_record.decode(read_own(run.door)).open
    return False


def takes(run: RunDir, lender: str) -> bool | None:
    """Whether the run borrows from this lender now (`Status.takes`); None: its status cannot be read now."""
    with contextlib.suppress(OSError):
        return lender in parse(read_own(run.status)).get("takes", [])
    return None


class GuestProcess:
    """Raises `OSError` where it cannot be started."""

    def __init__(self, run: RunDir, lender: str, terms: LendTerms, page: str) -> None:
        self.run, self.tokens, self._beats = run, 0, 0
        self._report = Path(page).with_name("report.json")
        self._report.unlink(missing_ok=True)
        gate = GateConfig(page=page, ttft_s=terms.ttft_s)
        behind = Path(page).with_name("behind.json")
        behind.write_bytes(msgspec.json.encode(Behind(gate, str(self._report), lender)))
        argv = [sys.executable, "-m", "libra_hpc_cli.app", "join", str(run.path.absolute()), "--behind", str(behind)]
        argv += [f"--memory={terms.memory_mib}", f"--tp={terms.tp}", f"--engines={terms.engines}"]
        argv += [f"--weights-mb-s={terms.weights_mb_s}"]
        with open(os.open(log_file(folder(), lender), NEW, OWNER_ONLY), "wb") as log:
            self._process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=functools.partial(die_with, os.getpid(), signal.SIGTERM),
            )
        self._seen_at = time.monotonic()
        self._left_at = self.closed_at = float("inf")
        """When it was to leave, and since when the page is closed for it."""
        self._asleep = False

    @property
    def leaving(self) -> bool:
        return self._left_at < float("inf")

    @property
    def asleep(self) -> bool:
        """Whether it holds nothing of the device."""
        return self.sleeps and self._asleep

    @property
    def sleeps(self) -> bool:
        """Whether its owner has taken the device back."""
        return self.closed_at < float("inf")

    @property
    def code(self) -> int | None:
        return self._process.returncode

    def leave(self) -> None:
        """Once: a second signal would end it with its turns in flight."""
        if not self.leaving:
            self._left_at = time.monotonic()
            self._process.terminate()

    def ended(self) -> bool:
        """Whether it has; reads its report, and kills what is silent or does not leave."""
        now, report = time.monotonic(), read_report(self._report)
        if report is not None and report.beats != self._beats:
            self._seen_at, self._beats, self.tokens = now, report.beats, report.tokens
            self._asleep = report.asleep
        silent = now - self._seen_at > (SILENT_S if self._beats else START_S)
        if silent or now - self._left_at > LEAVE_S or (now - self.closed_at > FREE_S and not self._asleep):
            self._process.kill()
        return self._process.poll() is not None
