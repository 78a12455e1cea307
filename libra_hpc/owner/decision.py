"""What follows the end of all ranks: the one decision, pure.  Cases in this order:

- Training has reached the last step, or a guard of learning paused it -> ``stop``; nothing queues it again.
- The run cannot go on, or its directory takes no writes -> ``fail``.
- The time limit, a signal or a request stopped it -> ``requeue`` where that is allowed (`_stopped`), else ``stop``.
- A repartition -> ``restart``; it uses up no restart.
- A part was lost, rank 0 ended without a word, or an agent has a defect -> ``restart``, as often as allowed.
- The same defect at the same step as before -> ``fail``.
- The ranks did not meet -> ``repeat``, at most `START_TRIES` starts in a row.
- They met before, or something cannot be done now (`RanksEnded.cannot`) -> ``repeat`` for ``deadlines.cannot_now_s``:
  a fault of the configuration shows at the first start of a run.
- A start would follow, but Slurm has taken nodes from the job -> it follows where a layout fits those that are left
  (`RanksEnded.fewer`), else ``requeue`` where ``slurm.preempted`` allows it.
- Slurm takes the job apart: it queues components of one node again, and ends the others -> the same.
"""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

import msgspec

from libra_hpc.config.run import RunConfig
from libra_hpc.protocol.ranks_stop import FewerNodes, RanksStop

State = Literal["completed", "failed", "cancelled", "time_limit", "paused"]
START_TRIES = 3
"""Most starts in a row in which the agents do not meet.  A repeated start costs seconds; giving up costs the place in
the queue."""
IDLE_STARTS = 2
"""Starts in a row that may end at the step they began with.  One: a slow start beside a short limit may be chance."""
STOP_SIGNAL = "the job was sent a signal to stop"
PLANNER_LOST = "the planner's agent (rank 0) was lost"
STOPS: dict[str, State] = {"completed": "completed", "paused": "paused"}
"""State of a run that its ranks ended for good, without a fault."""
STATES: dict[str, State] = {"USR1": "time_limit", "TERM": "cancelled"}
"""State of a run that a signal ended before its ranks could report why."""


class RanksEnded(NamedTuple):
    """What the ranks left behind, and what the owner has seen."""

    record: RanksStop | None = None
    """Last word of rank 0; None: it was killed."""
    met: bool = True
    signal: str = ""
    """The last one that the owner got: ``USR1``, ``TERM`` or none."""
    asked: bool = False
    """Somebody asked for the end of the run."""
    preempted: bool = False
    cause: str = ""
    """Why the ranks did not meet, or rank 0 ended, as far as logs have it."""
    step: int = 0
    """Step of the newest checkpoint."""
    short: str = ""
    """Why the job has fewer nodes than its ranks need; empty where it has enough."""
    fewer: FewerNodes = FewerNodes()
    """The layout for fewer nodes, where nodes are missing and ``planner.fewer_nodes`` allows it."""
    broken: str = ""
    """Why Slurm takes the job apart; empty where it does not."""
    cannot: str = ""
    """What the owner cannot do now, and why; empty where it can."""
    patient: bool = True
    """``deadlines.cannot_now_s`` have not passed since the first of failed starts in a row."""
    run: str = "RUN"
    """Name of the run."""


class SoFar(NamedTuple):
    """The starts of this attempt before the decision."""

    tries: int = 1
    """Starts in a row in which the ranks did not meet, with this one."""
    restarts: int = 0
    """Restarts used."""
    defect: RanksStop | None = None
    """The defect that ended the start before, if one did."""
    requeued: int = 0
    """Slurm's own count."""
    idle: tuple[int, ...] = ()
    """Steps of the newest checkpoint at the requeues before."""
    met: bool = False
    """The ranks of this run have met, in this attempt or before."""
    first: str = ""
    """Why the first of failed starts in a row failed."""


class OwnerDecision(NamedTuple):
    """What the owner does now, and why."""

    word: Literal["restart", "repeat", "requeue", "stop", "fail"]
    reason: str
    state: State = "failed"
    """How the run ends, where nothing follows."""
    message: str = ""
    """Message of the result; empty: the reason."""
    so_far: SoFar = SoFar()
    """For the next decision of this attempt."""


def decide(ended: RanksEnded, so_far: SoFar, config: RunConfig) -> OwnerDecision:
    decision = _in_this_job(ended, so_far, config)
    starts = decision.word in ("restart", "repeat")
    if ended.broken and not ended.asked and (starts or decision.state in ("cancelled", "time_limit")):
        lost, follows = ended.broken, "Slurm ends a job with a component of one node, so it is queued again"
    elif ended.short and starts and ended.fewer.changes:
        return decision._replace(reason=_with(decision.reason, ended.fewer.sentence.removeprefix(f"{ended.short}: ")))
    elif ended.short and starts:
        lost, follows = ended.fewer.sentence or ended.short, "without a spare node the job is queued again"
    else:
        return decision
    # A signal explains nothing: that is how Slurm ends the job.
    reason = decision.reason if starts else lost
    reason = reason if lost in reason else f"{reason}; {lost}"
    if config.slurm.preempted == "requeue":
        return OwnerDecision("requeue", f"{reason}; {follows}", "cancelled")
    return OwnerDecision("fail", f"{reason}; slurm.preempted is stop: continue with --resume")


def _in_this_job(ended: RanksEnded, so_far: SoFar, config: RunConfig) -> OwnerDecision:
    """What follows where the job has all its nodes."""
    record = ended.record
    why, sentence = ("", "") if record is None else (record.why, record.sentence)
    if (final := STOPS.get(why)) is not None:
        return OwnerDecision("stop", sentence, final)
    if why in ("fatal", "broken", "storage", "orphaned", "taken"):
        return OwnerDecision("fail", sentence)
    if ended.signal or why in ("time_limit", "cancelled"):
        return _stopped(ended, so_far, config)
    if why == "repartition":
        reason = "the ranks start in another layout"
        return OwnerDecision("restart", reason, so_far=so_far._replace(tries=1, defect=None))
    if record is not None and why == "defect":
        if so_far.defect is not None and _alike(record) == _alike(so_far.defect):
            return OwnerDecision("fail", f"{sentence}, a second time at step {record.step}")
        return _restart(sentence, so_far._replace(defect=record), config)
    if ended.met or why == "lost":
        return _restart(sentence or _with(PLANNER_LOST, ended.cause), so_far._replace(defect=None), config)
    return _not_met(sentence, ended, so_far, config)


def _not_met(sentence: str, ended: RanksEnded, so_far: SoFar, config: RunConfig) -> OwnerDecision:
    """Whether the start is repeated; ``sentence``: why the ranks do not go on together, where they found that."""
    if ended.asked:
        return OwnerDecision("stop", "a request to stop", "cancelled")
    if sentence and not so_far.met:
        return OwnerDecision("fail", sentence)
    waits = bool(so_far.met or ended.cannot)
    reason = ended.cannot or _with(f"start {so_far.tries}: the agents did not meet", sentence or ended.cause)
    if ended.patient if waits else so_far.tries < START_TRIES:
        first = so_far.first or reason
        return OwnerDecision("repeat", reason, so_far=so_far._replace(tries=so_far.tries + 1, first=first))
    if waits:
        return OwnerDecision("fail", gives_up(so_far.first or reason, ended.step, config, ended.run))
    return OwnerDecision("fail", reason if ended.cause else f"{reason}; see the agents' logs")


def gives_up(first: str, step: int, config: RunConfig, run: str) -> str:
    """What was not possible for ``deadlines.cannot_now_s``, what is saved, and how to go on."""
    saved = f"step {step} is saved" if step else "no step is saved"
    return (
        f"{first}, for {config.deadlines.cannot_now_s:.0f} s; {saved}; continue with `libra-hpc submit --resume {run}`"
    )


def _with(sentence: str, cause: str) -> str:
    return f"{sentence}; {cause}" if cause else sentence


def _alike(record: RanksStop) -> RanksStop:
    """A defect without its numbers, such as process ids and free bytes, but with its step."""
    return msgspec.structs.replace(record, sentence=re.sub(r"\d+", "", record.sentence))


def _restart(reason: str, so_far: SoFar, config: RunConfig) -> OwnerDecision:
    if so_far.restarts < config.slurm.restarts:
        return OwnerDecision("restart", reason, so_far=so_far._replace(tries=1, restarts=so_far.restarts + 1))
    used = f"all {config.slurm.restarts} restarts of slurm.restarts are used"
    return OwnerDecision("fail", f"{reason}, and {used}; continue with --resume")


def _stopped(ended: RanksEnded, so_far: SoFar, config: RunConfig) -> OwnerDecision:
    """Whether a run that the time limit, a preemption or somebody stopped is queued again."""
    state, reached = STATES.get(ended.signal, "cancelled"), f"time limit at step {ended.step}"
    message = reached if state == "time_limit" else STOP_SIGNAL
    if ended.record is not None and ended.record.why in ("time_limit", "cancelled"):
        state = "time_limit" if ended.record.why == "time_limit" else "cancelled"
        message = ended.record.sentence
    if ended.asked:
        return OwnerDecision("stop", message, state)
    if ended.preempted:
        return OwnerDecision("requeue", f"preempted at step {ended.step}", state, message)
    if state != "time_limit" or ended.signal == "TERM" or not config.slurm.requeues:
        return OwnerDecision("stop", message, state)
    if so_far.requeued >= config.slurm.requeues:
        why = f"{reached}, and all {config.slurm.requeues} of slurm.requeues are used"
        return OwnerDecision("stop", why, state, f"{message}; not queued again: {why}")
    if so_far.idle[-IDLE_STARTS:] == (ended.step,) * IDLE_STARTS:
        why = f"the last {IDLE_STARTS} starts saved no step after step {ended.step}"
        return OwnerDecision("fail", f"{why}: slurm.time_limit is too short for a start, a step and a save")
    return OwnerDecision(
        "requeue", f"{reached}; requeue {so_far.requeued + 1} of {config.slurm.requeues}", state, message
    )
