"""The lender: a process beside a server that gives its GPU to a run, one at a time, and takes it back.

- The server is up, the hours are right, nothing is revoked -> runs get an offer, and the first that takes it a guest.
- The run does not take it any more -> the guest leaves.
- Outside the hours, or revoked -> the page is closed at once, and the guest sleeps: its turns go on elsewhere.
- The device is given again -> the run whose turn it is wakes its guest, or gets another one once that has left.
- The guest ends, or is silent -> it is killed where it must be, and the next run is served.
- The server ends, or SIGTERM -> the guest leaves, the record is removed, and the lender ends.
- This process is killed -> the kernel sends the guest SIGTERM. The server is never waited for or signalled.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import sys
import time
from collections import defaultdict
from pathlib import Path

import msgspec

from libra_hpc.errors import UserError
from libra_hpc.facts.rundir import RunDir
from libra_hpc.files import OWNER_ONLY, write_atomic
from libra_hpc.gate.page import Page
from libra_hpc.process import agent_folders
from libra_hpc.process.retry import Retry

from . import lender_record as records
from .guest_process import GuestProcess, takes, wanting
from .lender_record import Hours, LenderRecord, LendTerms

POLL_S = 0.25
"""Between two rounds.  Double: users share their GPU for so much longer when their owner revokes it."""
SERVER_SILENT_S = 10.0
"""Without a sign of its loop, until a server counts as not up: no guest starts beside it."""
ANSWER_S = 3.0
"""Seconds until all runs have answered a new offer: each reads offers and writes its answers every second."""
AGAIN_S, AGAIN_MOST_S = 30.0, 900.0
"""Until a run whose guest failed has another; twice as long after each that failed and gave nothing.  Its ranks may
restart, or users leave no room for a start."""

log = logging.getLogger("libra_hpc.annexes.lend")


class LendSettings(msgspec.Struct, frozen=True):
    """What `libra-hpc lend serve` hands to the lender that it starts."""

    name: str
    terms: LendTerms
    runs: str
    """Folder of the runs that may borrow."""
    page: str
    server: int
    """Process id, this process's parent."""


_settings = msgspec.json.Decoder(LendSettings)


class Lender:
    def __init__(self, settings: LendSettings) -> None:
        self._settings, self._place = settings, records.folder()
        self._page, self._hours = Page(settings.page), Hours.parse(settings.terms.hours)
        self._private = Path(settings.page).parent
        self._guest: GuestProcess | None = None
        self._before = self._revoked = 0
        """Tokens of guests that have ended; see `LenderRecord.revoked`."""
        self._lent_s, self._reported_at = 0.0, time.monotonic()
        self._tried: dict[Path, float] = {}
        """When a run had a guest last, or could not be joined, in monotonic seconds."""
        self._offered, self._offered_at, self._offered_since = set[Path](), float("-inf"), float("-inf")
        """Files of the present offers."""
        self._retries: dict[Path, Retry] = defaultdict(lambda: Retry(AGAIN_S, AGAIN_MOST_S))
        boot, pid, ticks = records.own_identity()
        job = os.environ.get("SLURM_JOB_ID", "")
        self._record = LenderRecord(settings.name, socket.gethostname(), boot, pid, ticks, job, settings.terms)
        self._written_at = float("-inf")
        self._stopped = ""

    def run(self) -> None:
        """Lend until the server ends."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP):
            signal.signal(number, self._on_signal)
        agent_folders.own(self._private)
        try:
            while not self._stopped:
                self._round()
                time.sleep(POLL_S)
                if os.getppid() != self._settings.server:
                    self._stopped = "its server has ended"
            log.info("%s: %s", self._settings.name, self._stopped)
            self._page.set_closed(True)
            while self._guest is not None:
                self._guest.leave()
                self._collect()
                time.sleep(POLL_S)
        finally:
            self._offer([])
            records.remove_record(self._place, self._settings.name)
            agent_folders.remove(self._private)

    def _round(self) -> None:
        self._collect()
        closed, guest = self._closed(), self._guest
        if closed and guest is not None and not guest.sleeps:
            guest.closed_at = self._tried[guest.run.path] = time.monotonic()
            self._revoked += 1
        self._page.set_closed(bool(closed) or (guest is not None and guest.sleeps))
        silent = time.monotonic() - self._page.read().written > SERVER_SILENT_S
        if guest is not None and not guest.sleeps:
            runs = [] if guest.leaving else [guest.run]
            if runs and takes(guest.run, self._settings.name) is False:
                guest.leave()
        else:
            runs = [] if closed or silent else self._open_runs()
            self._lend([run for run in runs if takes(run, self._settings.name)])
        self._offer(runs)
        self._report(closed, silent)

    def _open_runs(self) -> list[RunDir]:
        now = time.monotonic()
        found = wanting(Path(self._settings.runs), self._settings.name)
        return [run for run in found if self._retries[run.path].due(now)]

    def _offer(self, runs: list[RunDir]) -> None:
        """Renew the offers to these runs, and withdraw all others."""
        name, terms = self._settings.name, self._settings.terms
        files = {run.offers / f"{name}.json" for run in runs}
        if files == self._offered and time.monotonic() - self._offered_at < records.RENEW_S:
            return
        for file in self._offered - files:
            with contextlib.suppress(OSError):
                file.unlink(missing_ok=True)
        for file in files:
            # A run that has no room for it is one that does not borrow.
            with contextlib.suppress(OSError):
                file.parent.mkdir(mode=0o700, exist_ok=True)
                write_atomic(file, msgspec.json.encode((terms.tp, terms.engines)), OWNER_ONLY)
        self._offered_since = self._offered_since if files == self._offered else time.monotonic()
        self._offered, self._offered_at = files, time.monotonic()

    def _closed(self) -> str:
        """Why the owner gives nothing now; empty: it does."""
        if records.revoked_file(self._place, self._settings.name).exists():
            return "revoked"
        now = time.localtime()
        return "" if self._hours.has(now.tm_hour * 60 + now.tm_min) else f"outside {self._hours}"

    def _lend(self, runs: list[RunDir]) -> None:
        # One run alone competes with nobody.
        if not runs or (len(self._offered) > 1 and time.monotonic() - self._offered_since < ANSWER_S):
            return
        run = min(runs, key=lambda run: (self._tried.get(run.path, float("-inf")), run.name))
        try:
            if self._guest is not None and self._guest.run.path == run.path:
                self._guest.closed_at = float("inf")
            elif self._guest is not None:
                self._guest.leave()
            else:
                self._guest = GuestProcess(run, self._settings.name, self._settings.terms, self._settings.page)
        except OSError as error:
            log.warning("no guest can be started for %s: %s", run.name, error)
            self._retries[run.path].failed(time.monotonic())

    def _collect(self) -> None:
        """See to the guest's end."""
        guest = self._guest
        if guest is None or not guest.ended():
            return
        self._before, self._guest, now = self._before + guest.tokens, None, time.monotonic()
        self._tried[guest.run.path] = now
        if guest.tokens or not guest.code:
            self._retries[guest.run.path].succeeded()
        if guest.code:
            self._retries[guest.run.path].failed(now)
        log.info("the guest of %s has ended with code %s", guest.run.name, guest.code)

    def _report(self, closed: str, silent: bool) -> None:
        """Renew the record."""
        guest = self._guest
        has = guest is not None and not guest.asleep
        if guest is not None and has:
            state, why = ("leaving", closed) if guest.leaving or guest.sleeps else ("lends", "")
        elif closed:
            state, why = "paused", closed
        elif silent:
            state, why = "starting", "its server does not report"
        else:
            state, why = "free", "no run takes it"
        now, borrower = time.monotonic(), str(guest.run.path) if guest and has else ""
        self._lent_s += (now - self._reported_at) * (state == "lends")
        self._reported_at = now
        new = msgspec.structs.replace(self._record, state=state, why=why, borrower=borrower)
        if new != self._record:
            new, self._written_at = msgspec.structs.replace(new, since=time.time()), float("-inf")
        if now - self._written_at < records.RENEW_S:
            return
        view = self._page.read()
        self._written_at, self._record = (
            now,
            msgspec.structs.replace(
                new,
                tokens=self._before + (guest.tokens if guest else 0),
                lent_s=round(self._lent_s, 1),
                revoked=self._revoked,
                offers=tuple(sorted(str(file.parent.parent) for file in self._offered)),
                alone_ms=round(1000 * view.alone_s, 1),
                beside_ms=round(1000 * view.beside_s, 1),
            ),
        )
        try:
            records.write_record(self._place, self._record)
        except OSError as error:
            # Its users are served, and the run has its guest: nobody else can find the lender.
            log.warning("the record cannot be written: %s", error)

    def _on_signal(self, number: int, frame: object) -> None:
        self._stopped = f"it got {signal.Signals(number).name}"


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    try:
        Lender(_settings.decode(sys.argv[1])).run()
    except UserError as error:
        log.error("%s", error)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
