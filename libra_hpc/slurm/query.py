"""What the cluster has and how a job is doing.

Both read Slurm's one-line text output rather than ``--json``: its fields have kept their names and form over all
releases since 17.11, while the JSON documents changed shape with nearly every release and are missing where Slurm was
built without the serializer.  ``scontrol show job`` asks for one job (all components of a heterogeneous one), and knows
finished jobs for ``MinJobAge`` seconds; older ones are looked up with ``sacct`` where the site keeps accounts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from enum import Enum

from .command import SlurmRefused, call


class JobState(Enum):
    """Every state of Slurm, as far as a caller must tell them apart."""

    PENDING = "PENDING"
    RUNNING = "RUNNING"
    COMPLETED = "COMPLETED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"
    TIMEOUT = "TIMEOUT"
    PREEMPTED = "PREEMPTED"
    NODE_FAIL = "NODE_FAIL"
    UNKNOWN = "UNKNOWN"
    """Slurm does not know the job (any more): says nothing about how it ended."""

    @property
    def ended(self) -> bool:
        """Whether the job is over for good."""
        return self not in (JobState.PENDING, JobState.RUNNING, JobState.UNKNOWN)


_STATES = {
    **{state.value: state for state in JobState},
    **dict.fromkeys(
        ("CONFIGURING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD"), JobState.PENDING
    ),
    **dict.fromkeys(("COMPLETING", "RESIZING", "SIGNALING", "STAGE_OUT", "STOPPED", "SUSPENDED"), JobState.RUNNING),
    **dict.fromkeys(("OUT_OF_MEMORY", "LAUNCH_FAILED", "RECONFIG_FAIL"), JobState.FAILED),
    "BOOT_FAIL": JobState.NODE_FAIL,
    "DEADLINE": JobState.TIMEOUT,
    "REVOKED": JobState.CANCELLED,
}


@dataclass(frozen=True)
class Partition:
    """One partition."""

    name: str
    default: bool
    state: str
    """``up`` | ``down`` | ``drain`` | ``inact``"""
    nodes: int
    idle: int
    cpus: int
    """Per node; where nodes differ, of the largest."""
    memory_mb: int
    """Per node; where nodes differ, of the largest."""
    gpus: dict[str, int]
    """GPUs per node by type (an empty type: untyped); where nodes differ, of the largest."""
    max_seconds: int | None
    """Longest time limit; None: unlimited."""


@dataclass(frozen=True)
class HetComponent:
    """One component of a heterogeneous job."""

    offset: int
    job_id: str
    state: JobState
    nodes: str
    """Host list, empty while pending."""


@dataclass(frozen=True)
class JobInfo:
    """One job as Slurm sees it; of a heterogeneous job the first component, which runs the script, speaks for all."""

    job_id: str
    state: JobState
    reason: str = ""
    """Why it waits or ended, in Slurm's word (``Priority``, ``Resources``, ``TimeLimit``); empty: nothing to say."""
    exit_code: int | None = None
    """Exit code of the batch script once ended."""
    start_time: float | None = None
    """Epoch seconds."""
    restarts: int = 0
    components: tuple[HetComponent, ...] = ()


def job_state(text: str) -> JobState:
    """The state Slurm writes as ``text`` (``CANCELLED by 1000``, ``RUNNING,COMPLETING``); a word we do not know is
    UNKNOWN."""
    words = re.findall(r"[A-Z_]+", text.upper())
    return _STATES.get(words[0], JobState.UNKNOWN) if words else JobState.UNKNOWN


def slurm_seconds(text: str) -> int | None:
    """Seconds of a Slurm time (minutes, ``mm:ss``, ``hh:mm:ss``, ``d-hh[:mm[:ss]]``); None for an unlimited one.

    Raises ``ValueError`` when ``text`` is no time.
    """
    if text.strip().lower() in ("infinite", "unlimited"):
        return None
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a Slurm time")
    days, first, second, third = (None if part is None else int(part) for part in match.groups(default=None))
    if days is None and third is None:
        # Without days and without hours the first number is minutes.
        return (first or 0) * 60 + (second or 0)
    return (((days or 0) * 24 + (first or 0)) * 60 + (second or 0)) * 60 + (third or 0)


def gpus_of(gres: str) -> dict[str, int]:
    """GPUs by type in a GRES text such as ``gpu:a800:8(S:0-1),shard:4``."""
    found: dict[str, int] = {}
    for kind, count in re.findall(r"(?:^|,)gpu(?::([^:,(]*[^:,(\d][^:,(]*))?:(\d+)", gres):
        found[kind] = found.get(kind, 0) + int(count)
    return found


def partitions(env: Mapping[str, str]) -> list[Partition]:
    """The partitions this user sees, in the order Slurm lists them; raises `SlurmUnreachable`."""
    return parse_partitions(call(["sinfo", "--noheader", "--Node", "--format=%P|%a|%l|%T|%c|%m|%G"], env))


def parse_partitions(text: str) -> list[Partition]:
    """Partitions from ``sinfo --Node``: one line per node and partition, ``name|state|limit|node
    state|cpus|MB|gres``."""
    found: dict[str, Partition] = {}
    for line in text.splitlines():
        fields = line.strip().split("|")
        if len(fields) != 7:
            continue
        label, state, limit, node_state, cpus, memory, gres = fields
        name = label.removesuffix("*")
        old = found.get(name) or Partition(name, label.endswith("*"), state, 0, 0, 0, 0, {}, slurm_seconds(limit))
        here = gpus_of(gres)
        found[name] = Partition(
            name,
            old.default,
            state,
            old.nodes + 1,
            # A trailing sign (idle~: powered down, idle*: not answering) matters only where the node cannot be used.
            old.idle + (node_state.startswith("idle") and not node_state.endswith("*")),
            # A + marks a lower bound.
            max(old.cpus, int(cpus.removesuffix("+"))),
            max(old.memory_mb, int(memory.removesuffix("+"))),
            {kind: max(old.gpus.get(kind, 0), here.get(kind, 0)) for kind in {**old.gpus, **here}},
            old.max_seconds,
        )
    return list(found.values())


def job(env: Mapping[str, str], job_id: str) -> JobInfo:
    """The job's state; UNKNOWN when Slurm has forgotten it.  Raises `SlurmUnreachable`."""
    try:
        return parse_job(job_id, call(["scontrol", "show", "job", "--oneliner", job_id], env))
    except SlurmRefused:
        pass
    accounts = [
        "sacct",
        "--noheader",
        "--parsable2",
        "--allocations",
        "--jobs",
        job_id,
        "--format=JobID,State,ExitCode,Start",
    ]
    try:
        return parse_accounts(job_id, call(accounts, env))
    except SlurmRefused:
        return JobInfo(job_id, JobState.UNKNOWN)


def parse_job(job_id: str, text: str) -> JobInfo:
    """A job from ``scontrol show job --oneliner``: one line per heterogeneous component, fields ``Key=Value``."""
    records = []
    for line in text.splitlines():
        fields: dict[str, str] = {}
        for key, value in re.findall(r"(?:^|\s)([A-Za-z:/]+)=(\S*)", line):
            fields.setdefault(key, value)
        if "JobState" in fields:
            records.append(fields)
    if not records:
        return JobInfo(job_id, JobState.UNKNOWN)
    records.sort(key=lambda fields: int(fields.get("HetJobOffset", "0")))
    components = tuple(
        HetComponent(
            int(fields["HetJobOffset"]), fields["JobId"], job_state(fields["JobState"]), _text(fields.get("NodeList"))
        )
        for fields in records
        if "HetJobOffset" in fields
    )
    leader = records[0]
    state = job_state(leader["JobState"])
    return JobInfo(
        job_id,
        state,
        _text(leader.get("Reason")),
        _exit_code(leader.get("ExitCode", "")) if state.ended else None,
        _epoch(leader.get("StartTime", "")) if state is not JobState.PENDING else None,
        int(leader.get("Restarts", "0")),
        components,
    )


def parse_accounts(job_id: str, text: str) -> JobInfo:
    """A job from ``sacct``: ``id|state|exit code|start`` per allocation; a heterogeneous job is listed as ``id+0``,
    ``id+1``."""
    rows = [line.split("|") for line in text.splitlines() if line.count("|") == 3]
    own = [row for row in rows if row[0] in (job_id, f"{job_id}+0")]
    if not own:
        return JobInfo(job_id, JobState.UNKNOWN)
    _, state_text, code, start = own[-1]
    state = job_state(state_text)
    return JobInfo(job_id, state, exit_code=_exit_code(code) if state.ended else None, start_time=_epoch(start))


def _text(value: str | None) -> str:
    return "" if value in (None, "(null)", "None") else str(value)


def _exit_code(text: str) -> int | None:
    """``code:signal``; a job ended by a signal counts as 128 + signal, as a shell reports it."""
    code, _, number = text.partition(":")
    if not code.isdigit():
        return None
    return 128 + int(number) if number.isdigit() and int(number) else int(code)


def _epoch(text: str) -> float | None:
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        return None
