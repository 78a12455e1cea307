"""The owner of a run: it starts all ranks, sees their ends, and does what `libra_hpc.owner.decision` decides.

``python -m libra_hpc.owner.owner --run RUN --attempt N --size RANKS [--slurm --nodes N ..] -- PROGRAM ...``

- It has the lease of the run (`claim`); another takes it -> the ranks are killed and nothing more is written.
- Something cannot be done now (`CANNOT_NOW`), or ranks that met before do not -> tried again with growing pauses, named
  in the status, for ``deadlines.cannot_now_s``.
- Rank 0 lives -> rank 0 writes status and events.  None lives -> the owner does, into blocks that it reserved.
- A rank ends before all have met -> the others are killed after `EARLY_S`, and the start is repeated with its cause.
- A rank outlives rank 0 by `STRAGGLERS_S`, or by `LAST_S` all others of a start that rank 0 has ended -> SIGKILL.
  It outlives them by ``planner.fewer_after_s`` nevertheless -> its node is left out of all next starts.
- Slurm takes the job apart -> SIGKILL at once: there is time to queue it again, and for no save.
- This process is killed -> the ranks save and end (`Fence.orphaned`).
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from operator import sub
from pathlib import Path

import msgspec

from libra_hpc.config.load import load_resolved
from libra_hpc.config.run import RunConfig
from libra_hpc.errors import UserError
from libra_hpc.facts.rundir import RunDir
from libra_hpc.process.agent_folders import remove_kept
from libra_hpc.process.child import raise_limits
from libra_hpc.process.entry import STRAY, dump_on_request, stray_words
from libra_hpc.process.lease import newest_lease
from libra_hpc.process.retry import CANNOT_NOW, Patience, cannot, patiently, reason_of
from libra_hpc.protocol.ranks_stop import (
    OUTPUT,
    OUTPUT_FD,
    START,
    STATES,
    FewerNodes,
    RanksStart,
    RanksStop,
    fewer_layout,
)
from libra_hpc.slurm.queue.cause import OUTPUTS, OWNER_ENDS, tail, telling_line
from libra_hpc.slurm.queue.command import TRANSIENT_FAILURES
from libra_hpc.slurm.writer import on_nodes

from . import slurm_step
from .claim import HeldLease, LeaseRefused, acquire
from .decision import PLANNER_LOST, OwnerDecision, RanksEnded, SoFar, decide, gives_up
from .owner_records import OwnerRecords, log_line, met_before, refuse, saved_step
from .ranks import LocalRanks
from .slurm_step import SlurmStep
from .spot_jobs import SpotJobs
from .tracking_child import TrackingChild

STRAGGLERS_S = 90.0
"""Training may save for 60 s once rank 0 is gone, and an agent needs up to 15 s to end its engines."""
LAST_S = 10.0
"""For what is left of a start that rank 0 ended: it has saved, so only a stopped process takes longer than the others.
Half: slow engines are killed before they have ended; double: one stopped node costs a restart as much again."""
EARLY_S = 3.0
"""For the others to end by themselves with the first that did not meet them, or left why: all refuse a start alike."""
MISTAKES = (FileNotFoundError, PermissionError, NotADirectoryError)
"""Mistakes of a configuration at the first start of a run; later what was there is away."""
PAUSE_S = 0.2
"""Between two looks for a signal in a pause."""
STATUS_S = 5.0
"""Between two status snapshots while no rank 0 lives."""
LEASE_S = 30.0
"""For whoever submitted the job to release the lease."""
Ranks = LocalRanks | SlurmStep
ENDED = {"time_limit": "was stopped by the time limit", "cancelled": "was cancelled", "paused": "was paused"}


class EndPatience:
    """How long ranks may outlive others of their start; times are monotonic seconds."""

    def __init__(self) -> None:
        self._over_at = self._early_at = math.inf
        self.first = 0
        """The rank that ended before all had met; else rank 0."""

    def ends(self, ranks: Ranks, recorded: bool, now: float) -> bool:
        """Whether the ranks that live are to be killed; ``recorded``: rank 0 has left why it ends."""
        ended = ranks.links.ended
        last = recorded and 0 in ended and now - max(ranks.links.gone.values(), default=now) > LAST_S
        if recorded or 0 in ended or len(ended) >= ranks.size - 1 > 0:
            self._over_at = min(now, self._over_at)
        if ranks.links.met:
            self._early_at, self.first = math.inf, 0
        elif (ended or recorded) and self._early_at == math.inf:
            self._early_at, self.first = now, min(ended, default=0)
        return last or now - self._over_at > STRAGGLERS_S or now - self._early_at > EARLY_S


class RunOwner:
    def __init__(
        self, run: RunDir, config: RunConfig, options: argparse.Namespace, lease: HeldLease, signals: Sequence[str]
    ) -> None:
        self._run, self._attempt, self._options, self._signals = run, options.attempt, options, signals
        # Without Slurm there is no queue.
        self._config = config if options.slurm else config.changed(slurm={"requeues": 0, "preempted": "stop"})
        self._lease = lease
        self._longest_s = config.deadlines.cannot_now_s
        self._silence_s = config.planner.fewer_after_s if config.planner.fewer_nodes == "auto" else math.inf
        self._down: dict[str, str] = {}
        self._silent = set[str]()
        """Nodes of the job that get no rank: those of their last one did not end."""
        self._records = OwnerRecords(run, options.attempt)
        self._tracking = TrackingChild(run, options.attempt)
        self._spot = SpotJobs(run, config)
        requeued = int(os.environ.get("SLURM_RESTART_COUNT") or 0) if options.slurm else 0
        self._so_far = SoFar(requeued=requeued, idle=self._records.idle(), met=met_before(run))
        self._patience: Patience | None = None
        """Patience with the starts in a row that failed; None: the last ranks met."""
        self._pause_s: float | None = 0.0
        """Until the next of them; None: the patience is used up."""
        self._saved = saved_step(run)
        """Step of the newest checkpoint, as last read."""
        self._reason = self._message = self._since = ""
        """Why the next start is a restart, what the status shows until then, and since when this process waits."""
        self._status_at = float("-inf")
        self._fewer = FewerNodes()
        """The layout of the next start, where nodes are missing."""
        self._alone = False
        """Whether no rank 0 lives, or has left a record: the status is then this process's."""
        slurm_step.on_wait[:] = [self._slurm_waits]
        if options.slurm:
            os.environ.update({**slurm_step.job_facts(os.environ), OUTPUT: str(OUTPUT_FD)})

    def serve(self) -> int:
        """Start the ranks as often as is decided; returns the exit code, 0 where the run completed."""
        while True:
            ended = self._start()
            if taken := self._lease.check():
                log_line(f"{OWNER_ENDS}{taken}")
                return 1
            if ended.met:
                self._so_far = self._so_far._replace(met=True, first="")
            decision = decide(ended, self._so_far, self._config)
            if decision.word not in ("restart", "repeat"):
                return self._finish(decision, ended)
            log_line(f"{decision.word}: {decision.reason}")
            self._again(decision)

    def fail(self, message: str) -> int:
        """End the run without its ranks: they cannot start, or end with this process."""
        return self._finish(OwnerDecision("fail", message), RanksEnded(met=False, step=self._saved))

    def _again(self, decision: OwnerDecision) -> None:
        """Prepare the next start."""
        counted = decision.so_far.restarts > self._so_far.restarts
        self._so_far, self._message = decision.so_far, f"{decision.reason}; all ranks restart"
        if decision.word == "repeat":
            self._waits(decision.reason)
            with contextlib.suppress(InterruptedError):
                self._pause(self._pause_s or 0.0)
            return
        if counted:
            step = self._records.step()
            self._records.event("restart", reason=decision.reason, restarts=self._so_far.restarts, step=step)
        # A repeated start is still what the one before was for.
        self._reason = decision.reason if counted else ""
        self._records.status("restarting", self._message)

    def _note(self, sentence: str) -> None:
        log_line(sentence)
        self._waits(sentence)

    def _waits(self, sentence: str) -> None:
        """Something cannot be done now."""
        if not self._since:
            self._since = time.strftime("%H:%M:%S")
            self._records.event("cannot_now", reason=sentence)
        self._message = f"waiting since {self._since}, for {self._longest_s:.0f} s at most: {sentence}"
        self._status()

    def _status(self) -> None:
        """Renew a status that no rank 0 writes."""
        self._status_at = time.monotonic()
        self._records.status("restarting", self._message)

    def _slurm_waits(self, sentence: str) -> None:
        log_line(sentence)
        if self._alone and not self._lease.taken:
            self._records.status("restarting", f"{self._message or PLANNER_LOST}; {sentence}")

    def _pause(self, seconds: float) -> None:
        """Raises `InterruptedError` where a signal ends it, or the lease is lost."""

        def keep_status() -> None:
            if time.monotonic() - self._status_at > STATUS_S:
                self._status()

        pause(seconds, lambda: (len(self._signals), self._lease.taken), keep_status)

    def _finish(self, decision: OwnerDecision, ended: RanksEnded) -> int:
        """Nothing follows, or another start of the whole job."""
        message, step = decision.message or decision.reason, ended.step
        self._records.saved_rows(step)
        self._records.result(decision.state, message, step)
        self._spot.close()
        if decision.word == "requeue":
            log_line(f"requeue: {decision.reason}")
            self._records.requeue(decision.reason, step)
            self._lease.release()
            if not (refused := self._requeue()):
                return 0
            message = f"{message}; not queued again: {refused}"
            self._records.result(decision.state, message, step)
        remove_kept(self._run.path)
        self._tracking.close()
        self._records.close()
        self._lease.release()
        log_line(f"the run {ENDED.get(decision.state, decision.state)}: {message}")
        return 0 if decision.state == "completed" else 1

    def _start(self) -> RanksEnded:
        """Start all ranks once, unless a signal came before, and wait for their end."""
        met, cause, fault, self._alone = False, "", "", True
        try:
            self._records.clear()
            if not (self._signals or self._lease.taken):
                met, cause, fault = self._run_ranks()
        except CANNOT_NOW as error:
            if isinstance(error, MISTAKES) and not self._so_far.met:
                raise
            fault = f"the ranks cannot be started: {reason_of(error)}"
        record, asked, step = self._left()
        self._alone = record is None
        self._may_pause(met)
        now = slurm_step.job_now(os.environ, self._silent) if self._options.slurm else []
        down = "; ".join(self._down.values())
        self._fewer = self._layout_of(now, record)
        return RanksEnded(
            record=record,
            met=met,
            cannot="" if met else fault,
            patient=self._pause_s is not None,
            signal=self._signals[-1] if self._signals else "",
            asked=asked,
            preempted=self._config.slurm.preempted == "requeue" and slurm_step.preempted(os.environ),
            cause=cause if record is None else "",
            short=(down or "a node was lost") if self._spare_nodes(now) < 0 else "",
            fewer=self._fewer,
            broken=down if slurm_step.taken_apart(now) else "",
            step=step,
            run=self._run.name,
        )

    def _run_ranks(self) -> tuple[bool, str, str]:
        """Whether the ranks met, why not or why rank 0 ended as far as logs have it, and what could not be done."""
        so_far, last = self._so_far, self._so_far.restarts >= self._config.slurm.restarts
        given = RanksStart(
            self._lease.nonce,
            self._lease.generation,
            so_far.restarts,
            self._reason,
            last,
            self._spare_nodes(slurm_step.job_now(os.environ, self._silent) if self._options.slurm else []),
            so_far.met,
            self._fewer,
        )
        os.environ[START] = msgspec.json.encode(given).decode()
        logs = self._run.logs(self._attempt)
        sizes = {path.name: path.stat().st_size for name in OUTPUTS for path in logs.glob(name)}
        ranks = self._ranks(logs)
        met, first = self._watch(ranks)
        self._down |= ranks.down
        codes = ranks.close()
        if not self._options.slurm:
            log_line(f"exit codes by rank: {' '.join(map(str, codes))}")
        found = {name: tail(logs / name, sizes.get(name, 0)) for name in (f"agent-{first}.log", "slurm.out")}
        silent = (line for line in found["slurm.out"] if any(sign in line for sign in TRANSIENT_FAILURES))
        return met, telling_line([(name.partition(".")[0], lines) for name, lines in found.items()]), next(silent, "")

    def _left(self) -> tuple[RanksStop | None, bool, int]:
        """What rank 0 left, whether somebody wants the run to end, and the step of its newest checkpoint."""
        try:
            record, asked, self._saved = patiently(
                lambda: (self._records.end(), *self._records.position()),
                self._longest_s,
                self._note,
                answers=(),
                pause=self._pause,
            )
        except InterruptedError:
            return None, False, self._saved
        except CANNOT_NOW as error:
            why = gives_up(cannot(error), self._saved, self._config, self._run.name)
            return RanksStop("fatal", why, 0), False, self._saved
        return record, asked, self._saved

    def _may_pause(self, met: bool) -> None:
        """A start has ended: how long to wait before the next one."""
        if met or self._signals:
            self._patience, self._pause_s, self._since = None, 0.0, ""
            return
        now = time.monotonic()
        self._patience = self._patience or Patience(self._longest_s, now)
        self._pause_s = self._patience.failed(now)

    def _requeue(self) -> str:
        """Queue the job again; returns why that is refused."""
        try:
            return patiently(lambda: slurm_step.requeue(os.environ), self._longest_s, self._note, pause=self._pause)
        except CANNOT_NOW as error:
            return reason_of(error)

    def _spare_nodes(self, now: Sequence[slurm_step.ComponentNow]) -> int:
        """Nodes of the job that get no rank, all in its first component; negative where some are missing."""
        more = [*map(sub, (component.nodes for component in now), self._options.nodes)]
        return next((one for one in more if one < 0), more[0]) if more else 0

    def _layout_of(self, now: Sequence[slurm_step.ComponentNow], record: RanksStop | None) -> FewerNodes:
        """The layout for these nodes, where they are too few: a child finds it, with the checks of a run file."""
        if (
            (self._signals or (record is not None and STATES[record.why] != "restarting"))
            or (self._spare_nodes(now) >= 0 or slurm_step.taken_apart(now))
            or self._config.planner.fewer_nodes == "never"
        ):
            return FewerNodes()
        needed, down = self._options.nodes, "; ".join(self._down.values()) or "a node was lost"
        given = self._run.config, down, needed, [*map(min, needed, (part.nodes for part in now))]
        answer = slurm_step.ask(sys.executable, "-m", "libra_hpc.preflight.fewer_nodes", *map(str, given))[1]
        # What a library prints at its end comes after it.
        found = (fewer_layout.decode(line) for line in answer.splitlines() if line.startswith('{"sentence"'))
        return next(found, FewerNodes(f"{down}: no layout ({' '.join(answer.split())[-200:]})"))

    def _ranks(self, logs: Path) -> Ranks:
        options, nodes = self._options, self._fewer.nodes or self._options.nodes
        if not options.slurm:
            return LocalRanks(options.size, logs, options.argv)
        more = options.size - sum(options.nodes)
        fewer = self._fewer.nodes or self._silent
        argv = on_nodes(options.argv, nodes, more, self._silent) if fewer else options.argv
        return SlurmStep(self._run, self._attempt, sum(nodes) + more, argv, self._config.slurm.interface)

    def _watch(self, ranks: Ranks) -> tuple[bool, int]:
        """Until all ranks have ended; returns whether they met, and the one whose end explains most."""
        met, patience, passed_on, self._status_at = False, EndPatience(), 0, time.monotonic()
        while ranks.poll() and not self._gives_up(ranks):
            now, self._alone = time.monotonic(), 0 in ranks.links.ended
            self._tracking.keep(now)
            for name in self._signals[passed_on:]:
                ranks.signal(name)
                passed_on += 1
            met = ranks.links.met
            self._spot.missing = max(0, len(self._down | ranks.down) - self._config.slurm.spare)
            recorded = self._records.has(self._run.ended(self._attempt))
            if patience.ends(ranks, recorded, now) or self._lease.taken:
                ranks.kill()
                silent_s = now - max(ranks.links.gone.values(), default=now)
                if isinstance(ranks, SlurmStep) and silent_s > self._silence_s:
                    self._silent |= ranks.leave_out()
            if (
                (0 in ranks.links.ended or (self._message and not met))
                and now - self._status_at > STATUS_S
                and not self._lease.check()
            ):
                self._status_at = now
                lost = f"{PLANNER_LOST}; the others save and end" if met else self._message
                self._records.status("" if recorded else "restarting", lost)
        return ranks.links.met, patience.first

    def _gives_up(self, ranks: Ranks) -> bool:
        """Whether Slurm takes the job apart; then the ranks are killed, as this process soon is."""
        apart = bool(ranks.down) and "TERM" in self._signals
        if apart := apart and slurm_step.taken_apart(slurm_step.job_now(os.environ)):
            ranks.kill()
        return apart


def pause(seconds: float, changes: Callable[[], object], meanwhile: Callable[[], object] = bool) -> None:
    """Sleep; raises `InterruptedError` once ``changes`` returns something else."""
    until, before = time.monotonic() + seconds, changes()
    while (left_s := until - time.monotonic()) > 0.0:
        time.sleep(min(left_s, PAUSE_S))
        meanwhile()
        if changes() != before:
            raise InterruptedError(errno.EINTR, "a signal came")


def taking(error: Exception) -> str:
    """Why a run cannot be taken."""
    return f"its lease cannot be taken: {reason_of(error)}"


def own(run: RunDir, options: argparse.Namespace, signals: Sequence[str]) -> RunOwner:
    """Take the run, for as long as that cannot be done now; raises `SystemExit`."""
    answers = (LeaseRefused, InterruptedError, *(() if met_before(run) else MISTAKES))
    lease: list[HeldLease] = []
    config = RunConfig()

    def read() -> RunConfig:
        run.config.read_bytes()  # an error of a file system is waited for, as no other is
        return load_resolved(run.config)

    def take() -> RunOwner:
        try:
            if not lease:
                lease.append(acquire(run.leases, LEASE_S))
            return RunOwner(run, config, options, lease[0], signals)
        except RuntimeError as error:  # no thread can be started
            raise BlockingIOError(errno.EAGAIN, str(error)) from error

    def note(sentence: str) -> None:
        log_line(sentence)
        with contextlib.suppress(*CANNOT_NOW):
            found = newest_lease(run.leases)[1]
            if found is None or found.released or found.dead or lease:
                OwnerRecords(run, options.attempt).status("restarting", sentence)

    def wait(seconds: float) -> None:
        pause(seconds, lambda: len(signals))

    words: Callable[[Exception], str] = cannot
    try:
        config = patiently(read, config.deadlines.cannot_now_s, note, answers=answers, pause=wait)
        words = taking
        return patiently(take, config.deadlines.cannot_now_s, note, words=words, answers=answers, pause=wait)
    except (LeaseRefused, UserError, *CANNOT_NOW) as error:
        why = words(error) if isinstance(error, OSError) else str(error)
        given_up = not isinstance(error, (*answers, UserError))
        why = gives_up(why, saved_step(run), config, run.name) if given_up else why
        refuse(run, options.attempt, f"the run does not start: {why}")
        raise SystemExit(1) from None


def main(argv: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Own a run: start its ranks, and decide what follows their end.")
    parser.add_argument("--run", required=True)
    parser.add_argument("--attempt", type=int, required=True)
    parser.add_argument("--size", type=int, required=True, help="ranks")
    parser.add_argument("--slurm", action="store_true", help="the program is an srun command line, not that of a rank")
    parser.add_argument("--nodes", type=int, nargs="*", default=[], help="nodes that the ranks need, by component")
    parser.add_argument("--unprepared", default="", metavar="CAUSE", help="the ranks cannot start; nothing is started")
    parser.add_argument("argv", nargs="*")
    options = parser.parse_args(argv)
    signals: list[str] = []
    # Ending before the ranks would make a stopping run appear dead.
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda number, frame: signals.append("USR1" if number == signal.SIGUSR1 else "TERM"))
    for number in STRAY:
        signal.signal(number, lambda number, frame: log_line(stray_words(number)))
    dump_on_request()
    raise_limits(options.size)
    owner = own(RunDir(options.run), options, signals)
    try:
        raise SystemExit(owner.fail(options.unprepared) if options.unprepared else owner.serve())
    except Exception as error:
        owner.fail(f"the owner of the run failed: {type(error).__name__}: {error}")
        raise


if __name__ == "__main__":
    main()
