"""What follows once all ranks have ended: one decision for the batch script and for the local launcher.

- The job was told to leave -> stop.
- The run has a verdict -> stop.
- The ranks ask for a restart in `RunDir.again` -> ``again`` (a repartition), or ``recover`` (a leader was lost).
- The ranks never met -> ``repeat``, at most `START_TRIES` starts.
- The ranks met, but rank 0 left no verdict -> it was killed: ``recover``.
- ``recover`` happens at most ``slurm.restarts`` times; then the run has failed.

``python -m libra_hpc.slurm.outcome RUN ATTEMPT ...`` prints the decision's word.  With ``--final`` it gives a run
without a verdict one, says how the run ended on Slurm's own output, and exits with 0 when it completed.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any, Literal, NamedTuple

from libra_hpc.telemetry.events import LineLog
from libra_hpc.telemetry.rundir import RunDir

START_TRIES = 3
"""Starts of an attempt's agents while they do not even meet.  The one known cause is dealt with in
`libra_hpc.slurm.pmi`; for causes not yet met (a node slow to load Python, a network that hiccups), repeating costs
seconds, giving up a place in the queue."""
RECOVER = "recover: "
"""Beginning of `RunDir.again` where ranks restart because a part of the job was lost; the rest is the reason."""
RECOVERIES, REASON = "LIBRA_HPC_RECOVERIES", "LIBRA_HPC_RESTART_REASON"
"""Variables of the ranks: how many restarts this attempt has used, and why the last one happened."""

LOOKS, LOOK_S = 5, 2.0
"""How often the run directory is asked what the ranks left, and the pause between."""

OUTPUT, OUTPUT_FD = "LIBRA_HPC_OUTPUT_FD", 3
"""Variable of the ranks with the descriptor that the batch script makes Slurm's own output, and that descriptor.
Without it a rank has none."""

Word = Literal["stop", "again", "recover", "repeat"]


class RanksEnded(NamedTuple):
    """What is known once the ranks have ended."""

    told: bool
    """The job was signalled to leave."""
    met: bool
    again: str | None
    """Content of `RunDir.again`; None without the file."""
    verdict: bool
    """`RunDir.result` exists."""
    tries: int
    """Starts in a row in which the ranks did not meet, this one included."""
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
    if ended.told:
        return LauncherDecision("stop", "the job was told to leave")
    if ended.verdict:
        return LauncherDecision("stop", "the run has ended")
    if ended.again is not None and not ended.again.startswith(RECOVER):
        return LauncherDecision("again", "the ranks start in another layout")
    if ended.again is not None:
        return _recover(ended, ended.again.removeprefix(RECOVER).strip())
    if ended.met:
        return _recover(ended, "the planner's agent (rank 0) was lost")
    if ended.tries < START_TRIES:
        return LauncherDecision("repeat", f"start {ended.tries}: the agents did not meet")
    return LauncherDecision("stop", f"start {ended.tries}: the agents did not meet; the agents' logs say more")


def _recover(ended: RanksEnded, reason: str) -> LauncherDecision:
    if ended.recoveries < ended.restarts:
        return LauncherDecision("recover", reason)
    return LauncherDecision("stop", f"{reason}, and all {ended.restarts} restarts of slurm.restarts are used")


def look(run: RunDir, attempt: int, *, told: bool, tries: int, recoveries: int, restarts: int) -> RanksEnded:
    """Read what the ranks left behind; a file system that hiccups is asked again, `LOOKS` times."""
    for left in reversed(range(LOOKS)):
        try:
            again = run.again(attempt).read_text(errors="replace") if run.again(attempt).exists() else None
            return RanksEnded(told, run.met(attempt).exists(), again, run.result.exists(), tries, recoveries, restarts)
        except OSError as error:
            print(f"the run directory cannot be read: {error}", file=sys.stderr)
            if left:
                time.sleep(LOOK_S)
    return RanksEnded(told, True, None, False, tries, restarts, restarts)


def finish(run: RunDir, attempt: int, decision: LauncherDecision, *, told: bool) -> int:
    """Leave a verdict where the ranks could not, say it, and return the exit code: 0 when the run completed."""
    result = run.read_json(run.result)
    if not result:
        status = run.read_json(run.status)
        result = {
            "state": "cancelled" if told else "failed",
            "message": decision.reason,
            "step": status.get("step", 0),
            "attempt": attempt,
            "t": time.time(),
        }
        try:
            _write(run, result, status)
        except OSError as error:
            print(f"the verdict cannot be written: {error}", file=sys.stderr)
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
    parser.add_argument("--told", default="")
    parser.add_argument("--tries", type=int, default=START_TRIES)
    parser.add_argument("--recoveries", type=int, default=0)
    parser.add_argument("--restarts", type=int, default=0)
    parser.add_argument("--final", action="store_true")
    options = parser.parse_args()
    run, told = RunDir(options.run), bool(options.told)
    counts = {"tries": options.tries, "recoveries": options.recoveries, "restarts": options.restarts}
    decision = decide(look(run, options.attempt, told=told, **counts))
    if options.final:
        return finish(run, options.attempt, decision, told=told)
    print(f"{decision.word} {decision.reason}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
