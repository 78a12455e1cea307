"""Predictions of the simulator against real engines, with other lengths and concurrency than it was calibrated on.

    python -m bench.simulated_vs_real [--repeat 3] [--scale 1.0]

* Two real vLLM engines (tiny model, fp32) with the production leader replay `CALIBRATIONS` and `PREDICTED`.
* Step times and hops come from the calibrating runs alone; these bracket the predicted ones in batch size and context.
* Calibrating and predicted runs alternate, in reverse order with every other repeat: the machine's speed drifts.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import msgspec

from bench.harness import median, options, progress, report, spread
from bench.replay import GROUP_SIZE, Played, Replayer, Setup, model, tool_turn
from libra_hpc.models.step_times.measured import Calibration, MeasuredTimes, measured_times
from libra_hpc.policies.scheduling.registry import make_policy
from libra_hpc.protocol.trace import TrajectoryRecord, TurnRecord
from libra_hpc.simulator.result import SimulationResult, quantiles
from libra_hpc.simulator.settings import EngineSpec, SimulationSettings
from libra_hpc.simulator.simulate import simulate

MOST = 2.0
"""Largest multiple of the typical length, so that no context exceeds that of the engines."""
WARM_UP = 0.2
"""Scale of the first play, which warms up the processes and is not counted."""
SCHEDULERS = ("cmlfq", "least_loaded")


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


class Simulator(msgspec.Struct, frozen=True):
    """A calibrated simulator of the machine."""

    times: MeasuredTimes
    limits: SimulationSettings
    engines: int
    env_s: float
    """Leader, environment host, leader: added to every tool time."""

    @classmethod
    def of(cls, runs: Sequence[Played], setup: Setup) -> Simulator:
        """Calibrate on real runs of the same engines.

        A hop is half of a turn's seconds outside its engine's queue and steps, without half a step: the simulator
        itself has the wait for the end of the step that runs at the arrival.
        """
        header = runs[0].header
        points = [point for played in runs for point in played.steps]
        calibration = Calibration(device="cpu", model="tiny", kv_capacity={header.tp: header.kv_tokens}, points=points)
        hops = fmean(max(0.0, _outside(one) - median([step.seconds for step in one.steps]) / 2) for one in runs)
        # A mean: over a trajectory these add up.
        env_s = max(0.0, fmean(turn.env_s for played in runs for turn in played.turns if turn.env_s))
        limits = SimulationSettings(
            max_inflight=setup.max_inflight,
            max_num_seqs=header.max_num_seqs,
            max_num_batched_tokens=header.max_num_batched_tokens,
            block_size=header.block_size,
            max_model_len=setup.max_model_len,
            send_s=hops / 2,
            answer_s=hops / 2,
        )
        return cls(measured_times(calibration, header.tp), limits, setup.engines, env_s)

    def predict(self, work: list[TrajectoryRecord], policy: str, open_groups: int) -> SimulationResult:
        """Simulate a workload under a new policy of this name."""
        engines = [EngineSpec(f"r2.{number}", self.times.tp, self.times) for number in range(self.engines)]
        limits = msgspec.structs.replace(self.limits, max_open_groups=open_groups)
        return simulate([slower(spec, self.env_s) for spec in work], engines, make_policy(policy), limits)


def slower(spec: TrajectoryRecord, seconds: float) -> TrajectoryRecord:
    """The trajectory with so much longer tools."""
    turns = tuple(msgspec.structs.replace(turn, tool_s=turn.tool_s + seconds) for turn in spec.turns)
    return msgspec.structs.replace(spec, turns=turns)


def _outside(played: Played) -> float:
    """Median seconds of a turn that are neither its engine's queue nor its steps."""
    return median([turn.answered - turn.sent - turn.queue_s - turn.run_s for turn in played.turns])


class Play(NamedTuple):
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


def compare(done: Sequence[tuple[Play, Played]], setup: Setup, scale: float) -> dict[str, list[tuple[float, float]]]:
    """(predicted, real) of every repeat, by workload, policy and figure of `PREDICTED`."""
    simulator = Simulator.of([played for play, played in done if play.load in CALIBRATIONS], setup)
    found = defaultdict(list)
    for play, played in [run for run in done if run[0].load in PREDICTED]:
        work = make_work(play.load, play.repeat, scale)
        predicted = simulator.predict(work, play.policy, play.load.open_groups)
        turns, real = predicted.turn_latency, quantiles([turn.answered - turn.ready for turn in played.turns])
        context = predicted.cached_tokens + predicted.prefilled_tokens
        computed = sum(step.prefill for step in played.steps)
        for name, pair in {
            "makespan s": (predicted.makespan_s, played.makespan_s),
            "turn p50 s": (turns.p50, real.p50),
            "turn p95 s": (turns.p95, real.p95),
            "prefix hits": (predicted.cached_tokens / context, 1 - computed / context),
        }.items():
            found[f"{play.load.name}  {play.policy}  {name}"].append(pair)
    return found


def rows(found: Mapping[str, Sequence[tuple[float, float]]]) -> list[list[Any]]:
    """Medians over the repeats, and the range of the ratio."""
    return [
        [name, *map(median, zip(*pairs, strict=True)), spread([one / real for one, real in pairs])]
        for name, pairs in found.items()
    ]


def main() -> None:
    given, setup = options("simulated_vs_real", __doc__, repeat=3, scale=1.0), Setup(model=model())
    with tempfile.TemporaryDirectory(prefix="libra-simulated-") as folder:
        done = asyncio.run(measure(setup, Path(folder), given.repeat, given.scale))
    found = compare(done, setup, given.scale)
    notes = [
        f"Calibrated on {len(CALIBRATIONS) * given.repeat} other runs between those predicted; medians of the repeats.",
        "Load averages at the starts of all runs: " + ", ".join(f"{played.load:.1f}" for _, played in done) + ".",
    ]
    columns = ["workload, policy, figure", "predicted", "real", "ratio, median (range)"]
    report(given, "Simulator against real engines", columns=columns, rows=rows(found), notes=notes, raw=found)


if __name__ == "__main__":
    main()
