"""Predictions of the simulator against real engines, with other lengths and concurrency than it was calibrated on.

    python -m bench.simulated_vs_real [--repeat 3] [--scale 1.0]

* Two real vLLM engines (tiny model, fp32) with the production leader replay `CALIBRATIONS` and `PREDICTED`.
* Step times and hops come from the calibrating runs alone; these bracket the predicted ones in batch size and context.
* Calibrating and predicted runs alternate, in reverse order with every other repeat: the machine's speed drifts.
* Column "own steps": the prediction with the run's own step times, which isolates errors of queueing and caching.
* The last rows compare two policies with each other, real and predicted.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec

from bench.harness import POLICIES, child, median, options, progress, report, spread
from bench.replay import Played, Replayer, Setup
from libra_hpc.models.step_times.measured import Calibration, MeasuredTimes, measured_times
from libra_hpc.policies.scheduling.registry import make_policy
from libra_hpc.protocol.trace import TrajectoryRecord, TurnRecord
from libra_hpc.simulator.result import SimulationResult, quantiles
from libra_hpc.simulator.settings import EngineSpec, SimulationSettings
from libra_hpc.simulator.simulate import simulate
from tests.example_files import write_keychain_tokenizer

GROUP_SIZE = 4
MOST = 2.0
"""Largest multiple of the typical length, so that no context exceeds that of the engines."""
WARM_UP = 0.2
"""Scale of the first play, which warms up the processes and is not counted."""
SCHEDULERS = ("cmlfq", "least_loaded")
LAYERS, HIDDEN = 6, 256
"""Shape of the model; with a smaller one, leader and environment would dominate the run."""


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """A kind of workload; lengths are medians of log-normal distributions with shape ``sigma``."""

    name: str
    groups: int
    open_groups: int
    """Most groups at once: the concurrency."""
    turns: tuple[int, int]
    prompt: int
    generated: int
    """Of a turn."""
    new: int
    """Tokens of a tool's answer."""
    tool_s: float
    sigma: float = 0.6


CALIBRATIONS = (
    Load(name="crowded", groups=20, open_groups=16, turns=(2, 4), prompt=120, generated=45, new=30, tool_s=0.1),
    Load(name="deep", groups=6, open_groups=4, turns=(2, 4), prompt=400, generated=120, new=60, tool_s=0.3),
)
"""Up to `Setup.max_num_seqs` sequences at an engine, and few sequences with the longest contexts."""
PREDICTED = (
    Load(name="short", groups=32, open_groups=16, turns=(2, 8), prompt=80, generated=30, new=20, tool_s=0.1),
    Load(name="long", groups=9, open_groups=5, turns=(2, 5), prompt=250, generated=110, new=60, tool_s=0.4),
)


def make_work(load: Load, seed: int, scale: float = 1.0) -> list[TrajectoryRecord]:
    """Trajectories of a kind; siblings share the prompt and half of the variance of the lengths."""
    rng = random.Random(f"{load.name}:{seed}")
    half = load.sigma / 2**0.5

    def length(middle: float, sigma: float) -> int:
        return max(2, round(middle * factor(sigma)))

    def factor(sigma: float) -> float:
        return min(MOST, rng.lognormvariate(0.0, sigma))

    def turn(number: int, last: bool, typical: float) -> TurnRecord:
        new = length(load.new, load.sigma) if number else 0
        tool_s = 0.0 if last else load.tool_s * factor(load.sigma)
        return tool_turn(new, length(typical * load.generated, half), tool_s, last)

    work = []
    for group in range(max(2, round(scale * load.groups))):
        prompt, typical = length(load.prompt, load.sigma), factor(half)
        for sample in range(GROUP_SIZE):
            count = rng.randint(*load.turns)
            turns = tuple(turn(number, number + 1 == count, typical) for number in range(count))
            work.append(TrajectoryRecord(f"{load.name} {group}", sample, prompt, turns))
    return work


def tool_turn(new: int, generated: int, tool_s: float, last: bool) -> TurnRecord:
    """A turn that ends with a tool, unless it is the last one."""
    if last:
        return TurnRecord(new, generated)
    return TurnRecord(new, generated, tool="tool", outcome="ok", tool_s=tool_s)


class Hops(msgspec.Struct, frozen=True):
    """Seconds of messages between the processes."""

    send_s: float
    answer_s: float
    env_s: float
    """Leader, environment host, leader: added to every tool time."""

    @classmethod
    def of(cls, runs: Sequence[Played]) -> Hops:
        """Estimate from real runs: a turn's seconds outside its engine's queue and steps, minus half a step.

        The simulator itself has that half step: the wait for the end of the step that runs at the arrival.
        """
        hops = fmean(
            max(0.0, _outside(played) - median([step.seconds for step in played.steps]) / 2) for played in runs
        )
        # A mean: over a trajectory these add up.
        return cls(
            hops / 2, hops / 2, max(0.0, fmean(turn.env_s for played in runs for turn in played.turns if turn.env_s))
        )


def _outside(played: Played) -> float:
    """Median seconds of a turn that are neither its engine's queue nor its steps."""
    return median([turn.answered - turn.sent - turn.queue_s - turn.run_s for turn in played.turns])


class Simulator(msgspec.Struct, frozen=True):
    """A calibrated simulator of the machine."""

    times: MeasuredTimes
    hops: Hops
    limits: SimulationSettings
    engines: int

    @classmethod
    def of(cls, runs: Sequence[Played], setup: Setup) -> Simulator:
        """Calibrate on real runs of the same engines."""
        header = runs[0].header
        points = [point for played in runs for point in played.steps]
        calibration = Calibration(device="cpu", model="tiny", kv_capacity={header.tp: header.kv_tokens}, points=points)
        hops = Hops.of(runs)
        limits = SimulationSettings(
            max_inflight=setup.max_inflight,
            max_num_seqs=header.max_num_seqs,
            max_num_batched_tokens=header.max_num_batched_tokens,
            block_size=header.block_size,
            max_model_len=setup.max_model_len,
            send_s=hops.send_s,
            answer_s=hops.answer_s,
        )
        return cls(measured_times(calibration, header.tp), hops, limits, setup.engines)

    def predict(self, work: list[TrajectoryRecord], policy: str, open_groups: int) -> SimulationResult:
        """Simulate a workload under a new policy of this name."""
        engines = [EngineSpec(f"r2.{number}", self.times.tp, self.times) for number in range(self.engines)]
        limits = msgspec.structs.replace(self.limits, max_open_groups=open_groups)
        return simulate([self._with_hop(spec) for spec in work], engines, make_policy(policy), limits)

    def _with_hop(self, spec: TrajectoryRecord) -> TrajectoryRecord:
        turns = tuple(msgspec.structs.replace(turn, tool_s=turn.tool_s + self.hops.env_s) for turn in spec.turns)
        return msgspec.structs.replace(spec, turns=turns)


class Pair(msgspec.Struct, frozen=True):
    """One figure, predicted and real, of one workload under one policy in one repeat."""

    load: str
    policy: str
    figure: str
    predicted: float
    real: float
    own: float
    """Predicted with the step times and hops of the run itself."""


FIGURES = ("makespan s", "turn p50 s", "turn p95 s", "steps", "prefilled", "cached", "preempted")


def figures(sim: SimulationResult) -> tuple[float, ...]:
    """Of a simulation, in the order of `FIGURES`."""
    steps = sum(engine.steps for engine in sim.engines)
    counts = (steps, sim.prefilled_tokens, sim.cached_tokens, sim.preemptions)
    return (sim.makespan_s, sim.turn_latency.p50, sim.turn_latency.p95, *map(float, counts))


def measured(played: Played) -> tuple[float, ...]:
    """Of a real run, in the same order."""
    turns = quantiles([turn.latency_s for turn in played.turns])
    counts = ("steps", "prefill_tokens", "cached_tokens", "preemptions")
    return (played.makespan_s, turns.p50, turns.p95, *map(played.total, counts))


class Play(msgspec.Struct, frozen=True):
    load: Load
    policy: str
    repeat: int


def plays(repeat: int) -> list[Play]:
    """Runs of a repeat: a calibrating one, then one kind of work under every policy, and so on."""
    out = []
    for calibration, predicted in zip(CALIBRATIONS, PREDICTED, strict=True):
        out += [Play(calibration, SCHEDULERS[0], repeat), *(Play(predicted, policy, repeat) for policy in SCHEDULERS)]
    return out[::-1] if repeat % 2 else out


async def measure(setup: Setup, folder: Path, repeats: int, scale: float) -> list[tuple[Play, Played]]:
    """Make all runs; returns them in order."""
    found = []
    todo = [play for repeat in range(repeats) for play in plays(repeat)]
    async with Replayer(setup, folder) as replayer:
        await replayer.play(make_work(CALIBRATIONS[0], -1, WARM_UP), SCHEDULERS[0], CALIBRATIONS[0].open_groups)
        for number, play in enumerate(todo, 1):
            played = await replayer.play(make_work(play.load, play.repeat, scale), play.policy, play.load.open_groups)
            found.append((play, played))
            words = f"{played.makespan_s:.2f} s, load {played.load:.1f}"
            progress(f"{number} of {len(todo)}: {play.load.name}, {play.policy}: {words}")
    return found


def compare(done: Sequence[tuple[Play, Played]], setup: Setup, scale: float) -> tuple[list[Pair], dict[str, Any]]:
    """Predict the runs of `PREDICTED`; also returns the facts of the calibration."""
    simulated = Simulator.of([played for play, played in done if play.load in CALIBRATIONS], setup)
    found: list[Pair] = []
    for play, played in [run for run in done if run[0].load in PREDICTED]:
        work = make_work(play.load, play.repeat, scale)
        both = (simulated, Simulator.of([played], setup))
        sim, own = (figures(each.predict(work, play.policy, play.load.open_groups)) for each in both)
        for name, *values in zip(FIGURES, sim, measured(played), own, strict=True):
            found.append(Pair(play.load.name, play.policy, name, *values))
    facts = {"fit": msgspec.to_builtins(simulated.times.fit), "hops": msgspec.to_builtins(simulated.hops)}
    header, loads = msgspec.to_builtins(done[0][1].header), [played.load for _, played in done]
    return found, {**facts, "header": header, "loads": loads}


def ratio(predicted: float, real: float) -> float:
    """Predicted over real; 1.0 where both are 0."""
    return 1.0 if predicted == real else predicted / real if real else float("inf")


def rows(found: Sequence[Pair]) -> list[list[Any]]:
    """Medians over the repeats, and the range of the ratio; then makespans of the second policy over the first's."""
    lines: dict[str, list[Pair]] = {}
    for pair in found:
        lines.setdefault(f"{pair.load}  {pair.policy}  {pair.figure}", []).append(pair)
    first, second = SCHEDULERS
    for load in PREDICTED:
        ones, others = (lines.get(f"{load.name}  {policy}  makespan s", []) for policy in SCHEDULERS)
        for a, b in zip(ones, others, strict=True):
            values = (b.predicted / a.predicted, b.real / a.real, b.own / a.own)
            name = f"{load.name}  {second} / {first}"
            lines.setdefault(name, []).append(Pair(load.name, second, "ratio", *values))
    return [
        [
            name,
            median([pair.predicted for pair in same]),
            median([pair.real for pair in same]),
            spread([ratio(pair.predicted, pair.real) for pair in same]),
            median([ratio(pair.own, pair.real) for pair in same]),
        ]
        for name, same in lines.items()
    ]


def model(layers: int = LAYERS, hidden: int = HIDDEN) -> Path:
    """The model's folder, made once; its weights are random, since lengths are set by the workload."""
    folder = POLICIES / f"simulated-{layers}x{hidden}"
    if not (folder / "config.json").exists():
        sizes = ("--layers", str(layers), "--hidden", str(hidden))
        child("-m", "bench.simulated_vs_real", "--make-model", str(folder), *sizes)
    return folder


def make_model(folder: Path, layers: int, hidden: int) -> None:
    """In a process of its own, because torch's threads would disturb the measurement."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    write_keychain_tokenizer(folder)
    sizes: dict[str, Any] = {"vocab_size": 128, "hidden_size": hidden, "intermediate_size": 4 * hidden}
    sizes |= {"num_hidden_layers": layers, "num_attention_heads": hidden // 64, "num_key_value_heads": 2}
    config = Qwen2Config(max_position_embeddings=4096, tie_word_embeddings=False, **sizes)
    Qwen2ForCausalLM(config).save_pretrained(folder)  # type: ignore[no-untyped-call]
    print(0)


def main() -> None:
    given = options("simulated_vs_real", __doc__, repeat=3, scale=1.0, make_model="", layers=LAYERS, hidden=HIDDEN)
    if given.make_model:
        make_model(Path(given.make_model), given.layers, given.hidden)
        return
    setup = Setup(model=model())
    with tempfile.TemporaryDirectory(prefix="libra-simulated-") as folder:
        done = asyncio.run(measure(setup, Path(folder), given.repeat, given.scale))
    found, facts = compare(done, setup, given.scale)
    notes = [
        f"{setup.engines} vLLM engines, {LAYERS} layers x {HIDDEN}, fp32, one thread each; medians of {given.repeat}"
        " repeats.",
        f"One calibration on {len(CALIBRATIONS) * given.repeat} other runs between those predicted.  The last rows are"
        " ratios of makespans.",
        "Load averages at the starts of all runs: " + ", ".join(f"{load:.1f}" for load in facts["loads"]) + ".",
    ]
    columns = ["workload, policy, figure", "predicted", "real", "ratio, median (range)", "own steps"]
    raw = {"pairs": msgspec.to_builtins(found), "calibration": facts}
    report(given, "Simulator against real engines", columns=columns, rows=rows(found), notes=notes, raw=raw)


if __name__ == "__main__":
    main()
