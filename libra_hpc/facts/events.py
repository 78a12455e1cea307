"""Every kind of event in ``events.jsonl``, declared once: its meaning, its fields, and where it is shown.

A line has ``t`` (epoch seconds), ``kind`` and the kind's own fields.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class EventKind(NamedTuple):
    """One kind; ``fields``: names, separated by spaces."""

    kind: str
    meaning: str
    fields: str = ""
    fault: bool = False
    """Whether the report lists it under failures and restarts."""
    notice: bool = False
    """Whether its reason belongs on the status screen for a while."""


def _fault(kind: str, meaning: str, fields: str, notice: bool = False) -> EventKind:
    return EventKind(kind, meaning, fields, fault=True, notice=notice)


RUN = (
    EventKind("agent_joined", "A node's agent started", "rank host pid component"),
    EventKind("job_started", "All agents joined", "ranks step attempt"),
    _fault("recovered", "The ranks started again after a loss", "restarts reason step source"),
    _fault("restart", "All ranks are about to restart", "reason restarts step"),
    _fault(
        "stop_requested", "The run saves and stops: a signal, a request, its time limit, or a guard", "signal reason"
    ),
    _fault("cannot_now", "The owner waits for what is not possible now, and tries it again", "reason"),
    _fault("signal_ignored", "An agent got a signal that rank 0 did not", "rank signal reason", notice=True),
    _fault("step_late", "No step was committed for half of its limit", "step reason"),
    _fault("job_finished", "The attempt ended", "state message step"),
    EventKind("job_requeued", "Slurm queues the job again", "reason step"),
)
NODES = (
    _fault("node_lost", "A node was lost", "rank reason silent_s", notice=True),
    _fault("node_returned", "A lost node was taken back", "rank"),
    _fault("node_quarantined", "A node was lost or wrong so often that the run goes on without it", "rank reason"),
    _fault("fewer_nodes", "The run goes on with the nodes that are left", "reason"),
    EventKind("mpi_world", "MPI reaches so many nodes, and has just lost some", "nodes lost"),
    EventKind("guest_joined", "An agent joined the running job, with engines alone", "rank host pid"),
    EventKind("guest_serves", "Its engines accept turns", "rank seconds"),
    EventKind("guest_leaves", "It wants to leave: its turns go on elsewhere", "rank reason"),
    EventKind("guest_left", "It has left", "rank"),
    EventKind("guest_sleeps", "Its lender was taken back: its engines go into standby until it is given again", "rank"),
    _fault("guest_lost", "A guest was lost; its turns are sent again", "rank reason silent_s"),
    _fault("door_closed", "No guest can join", "reason"),
    _fault("own_stall", "Rank 0 was stopped for a while; no deadline counts it", "reason seconds", notice=True),
    EventKind("illegal_transition", "A message did not fit the node's state and was ignored", "reason"),
    EventKind("generation", "A new membership of training replicas", "generation ranks"),
    _fault("members_late", "A step began without nodes that it had waited for", "step ranks seconds", notice=True),
    EventKind("member_joined", "A replica got the weights", "rank generation step received_bytes seconds source"),
)
PLANNER = (
    EventKind(
        "decision",
        "The planner decided",
        "action node nodes reason triggers numbers candidates layout predicted_gain_s",
    ),
    EventKind("held", "The hold before was repeated `looks` times", "looks reason"),
    EventKind("move_started", "A node began to change stage", "rank to reason numbers predicted_gain_s"),
    EventKind("move_done", "The node serves its new stage", "rank role seconds"),
    EventKind("move_judged", "What a move brought", "at to rank nodes predicted_gain_s realised_gain_s"),
    EventKind("repartitioned", "The ranks restart in another layout", "step layout changes predicted_s"),
    _fault("repartition_refused", "A decision for another layout was refused", "reason changes"),
)
ENGINES = (
    EventKind("engine_ready", "An engine accepts turns, or trainers joins", "rank engine version seconds"),
    _fault("engine_lost", "An engine ended or hung, or a node's trainers", "rank engine reason was", notice=True),
    _fault("engine_error", "A rollout engine reported an error", "rank engine reason fatal", notice=True),
    _fault(
        "engine_off",
        "An engine's log-probabilities are beyond the others': it is reloaded, and closed at the second time",
        "rank engine action reason",
        notice=True,
    ),
    _fault("worker_error", "A training process reported an error", "rank reason fatal"),
    _fault("host_lost", "An environment host ended", "rank host reason", notice=True),
    _fault("log_cut", "The log of a process grew too long and was emptied", "rank part reason", notice=True),
    _fault("numbers_cut", "A task has too many numbers of its own", "reason", notice=True),
    _fault("undecodable", "A message of another node could not be read", "rank sender reason", notice=True),
    _fault("hung", "A process missed its deadline and was killed", "rank part reason", notice=True),
    _fault("slow", "A process is slow, or near its deadline", "rank part reason waits", notice=True),
)
ROLLOUT = (
    EventKind("scheduler_warm_start", "The scheduler learned from trajectories of before", "trajectories"),
    EventKind("resubmitted", "A turn was submitted again", "trajectory reason"),
    EventKind(
        "trajectory_failed",
        "An attempt failed; `unsaid`: failures before it without an event",
        "trajectory task prompt failure error given_up unsaid",
    ),
    _fault("admission_paused", "No prompt is admitted, because too many attempts fail", "reason", notice=True),
    _fault("admission_resumed", "Prompts are admitted again", "reason"),
    _fault("prompt_given_up", "All trajectories of a prompt failed", "index prompt reason"),
    _fault(
        "experience_kept",
        "A restart recovered trajectories",
        "trajectories groups whole_groups tokens generated_tokens unfinished unfinished_tokens dropped",
    ),
    _fault(
        "workload_changed",
        "Data, code or settings of the task differ from the start before: rows may be trained twice or never",
        "",
        notice=True,
    ),
    _fault("experience_refused", "Recovered trajectories do not fit the data order", "index trajectories"),
    EventKind("chat_choice", "How the policy's chat is written", "template checks calls"),
    EventKind("evaluation_failed", "A trajectory of an evaluation failed; it is counted", "task prompt error"),
    EventKind("transcripts_removed", "The oldest transcripts were removed: the room for them is used", "step reason"),
    EventKind("decisions_dropped", "Lines of decisions.jsonl were dropped", "reason"),
)
TRAINING = (
    _fault("update_skipped", "An update that is not finite was left out", "step reason", notice=True),
    _fault("learning_notice", "A guard of learning began to hold", "step good_step reason", notice=True),
    _fault("offer_failed", "New weights could not be offered", "step reason", notice=True),
    EventKind(
        "weights_applied",
        "Engines that serve sample from a version since the last step, `guests` of them of guests, and not yet those of"
        " nodes that are `late`; seconds of the slowest one",
        "version engines guests late wire_s image_s stage_s pause_s recomputed",
    ),
    _fault(
        "weights_stalled",
        "No node sends more of the weights; they are asked again",
        "rank version received reason",
        notice=True,
    ),
    _fault(
        "weights_corrupt", "Weights arrived damaged and are asked for again", "rank version writer reason", notice=True
    ),
    _fault("weights_not_stored", "A node could not store weights and tries again", "rank version reason", notice=True),
)
STORAGE = (
    EventKind("checkpoint_started", "Processes copy their state", "step"),
    EventKind("checkpoint_saved", "A checkpoint is complete", "step seconds stopped_s"),
    _fault("checkpoint_failed", "A checkpoint could not be written", "step reason", notice=True),
    _fault("checkpoint_damaged", "A checkpoint was moved aside at the start", "step reason", notice=True),
    _fault("snapshot_failed", "A snapshot in shared memory failed", "step reason", notice=True),
    _fault("folder_lost", "A node's folder was removed, and made again", "rank reason", notice=True),
    _fault(
        "storage_fault", "The run directory, or a part, cannot be read or takes no writes", "part reason", notice=True
    ),
    _fault("storage_slow", "The run directory takes seconds to answer on a node", "rank reason", notice=True),
    _fault("lease_fault", "The owner's lease is not renewed, or cannot be read", "reason", notice=True),
    _fault("storage_ok", "It takes writes again", "part reason dropped"),
)
EVENTS = {one.kind: one for one in (*RUN, *NODES, *PLANNER, *ENGINES, *ROLLOUT, *TRAINING, *STORAGE)}


def in_words(kind: str) -> str:
    """``engine_lost`` as ``engine lost``."""
    return kind.replace("_", " ")


def place_of(event: Mapping[str, Any]) -> str:
    """Node, engine, part and host of an event."""
    parts = [f"node {event['rank']}"] if isinstance(event.get("rank"), int) else []
    parts += [str(event[key]) for key in ("engine", "part", "host") if event.get(key) not in (None, "")]
    return ", ".join(parts)


def cause_of(event: Mapping[str, Any]) -> str:
    """State and reason of an event."""
    parts = [str(event[key]) for key in ("state", "reason", "message", "error", "signal") if event.get(key)]
    if event["kind"] == "experience_kept":
        parts.append(f"{event.get('trajectories', 0)} finished, {event.get('unfinished', 0)} unfinished")
    return ": ".join(parts)
