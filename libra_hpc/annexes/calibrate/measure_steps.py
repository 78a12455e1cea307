"""Measures the steps of one real engine, for the simulator and the planner, and the host's work in them.

The engine runs in this process (`OfflineEngine`): one `poll` is one step, timed by the wall clock. In shuffled order:

* decode: 1, 2, 4 ... sequences of short, middle and long context, `DECODE_STEPS` steps each;
* prefill: one prompt alone, after no cached context or a longer one;
* both: a prompt that joins a running batch.

A step that did not do exactly what was planned, by the engine's counters, is left out. Steps of engines that share a
machine: ``calibrate engine --run``. What decode steps take beyond the device's time of tables and roofline is the
host's work, a part per step and one per sequence (`Device.host_s`, `Device.host_sequence_s`), for other models too.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from libra_hpc.engine.offline import OfflineEngine
from libra_hpc.engine.settings import EngineConfig, check_config, read_config, under_one_name
from libra_hpc.errors import OperationError, error_text, invalid
from libra_hpc.files import write_result
from libra_hpc.models.devices import Device
from libra_hpc.models.shapes import ModelShape
from libra_hpc.models.step_times.fitting import non_negative
from libra_hpc.models.step_times.lookup import lookup
from libra_hpc.models.step_times.measured import MIN_POINTS, Calibration, StepPoint, load, save
from libra_hpc.process.child_environment import engine_environment
from libra_hpc.protocol.codec import pack_i32
from libra_hpc.protocol.engine import Generate
from libra_hpc.protocol.engine_state import EngineStats

DECODE_STEPS = 24
"""Timed decode steps of one plan."""
REPEATS = 3
"""Measurements of each prefill: a median survives one outlier."""
FILL = 0.9
"""Share of the KV cache a planned batch may use, so that no step preempts."""
CHUNK = 256
"""Fewest prompt tokens of a step while so many wait; bounds the lead of the first sequences of a batch."""
WARM_UP = 3
"""Decode rounds before the first timed step: allocators, caches, captured graphs."""
QUOTED = 2000
"""Characters of a failed engine's log in the error."""
TOKENS = (3, 96)
"""Range of token ids of random prompts: any vocabulary has them."""


class MeasurementPlan(msgspec.Struct, frozen=True):
    """One measurement: ``decodes`` sequences of ``length`` tokens, and ``prefill`` tokens after ``context`` cached
    ones that join them."""

    decodes: int = 0
    length: int = 0
    prefill: int = 0
    context: int = 0


def reach(batch: int, length: int) -> int:
    """Tokens each of ``batch`` sequences generates, so that all decode together for `DECODE_STEPS`."""
    return batch * length // CHUNK + DECODE_STEPS + 2


def plans(max_model_len: int, max_num_seqs: int, kv_tokens: int) -> Iterator[MeasurementPlan]:
    """The plans for an engine of these limits; every plan is within them."""
    room = int(FILL * kv_tokens)
    longest = min(max_model_len, room) * 3 // 4
    contexts = sorted({max(8, longest // divisor) for divisor in (16, 4, 1)})
    batches = [1 << power for power in range(max_num_seqs.bit_length())]
    for batch in batches:
        for context in contexts:
            grown = context + reach(batch, context)
            if grown <= max_model_len and batch * grown <= room:
                yield MeasurementPlan(batch, context)
    chunks = sorted({max(8, longest // divisor) for divisor in (64, 16, 4, 2)})
    for chunk in chunks:
        for context in {0, longest // 2, longest - chunk}:
            yield from [MeasurementPlan(prefill=chunk, context=context)] * REPEATS
        for batch in batches[2::2]:
            if batch < max_num_seqs and batch * (contexts[0] + reach(batch, contexts[0])) + chunk <= room:
                yield from [MeasurementPlan(batch, contexts[0], chunk)] * REPEATS


class Calibrator:
    def __init__(self, engine: OfflineEngine, seed: int = 0) -> None:
        self._engine = engine
        self._random = random.Random(seed)
        self._serial = 0
        self._tp = engine.engine.capacity.tp

    def measure(self, todo: list[MeasurementPlan]) -> list[StepPoint]:
        """The steps of ``todo`` that did what was planned."""
        self._random.shuffle(todo)
        for _ in range(WARM_UP):
            self._run(max(todo, key=lambda plan: plan.decodes))
        return [point for plan in todo for point in self._run(plan)]

    def _run(self, plan: MeasurementPlan) -> list[StepPoint]:
        points: list[StepPoint] = []
        prompt = self._prompt(plan.context + plan.prefill)
        if plan.context:
            self._submit(prompt[: plan.context], 1)
            self._drain()
        start = self._stats()
        for _ in range(plan.decodes):
            self._submit(self._prompt(plan.length), reach(plan.decodes, plan.length))
        while self._prompts_done(start) < plan.decodes * plan.length:
            self._engine.poll()
        kv_tokens = self._stats().generated_tokens - start.generated_tokens + plan.decodes * plan.length
        if plan.prefill:
            cached = self._stats().cached_tokens
            self._submit(prompt, 1)
            step = self._step()
            if step is not None and not step[2]:
                # A step ahead was formed before the prompt came.
                kv_tokens, step = kv_tokens + plan.decodes, self._step()
            cached = self._stats().cached_tokens - cached
            if step is not None and step[1:] == (plan.decodes + 1, plan.prefill + plan.context - cached):
                points.append(self._point(plan.decodes, kv_tokens, step, cached))
        else:
            while self._engine.pending and (step := self._step()) is not None and step[1:] == (plan.decodes, 0):
                points.append(self._point(plan.decodes, kv_tokens, step, 0))
                kv_tokens += plan.decodes
        self._drain()
        return points

    def _point(self, decodes: int, kv_tokens: int, step: tuple[float, int, int], context: int) -> StepPoint:
        return StepPoint(
            tp=self._tp, decodes=decodes, kv_tokens=kv_tokens, prefill=step[2], context=context, seconds=step[0]
        )

    def _step(self) -> tuple[float, int, int] | None:
        """(seconds, tokens generated, prompt tokens computed) of one step; None when there was not exactly one.

        The first of steps ahead ends in the second poll.
        """
        before = after = self._stats()
        started = time.perf_counter()
        while after.steps == before.steps and self._engine.pending:
            self._engine.poll()
            after = self._stats()
        seconds = time.perf_counter() - started
        if after.steps != before.steps + 1:
            return None
        return seconds, after.generated_tokens - before.generated_tokens, after.prefill_tokens - before.prefill_tokens

    def _prompts_done(self, since: EngineStats) -> int:
        now = self._stats()
        return now.prefill_tokens + now.cached_tokens - since.prefill_tokens - since.cached_tokens

    def _drain(self) -> None:
        while self._engine.pending:
            self._engine.poll()

    def _stats(self) -> EngineStats:
        return self._engine.engine.stats()

    def _submit(self, prompt: list[int], max_tokens: int) -> None:
        self._serial += 1
        self._engine.submit(Generate(str(self._serial), pack_i32(prompt), max_tokens))

    def _prompt(self, length: int) -> list[int]:
        return [self._random.randrange(*TOKENS) for _ in range(length)]


def calibrate(config: EngineConfig, device: str, model: str) -> Calibration:
    """Measure an engine in a process with its devices and threads.

    Raises `UserError` for a model that cannot be served, `OperationError` when the engine fails.
    """
    check_config(config)
    environment = engine_environment(
        os.environ, config.run.slurm.device, first=0, count=config.tp, threads=config.run.rollout.threads
    )
    with tempfile.TemporaryDirectory(prefix="libra-calibrate-") as folder:
        settings, out = Path(folder, "config.json"), Path(folder, "steps.json")
        settings.write_bytes(msgspec.json.encode(config))
        command = [sys.executable, "-m", "libra_hpc.annexes.calibrate.measure_steps", settings, device, model, out]
        done = subprocess.run([*map(str, command)], env=environment, capture_output=True, text=True, errors="replace")
        if done.returncode:
            why = done.stderr.strip()[-QUOTED:] or "its log is empty"
            raise OperationError(f"The engine ended with {done.returncode} before it was measured: {why}")
        return load(out)


def earlier(path: Path, device: str, model: str) -> Calibration:
    """The calibration already in a file; empty when there is none.

    Raises `UserError` when it is of another device or model.
    """
    if not path.exists():
        return Calibration(device=device, model=model, kv_capacity={}, points=[])
    found = load(path)
    found.check(device, model, path)
    return found


def merged(old: Calibration, new: Calibration) -> Calibration:
    """``new``, with the TP degrees of ``old`` that it does not have."""
    retained = [point for point in old.points if point.tp not in new.kv_capacity]
    return msgspec.structs.replace(new, kv_capacity=old.kv_capacity | new.kv_capacity, points=retained + new.points)


def main() -> None:
    """Measure an engine here: ``CONFIG DEVICE MODEL OUT``, names as the simulator will be asked for them."""
    settings, device, model, out = sys.argv[1:]
    config = under_one_name(read_config(settings), Path(settings).with_suffix(".folder"))
    with OfflineEngine(config) as engine:
        capacity = engine.engine.capacity
        todo = list(plans(capacity.max_model_len, config.run.rollout.slots, capacity.kv_tokens))
        points = Calibrator(engine, config.seed).measure(todo)
    found = Calibration(device=device, model=model, kv_capacity={capacity.tp: capacity.kv_tokens}, points=points)
    save(found, out)


if __name__ == "__main__":
    main()


FIELDS = ("host_s", "host_sequence_s")
DIGITS = 3
"""Significant digits in the file: steps scatter by some per cent."""


def with_host_cost(found: Device, shape: ModelShape, points: Sequence[StepPoint]) -> Device:
    """``found`` with the host's work that these steps of ``shape`` show.

    Raises `UserError` for fewer than `MIN_POINTS` decode steps, and for steps shorter than the device's own time.
    """
    bare = msgspec.structs.replace(found, host_s=0.0, host_sequence_s=0.0)
    times = {tp: lookup(bare, shape, tp) for tp in {p.tp for p in points}}
    decodes = [p for p in points if p.decodes and not p.prefill]
    if len(decodes) < MIN_POINTS:
        raise invalid("decode steps", len(decodes), "too few to measure the host", f"at least {MIN_POINTS}")
    rest = [p.seconds - times[p.tp].step_s(p.decodes, p.kv_tokens) for p in decodes]
    if sum(rest) <= 0.0:
        raise invalid(
            "--devices",
            found.name,
            "the steps are shorter than this device's own time",
            "the name and figures of the measured device",
        )
    used = [(p, seconds) for p, seconds in zip(decodes, rest, strict=True) if seconds > 0.0]
    # Errors count relative to the whole step, so that the device's errors in long steps do not decide.
    host, sequence = non_negative(
        [(1.0 / seconds, p.decodes / seconds) for p, seconds in used],
        [(seconds / p.seconds) ** 2 for p, seconds in used],
    )
    return msgspec.structs.replace(found, host_s=_rounded(host), host_sequence_s=_rounded(sequence))


def write_host_cost(measured: Device, path: Path) -> None:
    """Write the two figures into the device file ``path``; other lines stay. A device that is new there gets an entry.

    Raises `UserError` for a file that cannot be read or written.
    """
    try:
        text = path.read_text() if path.exists() else ""
        known = {name.lower() for name in tomllib.loads(text)}
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise invalid("--devices", str(path), error_text(error), "a TOML file with one table per device") from error
    values = msgspec.to_builtins(measured)
    lines = text.splitlines()
    if measured.name not in known:
        fields = [
            f"{key} = {json.dumps(value)}" for key, value in values.items() if key != "name" and value not in ("", [])
        ]
        lines += [*([""] if lines else []), f'["{measured.name}"]', *fields]
    else:
        lines = _replaced(lines, measured.name, {key: values[key] for key in FIELDS})
    write_result(path, ("\n".join(lines) + "\n").encode())


def _replaced(lines: Sequence[str], name: str, values: dict[str, float]) -> list[str]:
    """``lines`` with these values in the table ``name``."""
    out: list[str] = []
    inside = False
    for line in lines:
        key = line.partition("=")[0].strip()
        if line.lstrip().startswith("["):
            inside = line.split("#")[0].strip().strip("[]").strip("\"' ").lower() == name
        elif inside and key in values:
            continue
        out.append(line)
        if inside and line.lstrip().startswith("["):
            out += [f"{field} = {value}" for field, value in values.items()]
    return out


def _rounded(seconds: float) -> float:
    return float(f"{seconds:.{DIGITS}g}")
