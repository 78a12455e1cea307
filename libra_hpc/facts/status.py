"""The status snapshot: rank 0 writes it to `status.json` about once a second, `libra-hpc status` shows it.

Units: seconds, tokens, tokens per second; times ``*_at`` are epoch seconds. Failed attempts are counted by kind.

Accuracy of the planner's step times, its estimates against the measured steps:

- eta + 1 batches in flight complete in bursts -> means over `BLOCK` steps in a row are compared.
- A step without an estimate, for example right after a move -> it does not count.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Mapping, Sequence
from statistics import fmean, median
from typing import Any, Literal, get_args

import msgspec

from libra_hpc.errors import UserError, error_text
from libra_hpc.files import write_atomic
from libra_hpc.protocol.agents import LenderReport
from libra_hpc.protocol.plan import PlanDecision

from . import series
from .columns import Value, as_json, declared
from .rundir import RunDir, parse

BLOCK = 8
"""Steps that are compared as one.  With 4 the bursts show; with 16 the status is about the past."""


class StageEstimate(msgspec.Struct, frozen=True):
    """Expected seconds per global batch at the present split."""

    train_s: float
    rollout_s: float
    batch_s: float
    """The slower stage, or the sum of both where they take turns."""


class StepAccuracy(msgspec.Struct, frozen=True):
    """Expected and measured seconds of the steps that had an estimate."""

    steps: int
    expected_s: float
    """Mean over ``steps`` of the last estimate before each commit."""
    measured_s: float
    """Mean over ``steps`` of the time from commit to commit."""
    error: float
    """Median over blocks of `BLOCK` steps of |expected / measured - 1|."""


def step_accuracy(steps: Sequence[series.Record]) -> StepAccuracy | None:
    """Accuracy over lines of ``metrics.jsonl`` in order of steps; None without any estimate."""
    pairs = [(series.number(row, "expected_s"), series.number(row, "step_s")) for row in steps]
    known = [(expected, measured) for expected, measured in pairs if math.isfinite(expected) and measured > 0.0]
    if not known:
        return None
    blocks = [known[max(0, end - BLOCK) : end] for end in range(len(known), min(BLOCK, len(known)) - 1, -BLOCK)]
    errors = [abs(sum(e for e, _ in block) / sum(m for _, m in block) - 1.0) for block in blocks]
    return StepAccuracy(
        steps=len(known),
        expected_s=fmean(e for e, _ in known),
        measured_s=fmean(m for _, m in known),
        error=median(errors),
    )


def estimate_line(estimate: StageEstimate) -> str:
    """The present estimate as a line for a screen."""
    stages = f"train {estimate.train_s:.2f} s, rollout {estimate.rollout_s:.2f} s"
    return f"planner expects {estimate.batch_s:.2f} s a step ({stages})"


def accuracy_line(accuracy: StepAccuracy) -> str:
    """Expected against measured seconds as a line for a screen."""
    error = f"error {accuracy.error:.0%}" + (f" (median of blocks of {BLOCK})" if accuracy.steps > BLOCK else "")
    steps = "1 step" if accuracy.steps == 1 else f"{accuracy.steps} steps"
    return (
        f"planner expected {accuracy.expected_s:.2f} s, measured {accuracy.measured_s:.2f} s (mean of {steps}), {error}"
    )


ERROR_CHARS = 60
"""Characters of the top error: with its label it fits in two rows of 80 columns."""


class FailedAttempts(msgspec.Struct, frozen=True):
    """Failed attempts of one kind."""

    kind: str
    """``raised`` | ``environment`` | ``timeout`` | ``reward`` | ``answer`` | ``engine`` | ``logprobs``"""
    count: int
    error: str
    """The last one."""


def failed_line(failures: Sequence[FailedAttempts]) -> str:
    """All kinds in one line, with the error of the most frequent one."""
    parts = [f"{found.count:,} {found.kind}" for found in failures]
    if parts and failures[0].error:
        error = " ".join(failures[0].error.split())
        parts[0] += f" ({error if len(error) <= ERROR_CHARS else f'{error[:ERROR_CHARS]}..'})"
    return ", ".join(parts)


def failed_in(log: Sequence[Mapping[str, Any]], status: Mapping[str, Any]) -> list[FailedAttempts]:
    """Failed attempts of a whole run, the most frequent kind first, from its events and its last status.

    An event counts for itself and for the failures before it without an event (``unsaid``).  The status has exact
    counts since the last start.
    """
    counts: dict[str, int] = {}
    errors: dict[str, str] = {}
    for event in log:
        if event["kind"] == "trajectory_failed":
            kind = str(event.get("failure", ""))
            counts[kind] = counts.get(kind, 0) + 1 + _number(event.get("unsaid"))
            errors[kind] = str(event.get("error", ""))
    last = status.get("failures")
    for entry in last if isinstance(last, list) else ():
        if isinstance(entry, dict) and (kind := str(entry.get("kind", ""))):
            counts[kind] = max(counts.get(kind, 0), _number(entry.get("count")))
            errors[kind] = str(entry.get("error", ""))
    return sorted(
        (FailedAttempts(kind, count, errors[kind]) for kind, count in counts.items()),
        key=lambda found: (-found.count, found.kind),
    )


def _number(value: object) -> int:
    return value if isinstance(value, int) else 0


EndState = Literal["completed", "failed", "cancelled", "time_limit", "preempted", "paused"]
FINAL: tuple[EndState, ...] = get_args(EndState)
"""States of a run that has ended."""
STALE_S = 10.0
"""Age of a status from which it is shown as stale: it is replaced about every second."""
PAUSE_WORDS = {"served": "users", "closed": "its owner", "silent": "silent server", "long": "step too long"}
"""By the gate's reason, short: a line has room for two."""
LENDER_HEADS = ("lender", "kind", "now", "mean", "turns", "tokens", "paused")
LENDER_NUMBERS = LENDER_HEADS[2:6]


class NodeStatus(msgspec.Struct, frozen=True):
    """One node (= one MPI rank, one agent)."""

    rank: int
    host: str
    component: str
    """``planner`` | ``train`` | ``hybrid`` | ``rollout`` | ``env`` | ``guest``"""
    role: str
    """``planner`` | ``train`` | ``rollout`` | ``env`` | ``to_train`` | ``to_rollout`` | ``starting`` | ``lost`` |
    ``ended``; of a guest ``to_guest`` | ``guest`` | ``leaving`` | ``standby``"""
    engines: dict[str, str]
    """Engine id -> state (``starting`` | ``ready`` | ``standby`` | ``lost``)."""
    version: int
    """Lowest weight version of its ready engines; -1 without one."""
    heartbeat_age_s: float


class StageStatus(msgspec.Struct, frozen=True):
    """One stage's speed over the last steps."""

    tokens_per_s: float
    """Generated tokens; those trained are without their contexts."""
    step_s: float
    """Seconds of this stage's own work per global batch."""
    busy: float
    """Share of the stage's node time spent working, 0..1."""
    nodes: int


class BucketStatus(msgspec.Struct, frozen=True):
    """Engines of one TP degree."""

    tp: int
    engines: int
    inflight: int
    trajectories: int
    kv_use: float


class DecisionStatus(PlanDecision, frozen=True, kw_only=True):
    """The planner's last decision."""

    at: float
    looks: int = 1
    """Evaluations in a row with this decision and reason."""


def because(reason: str, action: str) -> str:
    """The reason of a decision without the name of its action, which a screen shows beside it."""
    return reason.removeprefix(f"{action}: ")


class Status(msgspec.Struct, frozen=True):
    """All facts of the live screen."""

    run: str
    path: str
    job_id: str
    attempt: int
    state: str
    """``starting`` | ``running`` | ``restarting``, or one of `FINAL`"""
    started_at: float
    updated_at: float
    step: int
    steps: int
    version: int
    """Newest weights that every live engine had."""
    train: StageStatus
    rollout: StageStatus
    numbers: dict[str, Value]
    """By the names in `columns`; in the file they stand beside the other keys."""
    buckets: list[BucketStatus]
    nodes: list[NodeStatus]
    decision: DecisionStatus | None
    message: str
    estimate: StageEstimate | None = None
    """The planner's estimate of the present split."""
    accuracy: StepAccuracy | None = None
    """Accuracy of the planner's estimates for the last steps."""
    repartitioned: str = ""
    """The last repartition: after which step, and the layout."""
    notices: list[str] = []
    """Faults of the last minutes as sentences, newest first."""
    failures: list[FailedAttempts] = []
    """Failed attempts of trajectories since the ranks started, the most frequent kind first."""
    slow: list[str] = []
    """What holds up the run, as sentences: environments without seats, engines that take longer per step than others of
    their class, slowest first."""
    paused: str = ""
    """Why no prompt is admitted; empty while prompts are admitted."""
    lenders: list[LenderReport] = []
    """Lenders and guests since the ranks started."""
    speedup: float = 1.0
    """How many times faster than the clock a dry run passes; the file has seconds and rates of the clock."""
    spot_nodes: int = -1
    """Nodes of ``borrow.spot`` that the planner wants; -1: it has not decided since the ranks started."""
    takes: list[str] = []
    """Lenders from which the run would borrow now, or does."""
    orders: str = ""
    """How Layouts reach the nodes: by MPI, by stream, or which nodes by stream."""


_fields, _status = msgspec.json.Decoder(dict[str, Any]), msgspec.json.Decoder(Status)
"""The second makes the type whole, for `msgspec.convert`."""


def renewed_status(run: RunDir, attempt: int, **changes: str) -> bytes:
    """The last status with changes, true now, while no coordinator writes it; empty where it cannot be composed."""
    found, now = run.read_json(run.status), time.time()
    if found.get("attempt") != attempt:
        try:
            steps, job = int(run.resolved()["run"]["steps"]), str(run.read_json(run.job).get("job_id", ""))
        except (UserError, KeyError):
            return b""
        found = blank_status(run, attempt, job_id=job, step=int(found.get("step", 0)), steps=steps, now=now)
    return msgspec.json.encode({**found, **changes, "updated_at": now}) + b"\n"


def blank_status(run: RunDir, attempt: int, *, job_id: str, step: int, steps: int, now: float) -> dict[str, Any]:
    """The fields of a status before rank 0 wrote one."""
    stage = StageStatus(0.0, 0.0, 0.0, 0)
    numbers: dict[str, Value] = {one.name: 0 for one in declared("running")}
    blank = Status(
        run.name,
        str(run.path),
        job_id,
        attempt,
        "starting",
        now,
        now,
        step,
        steps,
        step,
        stage,
        stage,
        numbers,
        [],
        [],
        None,
        "",
    )
    return parse(encode_status(blank))


def encode_status(status: Status) -> bytes:
    """JSON bytes of a snapshot."""
    return msgspec.json.encode(as_json(status)) + b"\n"


def decode_status(data: bytes) -> Status:
    """Parse a snapshot; raises ``msgspec.DecodeError`` for anything else."""
    try:
        fields = _fields.decode(data)
        numbers = {one.name: fields[one.name] for one in declared("running") if one.name in fields}
        return msgspec.convert(fields | {"numbers": numbers}, Status)
    except (UnicodeDecodeError, RecursionError) as error:
        raise msgspec.DecodeError(str(error)) from None


def read_status(run: RunDir, attempt: int) -> Status | None:
    """The last snapshot of that attempt or a later one; None without one."""
    try:
        status = decode_status(run.status.read_bytes())
    except (OSError, msgspec.DecodeError):
        return None
    return status if status.attempt >= attempt else None


def write_fault(run: RunDir) -> str:
    """Why the status cannot be replaced now, as on a full disk or beyond a quota; empty where that is not known.

    It is tried: a run that cannot write its status cannot write why, either.  Somebody else's run tells nothing.
    """
    probe = run.path / ".status-probe"
    try:
        write_atomic(probe, run.status.read_bytes())
        probe.unlink(missing_ok=True)
    except OSError as error:
        return "" if isinstance(error, PermissionError) else f"{run.path} takes no writes: {error_text(error)}"
    return ""


def in_simulated_time(status: Status) -> Status:
    """The status as screens show it: seconds and rates of a dry run in simulated time, ages by the clock."""
    real = status.speedup == 1.0
    return status if real else msgspec.convert(series.simulated(msgspec.to_builtins(status), status.speedup), Status)


def dry_run(speedup: float) -> str:
    """The part of a title that marks a dry run; empty for a real one."""
    return f"  dry run, x{speedup:g}" if speedup != 1.0 else ""


def as_ended(status: Status) -> Status:
    """The last snapshot of a run: a rank 0 that was killed left its nodes as they were."""
    nodes = [
        node
        if node.role == "lost"
        else msgspec.structs.replace(node, role="ended", engines={}, version=-1, heartbeat_age_s=0.0)
        for node in status.nodes
    ]
    return msgspec.structs.replace(status, nodes=nodes, lenders=gone(status.lenders))


def gone(lenders: Sequence[LenderReport]) -> list[LenderReport]:
    return [msgspec.structs.replace(one, engines=0, share=0.0, now="") for one in lenders]


def lenders_of(run: RunDir) -> list[LenderReport]:
    """Return the lenders in a run's last status; none where it has none."""
    with contextlib.suppress(msgspec.ValidationError):
        return msgspec.convert(run.read_json(run.status).get("lenders", []), list[LenderReport])
    return []


def lender_rows(lenders: Sequence[LenderReport]) -> list[list[str]]:
    """Cells below `LENDER_HEADS`, the greatest giver first."""
    found = sorted(lenders, key=lambda one: -one.tokens)
    return [
        [
            one.name,
            one.kind,
            f"{one.share:.0%}" if one.engines else "gone",
            f"{one.mean_share:.0%}",
            f"{one.turns:,}",
            short_count(one.tokens),
            _paused(one),
        ]
        for one in found
    ]


def _paused(one: LenderReport) -> str:
    """Why and for how long, the longest first; the present reason has a mark."""
    ordered = sorted(one.paused.items(), key=lambda item: -item[1])
    words = [
        f"{PAUSE_WORDS.get(why, why)} {series.short_duration(seconds)}{' (now)' * (why == one.now)}"
        for why, seconds in ordered
    ]
    return ", ".join(words) or "-"


def short_count(tokens: int) -> str:
    """Tokens as ``9,310``, ``310k`` or ``12M``."""
    return f"{tokens:,}" if tokens < 10_000 else f"{tokens / 1e3:,.0f}k" if tokens < 1e7 else f"{tokens / 1e6:,.0f}M"
