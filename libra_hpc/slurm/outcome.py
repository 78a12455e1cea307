"""What follows once all ranks have ended: one decision for the batch script and for the local launcher.

- The job was signalled to stop -> ``stop``.
- The run has a result -> ``stop``.
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

from libra_hpc.telemetry.events import LineLog
from libra_hpc.telemetry.rundir import RunDir

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

STOP_SIGNAL = "the job was sent a signal to stop"
Word = Literal["stop", "again", "recover", "repeat"]


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


class LauncherDecision(NamedTuple):
    """What the launcher does now, and why."""

    word: Word
    reason: str


def decide(ended: RanksEnded) -> LauncherDecision:
    """See the module docstring."""
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


def finish(run: RunDir, attempt: int, decision: LauncherDecision, *, signalled: bool) -> int:
    """Write the result where the ranks could not, print it, and return the exit code: 0 when the run completed."""
    result = run.read_json(run.result)
    if not result:
        status = run.read_json(run.status)
        result = {
            "state": "cancelled" if signalled else "failed",
            "message": decision.reason,
            "step": status.get("step", 0),
            "attempt": attempt,
            "t": time.time(),
        }
        try:
            _write(run, result, status)
        except OSError as error:
            print(f"the result cannot be written: {error}", file=sys.stderr)
    state = result["state"]
    print(
        f"the run {'was ' if state == 'cancelled' else ''}{state}: {result.get('message', decision.reason)}", flush=True
    )
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
    parser.add_argument("--final", action="store_true")
    options = parser.parse_args()
    run, signalled = RunDir(options.run), bool(options.signal)
    counts = {"tries": options.tries, "recoveries": options.recoveries, "restarts": options.restarts}
    decision = decide(read_end(run, options.attempt, signalled=signalled, **counts))
    if options.final:
        return finish(run, options.attempt, decision, signalled=signalled)
    print(f"{decision.word} {decision.reason}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
