"""Measures the steps of one real engine, for the simulator and the planner.

The engine runs in this process (`OfflineEngine`): one `poll` is one step, timed by the wall clock. In shuffled order:

* decode: 1, 2, 4 ... sequences of short, middle and long context, `DECODE_STEPS` steps each;
* prefill: one prompt alone, after no cached context or a longer one;
* both: a prompt that joins a running batch.

A step that did not do exactly what was planned, by the engine's counters, is left out. Steps of engines that share a
machine: ``calibrate engine --run``.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from libra_hpc.engine.offline import OfflineEngine
from libra_hpc.engine.settings import EngineConfig, check_config, read_config
from libra_hpc.errors import OperationError
from libra_hpc.models.step_times.measured import Calibration, StepPoint, load, save
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
    config = read_config(settings)
    with OfflineEngine(config) as engine:
        capacity = engine.engine.capacity
        todo = list(plans(capacity.max_model_len, config.run.rollout.slots, capacity.kv_tokens))
        points = Calibrator(engine, config.seed).measure(todo)
    found = Calibration(device=device, model=model, kv_capacity={capacity.tp: capacity.kv_tokens}, points=points)
    save(found, out)


if __name__ == "__main__":
    main()
