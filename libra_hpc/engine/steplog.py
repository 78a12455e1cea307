"""The batches of a live engine, and a log of its single steps, which a calibration is fitted to.

JSON lines: first a `StepLogHeader`, then one step each, ``[decodes, kv_tokens, prefill, context, seconds]`` as in
`models.step_times.measured.StepPoint`. Prompt chunks of one step are merged as in the simulator: one chunk after a
context that gives the same number of attended pairs. ``seconds``: of the whole pass of the engine's loop.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from libra_hpc.errors import UserError, invalid
from libra_hpc.facts.rundir import RunDir
from libra_hpc.models.step_times.measured import MAX_POINTS, Calibration, StepPoint
from libra_hpc.policies.serving.step_cost import StepWork

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler

FLUSH = 256
"""Lines of some 40 bytes that are buffered, so that a step costs no system call of its own."""
FORMAT = "libra-hpc steps 1"
PATTERN = "logs/attempt-*/*.steps.jsonl"


class StepLogHeader(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The engine behind a log."""

    tp: int
    kv_tokens: int
    """Tokens of its KV cache."""
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    """Most tokens of a step, decoded and prefilled, as chosen by vLLM."""
    format: str = FORMAT


_header, _step = msgspec.json.Decoder(StepLogHeader), msgspec.json.Decoder(tuple[int, int, int, int, float])


class BatchWatch:
    """Sees each batch that a vLLM scheduler forms, and when it has ended."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._last = StepWork()
        self._formed: dict[int, StepWork] = {}
        self._scheduler, self._schedule, self._update = scheduler, scheduler.schedule, scheduler.update_from_output
        scheduler.schedule = self._watched  # type: ignore[method-assign]
        scheduler.update_from_output = self._ended  # type: ignore[method-assign,assignment]

    def _watched(self, *args: Any, **kwargs: Any) -> Any:
        output = self._schedule(*args, **kwargs)
        decodes = kv_tokens = prefill = pairs = 0
        for name, count in output.num_scheduled_tokens.items():
            request = self._scheduler.requests[name]
            # The scheduler has counted the tokens of this step as computed already.
            before = request.num_computed_tokens - count
            # Of steps that are scheduled ahead: sampled in the step before, and not known yet.
            ahead = max(0, request.num_output_placeholders - 1)
            if count == 1 and request.num_output_tokens + ahead and before + 1 == request.num_tokens + ahead:
                decodes += 1
                kv_tokens += before + 1
            else:
                prefill += count
                pairs += count * (2 * before + count)
        context = max(0, round((pairs / prefill - prefill) / 2)) if prefill else 0
        self._formed[id(output)] = StepWork(decodes, kv_tokens, prefill, context)
        return output

    def _ended(self, batch: SchedulerOutput, *args: Any) -> Any:
        self._last = self._formed.pop(id(batch), StepWork())
        return self._update(batch, *args)

    @property
    def in_flight(self) -> bool:
        """Whether a batch is formed that has not ended."""
        return bool(self._formed)

    def take(self) -> StepWork:
        """The batch that ended since the last call; empty if none did."""
        last, self._last = self._last, StepWork()
        return last

    def upcoming(self) -> StepWork:
        """What the running requests and the first waiting one have to compute; the longest context of a prompt."""
        decodes = kv_tokens = prefill = context = 0
        for request in self._scheduler.running:
            left = request.num_tokens - request.num_computed_tokens
            if left > 1:
                prefill, context = prefill + left, max(context, request.num_computed_tokens)
            else:
                decodes, kv_tokens = decodes + 1, kv_tokens + request.num_tokens
        for queue in (self._scheduler.waiting, self._scheduler.kv_holding_waiting):
            if queue:
                # How much of it is cached is found when it is scheduled.
                tokens = queue.peek_request().num_tokens
                prefill, context = prefill + tokens, max(context, tokens)
        return StepWork(decodes, kv_tokens, prefill, context)


class StepLog:
    """Records each batch of an engine with the seconds of its step."""

    def __init__(self, path: str, header: StepLogHeader, batches: BatchWatch) -> None:
        self._file = Path(path).open("wb")  # noqa: SIM115
        self._file.write(msgspec.json.encode(header) + b"\n")
        self._file.flush()
        self._lines: list[bytes] = []
        self._encode = msgspec.json.encode
        self._batches = batches
        self._seconds = 0.0

    def ended(self, seconds: float) -> None:
        """Log the batch that ended in a pass of so many ``seconds``; those of a pass that only formed one count too."""
        step, self._seconds = self._batches.take(), self._seconds + seconds
        if step.decodes or step.prefill:
            self._lines.append(self._encode((*step, round(self._seconds, 7))))
            if len(self._lines) >= FLUSH:
                self.flush()
        elif self._batches.in_flight:
            return
        self._seconds = 0.0

    def skip(self) -> None:
        """Leave out the step that ended last."""
        self._batches.take()
        self._seconds = 0.0

    def flush(self) -> None:
        if self._lines:
            self._file.write(b"\n".join(self._lines) + b"\n")
            self._lines.clear()
        self._file.flush()

    def close(self) -> None:
        self.flush()
        self._file.close()


def read_steps(path: str | Path, skip: int = 0) -> tuple[StepLogHeader, list[StepPoint]]:
    """Read a log, without its first ``skip`` steps; a torn last line (the engine was killed) is left out.

    Raises `UserError` for a file that is no step log.
    """
    try:
        lines = Path(path).read_bytes().split(b"\n")
        header = _header.decode(lines[0])
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise invalid("step log", str(path), str(error), f"a file of format {FORMAT!r}") from error
    if header.format != FORMAT:
        raise invalid("step log", str(path), f"its format is {header.format!r}", f"a file of format {FORMAT!r}")
    points = []
    # The part after the last newline is empty or torn.
    for number, line in enumerate(lines[1 + skip : -1], 2 + skip):
        try:
            decodes, kv_tokens, prefill, context, seconds = _step.decode(line)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise invalid("step log", f"{path}, line {number}", str(error), "a step") from error
        points.append(
            StepPoint(
                tp=header.tp, decodes=decodes, kv_tokens=kv_tokens, prefill=prefill, context=context, seconds=seconds
            )
        )
    return header, points


def recorded(run: RunDir, device: str) -> Calibration:
    """A calibration from the steps of ``run``, at most `MAX_POINTS` of each TP degree, spread evenly.

    Raises `UserError` when there are none, or a log cannot be read.
    """
    points: dict[int, list[StepPoint]] = {}
    capacity: dict[int, int] = {}
    for path in sorted(run.path.glob(PATTERN)):
        header, steps = read_steps(path)
        points.setdefault(header.tp, []).extend(steps)
        # The smallest cache: every engine has at least that.
        capacity[header.tp] = min(header.kv_tokens, capacity.get(header.tp, header.kv_tokens))
    if not any(points.values()):
        raise UserError(
            f"{run.path} has no recorded engine steps; set rollout.record_steps = true in its run file before it"
            " starts."
        )
    model = Path(str(run.read_json(run.readable_config).get("model", {}).get("path", ""))).name
    thinned = [point for steps in points.values() for point in steps[:: -(-len(steps) // MAX_POINTS)]]
    return Calibration(device=device, model=model, kv_capacity=capacity, points=thinned)
