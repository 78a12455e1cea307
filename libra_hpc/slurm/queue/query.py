"""Query Slurm: the partitions of the cluster, and the state of a job.

- Text output rather than ``--json``: its fields are the same in all releases since 17.11.  The JSON documents changed
  with nearly every release, and some builds of Slurm have none.
- A job -> ``scontrol show job``, which has all components, and finished jobs for ``MinJobAge`` seconds.
- ``scontrol`` does not have it any more -> ``sacct``, where the site has accounting.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from enum import Enum
from pathlib import Path

from libra_hpc.errors import OperationError
from libra_hpc.facts.rundir import RunDir

from .command import SlurmRefused, SlurmSilent, call
from .job_record import JobRecord, mark_in

JOB_ID = re.compile(r"^\s*(?:Submitted batch job )?(\d+)(?:(?:;| on cluster )(\S+))?\s*$", re.MULTILINE)
"""What ``--parsable`` prints: ``id`` or ``id;cluster``; and what sbatch prints where a wrapper drops that option."""


class JobState(Enum):
    """The states of a job that callers distinguish."""

    PENDING = "PENDING"
    RUNNING = "RUNNING"
    COMPLETED = "COMPLETED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"
    TIMEOUT = "TIMEOUT"
    PREEMPTED = "PREEMPTED"
    NODE_FAIL = "NODE_FAIL"
    UNKNOWN = "UNKNOWN"
    """Slurm has no record of the job; how it ended is open."""

    @property
    def ended(self) -> bool:
        """Whether the job has ended and will not start again."""
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


SLICE = re.compile(r"\d+g\.\d+gb")
"""In the type of a part of a GPU, as MIG makes them."""


@dataclass(frozen=True)
class Partition:
    """A partition and its nodes of one kind; one of mixed nodes is several of these."""

    name: str
    default: bool
    state: str
    """``up`` | ``down`` | ``drain`` | ``inact``"""
    nodes: int
    idle: int
    cpus: int
    """Per node; 0: not known."""
    memory_mb: int
    """Per node; 0: not known."""
    gpus: dict[str, int]
    """GPUs and slices of GPUs per node by type; an empty type: untyped."""
    max_seconds: int | None
    """Longest time limit; None: unlimited, or not known."""
    out: int = 0
    """Nodes that are drained or down at the moment."""

    @property
    def whole_gpus(self) -> dict[str, int]:
        """GPUs that are no slices; on nodes with slices alone these."""
        return {kind: count for kind, count in self.gpus.items() if not SLICE.search(kind)} or self.gpus


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
    """One job as Slurm reports it; a heterogeneous job has the state of its first component, which runs the script."""

    job_id: str
    state: JobState
    reason: str = ""
    """Why it waits or ended, in Slurm's word (``Priority``, ``Resources``, ``TimeLimit``); empty: none."""
    exit_code: int | None = None
    """Exit code of the batch script once ended."""
    start_time: float | None = None
    """Epoch seconds."""
    end_time: float | None = None
    """Epoch seconds, once ended."""
    restarts: int = 0
    script: str = ""
    """Path of the batch script; empty: not known."""
    components: tuple[HetComponent, ...] = ()
    script_lost: bool = False
    """It runs on without the node of its script."""
    name: str = ""
    mark: str = ""
    """See `JobRecord.mark`; empty: its comment has none."""

    def of(self, run: RunDir, record: JobRecord) -> bool:
        """Whether it is the job of this record: ids of two clusters may be equal, and begin again after a reset."""
        same = record.name in ("", self.name or record.name)
        if self.mark:
            return same and self.mark == record.mark
        # A site has put a comment of its own there, or it was queued before there were marks; accounts have no script.
        return same and (Path(self.script).parent.name == run.name if self.script else self.state.ended)


def job_state(text: str) -> JobState:
    """The state in Slurm's text (``CANCELLED by 1000``, ``RUNNING,COMPLETING``); any other word is UNKNOWN."""
    words = re.findall(r"[A-Z_]+", text.upper())
    return _STATES.get(words[0], JobState.UNKNOWN) if words else JobState.UNKNOWN


def slurm_seconds(text: str) -> int | None:
    """Seconds of a Slurm time (minutes, ``mm:ss``, ``hh:mm:ss``, ``d-hh[:mm[:ss]]``); None: unlimited.

    Raises ``ValueError`` for any other text.
    """
    if text.strip().lower() in ("infinite", "unlimited"):
        return None
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text.strip(), re.ASCII)
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


def partitions(env: Mapping[str, str], *options: str) -> list[Partition]:
    """The partitions this user sees, with ``--all`` also hidden ones, in Slurm's order; raises `SlurmUnreachable`."""
    return parse_partitions(call(["sinfo", *options, "--noheader", "--Node", "--format=%P|%a|%l|%T|%c|%m|%G"], env))


def parse_partitions(text: str) -> list[Partition]:
    """Partitions from ``sinfo --Node`` with a line ``name|state|limit|node state|cpus|MB|gres`` per node."""
    found: dict[tuple[object, ...], Partition] = {}
    for line in text.splitlines():
        fields = line.strip().split("|")
        if len(fields) != 7:
            continue
        label, state, limit, node_state, cpus, memory, gres = fields
        try:
            max_seconds = slurm_seconds(limit)
        except ValueError:
            max_seconds = None
        name, gpus = label.removesuffix("*"), gpus_of(gres)
        kind = (name, cpus, memory, *sorted(gpus.items()))
        old = found.get(kind) or Partition(
            name=name,
            default=label.endswith("*"),
            state=state,
            nodes=0,
            idle=0,
            cpus=_number(cpus),
            memory_mb=_number(memory),
            gpus=gpus,
            max_seconds=max_seconds,
        )
        found[kind] = replace(
            old,
            nodes=old.nodes + 1,
            # A trailing sign (idle~: powered down, idle*: not answering) matters only where the node cannot be used.
            idle=old.idle + (node_state.startswith("idle") and not node_state.endswith("*")),
            out=old.out + node_state.startswith(("drain", "down", "fail")),
        )
    return list(found.values())


def _number(text: str) -> int:
    """A number of Slurm's, of which a + marks a lower bound; 0 where it cannot be read."""
    digits = text.removesuffix("+")
    return int(digits) if digits.isdecimal() else 0


def on_cluster(cluster: str) -> list[str]:
    """Option of Slurm's commands that asks another cluster; empty: the one that answers by itself."""
    return ["-M", cluster] if cluster else []


def cluster_in(options: Iterable[str]) -> str:
    """The cluster, or list of clusters, that sbatch options name; empty: none."""
    named = [found[1] for option in options if (found := re.match(r"(?:--clu\w*=|-M=?)(.+)", option))]
    return named[-1] if named else ""


def answered_job(answer: str) -> tuple[str, str]:
    """The job id in what sbatch printed, and the cluster where it was asked for one; empty where it names none."""
    return [("", ""), *JOB_ID.findall(answer)][-1]


def settings(env: Mapping[str, str]) -> dict[str, str]:
    """The controller's configuration by key; raises `SlurmUnreachable`."""
    lines = call(["scontrol", "show", "config"], env).splitlines()
    return {key.strip(): value.strip() for key, _, value in (line.partition("=") for line in lines)}


def cluster_name(env: Mapping[str, str]) -> str:
    """Name of the cluster that answers; raises `SlurmUnreachable`."""
    return settings(env).get("ClusterName", "")


def own_jobs(env: Mapping[str, str], cluster: str = "") -> dict[str, JobInfo]:
    """This user's jobs on a cluster by id, those that Slurm still remembers among them, in one question; raises
    `SlurmUnreachable`."""
    # Also those in hidden partitions.
    options = ("--me", "--all", "--noheader", "--states=all", "--format=%i|%T|%r|%S|%e|%j|%k|%o")
    return parse_queue(call(["squeue", *on_cluster(cluster), *options], env))


def parse_queue(text: str) -> dict[str, JobInfo]:
    """Jobs from lines ``id|state|reason|start|end|name|comment|script``; the first component of a heterogeneous one
    (``id+0``, ``id+1``) speaks."""
    found, parts = dict[str, JobInfo](), dict[str, list[HetComponent]]()
    # Not at all that Unicode has for the end of a line: a comment is any text.
    for line in text.split("\n"):
        fields = line.strip().split("|", 6)
        if len(fields) != 7:
            continue
        part, state_text, reason, start, end, name, rest = fields
        # The mark ends the user's comment, which may have bars, and so may the script.
        mark = mark_in(rest)
        script = rest[rest.find(mark) :].partition("|")[2]
        job_id, plus, component = part.partition("+")
        if component.isdecimal():
            parts.setdefault(job_id, []).append(HetComponent(int(component), part, job_state(state_text), ""))
        if not plus or component == "0":
            state = job_state(state_text)
            found[job_id] = JobInfo(
                job_id,
                state,
                _text(reason),
                # Of a waiting job Slurm guesses both.
                start_time=_epoch(start) if state is not JobState.PENDING else None,
                end_time=_epoch(end) if state.ended else None,
                script=_text(script),
                name=name,
                mark=mark,
            )
    return {job_id: replace(info, components=tuple(parts.get(job_id, ()))) for job_id, info in found.items()}


def job(env: Mapping[str, str], job_id: str, cluster: str = "") -> JobInfo:
    """The job's state; UNKNOWN when Slurm has no record of it.  Raises `SlurmUnreachable`."""
    try:
        return parse_job(job_id, call(["scontrol", *on_cluster(cluster), "show", "job", "--oneliner", job_id], env))
    except SlurmRefused:
        return accounts(env, [job_id], cluster)[job_id]


def accounts(env: Mapping[str, str], job_ids: Iterable[str], cluster: str = "") -> dict[str, JobInfo]:
    """Jobs of a cluster by id from the accounting, in one question; UNKNOWN where it has no record, or there is none.

    Raises `SlurmUnreachable`.
    """
    ids = list(job_ids)
    command = ["sacct", *on_cluster(cluster), "--noheader", "--parsable2", "--allocations", "--jobs", ",".join(ids)]
    try:
        text = call([*command, "--format=JobID,State,ExitCode,Start,JobName"], env)
    except SlurmSilent:
        raise
    except OperationError:
        text = ""
    return {job_id: parse_accounts(job_id, text) for job_id in ids}


def job_script(env: Mapping[str, str], job_id: str) -> Path | None:
    """The batch script of a job that the controller or the accounting still knows; raises `SlurmUnreachable`."""
    try:
        known = parse_job(job_id, call(["scontrol", "show", "job", "--oneliner", job_id], env)).script
        return Path(known) if known else None
    except SlurmRefused:
        command = ["sacct", "--noheader", "--parsable2", "--allocations", "--jobs", job_id, "--format=SubmitLine"]
    try:
        # The last argument of our own sbatch.
        submitted = "".join(call(command, env).splitlines()[:1]).partition(" --parsable ")[2]
    except SlurmRefused:
        return None
    return Path(submitted) if submitted else None


def parse_job(job_id: str, text: str) -> JobInfo:
    """A job from ``scontrol show job --oneliner``: a line of ``Key=Value`` fields per component."""
    records = []
    for line in text.split("\n"):
        fields: dict[str, str] = {}
        for key, value in re.findall(r"(?:^|\s)([A-Za-z:/]+)=(\S*)", line):
            fields.setdefault(key, value)
        if script := re.search(r"\sCommand=(.*?)(?=\s[A-Za-z:/]+=|$)", line):
            fields["Command"] = script[1]
        fields["Comment"] = mark_in(line.partition(" Comment=")[2])
        if "JobState" in fields:
            records.append(fields)
    if not records:
        return JobInfo(job_id, JobState.UNKNOWN)
    records.sort(key=lambda fields: _number(fields.get("HetJobOffset", "")))
    components = tuple(
        HetComponent(
            int(fields["HetJobOffset"]),
            fields.get("JobId", ""),
            job_state(fields["JobState"]),
            _text(fields.get("NodeList")),
        )
        for fields in records
        if fields.get("HetJobOffset", "").isdecimal()
    )
    leader = records[0]
    state = job_state(leader["JobState"])
    return JobInfo(
        job_id=job_id,
        state=state,
        reason=_text(leader.get("Reason")),
        exit_code=_exit_code(leader.get("ExitCode", "")) if state.ended else None,
        start_time=_epoch(leader.get("StartTime", "")) if state is not JobState.PENDING else None,
        end_time=_epoch(leader.get("EndTime", "")) if state.ended else None,
        restarts=_number(leader.get("Restarts", "")),
        script=_text(leader.get("Command")),
        name=leader.get("JobName", ""),
        mark=leader.get("Comment", ""),
        components=components,
        script_lost=state is JobState.RUNNING and _left(leader.get("BatchHost", ""), leader.get("NodeList", "")),
    )


def _left(node: str, nodes: str) -> bool:
    """Whether Slurm has taken ``node`` from a job that now has ``nodes``, as in ``a800-[0-2,5],b7``."""
    names = set[str]()
    for prefix, ranges, suffix in re.findall(r"([^,\[]+)(?:\[([^\]]*)\])?([^,\[]*)", nodes):
        for low, high in re.findall(r"(\d+)(?:-(\d+))?", ranges):
            names.update(f"{prefix}{n:0{len(low)}}{suffix}" for n in range(int(low), int(high or low) + 1))
        names.update([] if ranges else [f"{prefix}{suffix}"])
    return bool(node and names) and node not in names


def parse_accounts(job_id: str, text: str) -> JobInfo:
    """A job from ``sacct``: a line ``id|state|exit code|start|name`` per component, with ids ``id+0``, ``id+1``."""
    rows = [line.split("|", 4) for line in text.splitlines() if line.count("|") > 3]
    own = [row for row in rows if row[0] in (job_id, f"{job_id}+0")]
    if not own:
        return JobInfo(job_id, JobState.UNKNOWN)
    _, state_text, code, start, name = own[-1]
    state = job_state(state_text)
    exit_code = _exit_code(code) if state.ended else None
    return JobInfo(job_id, state, exit_code=exit_code, start_time=_epoch(start), name=name)


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
