"""What follows once all ranks have ended: one decision for the batch script and for the local launcher.

- The time limit or a preemption stopped the run, and it may be queued again -> ``requeue`` (`_go_on`).
- The job was signalled to stop, or the run has a result -> ``stop``.
- The ranks ask for a restart in `RunDir.again` -> ``again`` (a repartition), or ``recover`` (a leader was lost).
- The ranks never met -> ``repeat``, at most `START_TRIES` starts.
- The ranks met, but rank 0 left no result -> it was killed: ``recover``.
- ``slurm.restarts`` recoveries are used -> ``stop``, and the run has failed.

``python -m libra_hpc.slurm.outcome RUN ATTEMPT ...`` prints the decision.  With ``--final`` it writes a missing result,
prints how the run ended, and exits with 0 when it completed.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any, Literal, NamedTuple

from libra_hpc.facts.journal import LineLog
from libra_hpc.facts.rundir import RunDir, read_lines
from libra_hpc.process.agent_folders import remove_kept

START_TRIES = 3
"""Most starts in a row in which the agents do not meet.  A repeated start costs seconds; giving up costs the place in
the queue."""
RECOVER = "recover: "
"""Prefix of `RunDir.again` where ranks restart because a part of the job was lost; the rest is the reason."""
RECOVERIES, REASON = "LIBRA_HPC_RECOVERIES", "LIBRA_HPC_RESTART_REASON"
"""Environment variables of the ranks: restarts used by this attempt, and the reason of the last one."""

READ_TRIES, READ_PAUSE_S = 5, 2.0
"""Tries to read what the ranks left in the run directory, and the seconds between them."""

OUTPUT, OUTPUT_FD = "LIBRA_HPC_OUTPUT_FD", 3
"""Environment variable of the ranks with the file descriptor of Slurm's own output, and that descriptor.  Without the
variable a rank has none."""

JOB_END, KILL_WAIT = "LIBRA_HPC_JOB_END", "LIBRA_HPC_KILL_WAIT"
"""Environment variables of the ranks: the job's end, and the seconds between Slurm's SIGTERM and SIGKILL."""

STOP_SIGNAL = "the job was sent a signal to stop"
STATES = {"USR1": "time_limit", "TERM": "cancelled"}
"""State of a run that a signal ended before its ranks could write a result."""
ENDED = {"time_limit": "was stopped by the time limit", "cancelled": "was cancelled"}
IDLE_STARTS = 2
"""Starts in a row that may end at the step they began with.  One: a slow start beside a short limit may be chance."""
Word = Literal["stop", "fail", "requeue", "again", "recover", "repeat"]


class Requeues(NamedTuple):
    """What decides whether a stopped run is queued again."""

    stopped: Literal["", "time_limit", "preempted"] = ""
    """What stopped the run, where it was neither cancelled nor failed."""
    allowed: int = 0
    """``slurm.requeues``."""
    used: int = 0
    """Slurm's own count."""
    step: int = 0
    """Step of the newest checkpoint."""
    before: tuple[int, ...] = ()
    """The same at the requeues before."""


class RanksEnded(NamedTuple):
    """What the ranks left behind, and the restarts so far."""

    signalled: bool
    """The job was signalled to stop."""
    met: bool
    again: str | None
    """Content of `RunDir.again`; None without the file."""
    has_result: bool
    """`RunDir.result` exists."""
    tries: int
    """Starts in a row in which the ranks did not meet, including this one."""
    recoveries: int
    """Restarts used."""
    restarts: int
    """Restarts allowed."""
    requeues: Requeues = Requeues()


class LauncherDecision(NamedTuple):
    """What the launcher does now, and why."""

    word: Word
    reason: str


def decide(ended: RanksEnded) -> LauncherDecision:
    """See the module docstring."""
    if ended.requeues.stopped:
        return _go_on(ended.requeues)
    if ended.signalled:
        return LauncherDecision("stop", STOP_SIGNAL)
    if ended.has_result:
        return LauncherDecision("stop", "the run has ended")
    if ended.again is not None and not ended.again.startswith(RECOVER):
        return LauncherDecision("again", "the ranks start in another layout")
    if ended.again is not None:
        return _recover(ended, ended.again.removeprefix(RECOVER).strip())
    if ended.met:
        return _recover(ended, "the planner's agent (rank 0) was lost")
    if ended.tries < START_TRIES:
        return LauncherDecision("repeat", f"start {ended.tries}: the agents did not meet")
    return LauncherDecision("stop", f"start {ended.tries}: the agents did not meet; see the agents' logs")


def _go_on(requeues: Requeues) -> LauncherDecision:
    """Whether a run that the time limit or a preemption stopped is queued again."""
    if requeues.stopped == "preempted":
        return LauncherDecision("requeue", f"preempted at step {requeues.step}")
    reached = f"time limit at step {requeues.step}"
    if not requeues.allowed:
        return LauncherDecision("stop", reached)
    if requeues.used >= requeues.allowed:
        return LauncherDecision("stop", f"{reached}, and all {requeues.allowed} of slurm.requeues are used")
    if requeues.before[-IDLE_STARTS:] == (requeues.step,) * IDLE_STARTS:
        why = f"the last {IDLE_STARTS} starts saved no step after step {requeues.step}"
        return LauncherDecision("fail", f"{why}: slurm.time_limit is too short for a start, a step and a save")
    return LauncherDecision("requeue", f"{reached}; requeue {requeues.used + 1} of {requeues.allowed}")


def _recover(ended: RanksEnded, reason: str) -> LauncherDecision:
    if ended.recoveries < ended.restarts:
        return LauncherDecision("recover", reason)
    return LauncherDecision("stop", f"{reason}, and all {ended.restarts} restarts of slurm.restarts are used")


def read_end(run: RunDir, attempt: int, *, signalled: bool, tries: int, recoveries: int, restarts: int) -> RanksEnded:
    """Read what the ranks left behind, with `READ_TRIES` tries; unreadable counts as killed with no restart left."""
    ended = RanksEnded(
        signalled=signalled,
        met=True,
        again=None,
        has_result=False,
        tries=tries,
        recoveries=recoveries,
        restarts=restarts,
    )
    for left in reversed(range(READ_TRIES)):
        try:
            again = run.again(attempt).read_text(errors="replace") if run.again(attempt).exists() else None
            return ended._replace(met=run.met(attempt).exists(), again=again, has_result=run.result.exists())
        except OSError as error:
            print(f"the run directory cannot be read: {error}", file=sys.stderr)
            if left:
                time.sleep(READ_PAUSE_S)
    return ended._replace(recoveries=restarts)


def read_requeues(run: RunDir, attempt: int, *, signal: str, preempted: bool, allowed: int, used: int) -> Requeues:
    """Read what the stopped ranks left behind; ``signal``: the last one that the batch script got."""
    state = run.read_json(run.result).get("state", STATES.get(signal, ""))
    stopped: Literal["", "time_limit", "preempted"] = ""
    if preempted and state in STATES.values():
        stopped = "preempted"
    elif state == "time_limit" and signal != "TERM":
        stopped = "time_limit"
    try:
        if not stopped or run.stop.exists():
            # Nothing to go on with, or somebody wants the run to end.
            return Requeues()
        newest = run.latest_checkpoint()
        before = tuple(line.get("step", -1) for line in read_lines(run.requeued(attempt)))
    except OSError as error:
        print(f"the run directory cannot be read: {error}", file=sys.stderr)
        return Requeues()
    return Requeues(stopped, allowed, used, 0 if newest is None else newest[0], before)


def note_requeue(run: RunDir, attempt: int, decision: LauncherDecision, step: int) -> None:
    """Log that the job is about to be queued again; a file system that takes no writes does not prevent it."""
    event = {"t": time.time(), "kind": "job_requeued", "reason": decision.reason, "step": step}
    try:
        for path, record in ((run.requeued(attempt), {"step": step}), (run.events, event)):
            lines = LineLog(path)
            lines.write(record)
            lines.close()
    except OSError as error:
        print(f"the requeue cannot be logged: {error}", file=sys.stderr)


def finish(run: RunDir, attempt: int, decision: LauncherDecision, *, signal: str = "", not_requeued: str = "") -> int:
    """Write the result where the ranks could not, print it, and return the exit code: 0 when the run completed.

    ``not_requeued``: why the job is not queued again, although it was to be.
    """
    remove_kept(run.path)
    left = run.read_json(run.result)
    state, message = left.get("state", STATES.get(signal, "failed")), left.get("message", decision.reason)
    if decision.word == "fail":
        state, message = "failed", decision.reason
    if not_requeued:
        message = f"{message}; not queued again: {' '.join(not_requeued.split())}"
    if (state, message) != (left.get("state"), left.get("message", decision.reason)):
        status = run.read_json(run.status)
        result = {
            "state": state,
            "message": message,
            "step": left.get("step", status.get("step", 0)),
            "attempt": attempt,
            "t": time.time(),
        }
        try:
            _write(run, result, status)
        except OSError as error:
            print(f"the result cannot be written: {error}", file=sys.stderr)
    print(f"the run {ENDED.get(state, state)}: {message}", flush=True)
    return 0 if state == "completed" else 1


def _write(run: RunDir, result: dict[str, Any], status: dict[str, Any]) -> None:
    run.write_json(run.result, result)
    if status:
        run.write_json(run.status, {**status, "state": result["state"], "message": result["message"]})
    events = LineLog(run.events)
    events.write(
        {"t": result["t"], "kind": "job_finished", **{key: result[key] for key in ("state", "message", "step")}}
    )
    events.close()


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description="Decide what follows once all ranks of a run have ended.")
    parser.add_argument("run")
    parser.add_argument("attempt", type=int)
    parser.add_argument("--signal", default="")
    parser.add_argument("--tries", type=int, default=START_TRIES)
    parser.add_argument("--recoveries", type=int, default=0)
    parser.add_argument("--restarts", type=int, default=0)
    parser.add_argument("--requeues", type=int, default=0)
    parser.add_argument("--requeued", type=int, default=0, help="Slurm's own count of this job's restarts")
    parser.add_argument("--preempted", default="", help="when Slurm preempted the job, empty: it did not")
    parser.add_argument("--final", action="store_true")
    parser.add_argument("--refused", default="", help="with --final: why Slurm did not queue the job again")
    options = parser.parse_args()
    run = RunDir(options.run)
    counts = {"tries": options.tries, "recoveries": options.recoveries, "restarts": options.restarts}
    requeues = read_requeues(
        run,
        options.attempt,
        signal=options.signal,
        preempted=bool(options.preempted),
        allowed=options.requeues,
        used=options.requeued,
    )
    ended = read_end(run, options.attempt, signalled=bool(options.signal), **counts)._replace(requeues=requeues)
    if options.refused:
        return finish(run, options.attempt, decide(ended), signal=options.signal, not_requeued=options.refused)
    decision = decide(ended)
    if options.final:
        used = decision.reason if decision.word == "stop" and requeues.stopped and requeues.allowed else ""
        return finish(run, options.attempt, decision, signal=options.signal, not_requeued=used)
    if decision.word == "requeue":
        note_requeue(run, options.attempt, decision, requeues.step)
    print(f"{decision.word} {decision.reason}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
