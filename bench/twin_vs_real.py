"""Does the simulator predict real engines?  Calibrate it on one real run, and let it predict others with other lengths and another concurrency.

Two real vLLM engines (tiny model, fp32, one thread each), the production leader, policy and environment host replay workloads (`bench.replay`): first the one
that calibrates, then those to be predicted, each under every policy, all on the same engines and in turns over the repeats, so that a slow moment of the
machine spreads.  From the calibrating run come the step times (`libra_hpc.hardware.measured`, from the engines' own step logs) and the hops
(`Hops`); from the predicted runs nothing at all.

A further column says what the simulator makes of each run with that run's own step times: the error of its physics alone, whatever else the machine was
doing.  And the two policies are compared with each other, in reality and in the simulator.

Both engines, the leader and the environment share the cores of the machine.  The calibrating run is as loaded, so that its step times hold what the
processes take from one another.

    python bench/twin_vs_real.py [--repeat 3] [--scale 1.0]
"""

from __future__ import annotations

import argparse
import asyncio
import random
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import msgspec

from bench.harness import POLICIES, engine_environment, median, report
from bench.replay import Played, Replayer, Setup
from libra_hpc.hardware.measured import Calibration, MeasuredTimes, measured_times
from libra_hpc.sched.registry import make_policy
from libra_hpc.sim.result import SimResult, quantiles
from libra_hpc.sim.settings import EngineSpec, SimSettings
from libra_hpc.sim.simulate import simulate
from libra_hpc.sim.workload import TrajectorySpec, TurnSpec

GROUP_SIZE = 4
MOST = 2.0
"""Every length is at most this multiple of what is typical: no context outgrows the engines'."""
WARM_UP = 0.2
"""Scale of the play before all others: first steps of a process are slow."""
SCHEDULERS = ("cmlfq", "least_loaded")
LAYERS, HIDDEN = 6, 256
"""Shape of the model.  Smaller ones step so fast that the run is the leader's and the environment's more than the engines'."""


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """A kind of workload; lengths are medians of log-normal distributions with shape ``sigma``."""

    name: str
    groups: int
    open_groups: int
    """At once: the concurrency."""
    turns: tuple[int, int]
    prompt: int
    generated: int
    """Of a turn."""
    new: int
    """Tokens of a tool's answer."""
    tool_s: float
    sigma: float = 0.6


CALIBRATION = Load(name="calibration", groups=20, open_groups=10, turns=(2, 6), prompt=120, generated=50, new=30, tool_s=0.2)
PREDICTED = (
    Load(name="short", groups=32, open_groups=16, turns=(2, 8), prompt=80, generated=30, new=20, tool_s=0.1),
    Load(name="long", groups=9, open_groups=5, turns=(2, 5), prompt=250, generated=110, new=60, tool_s=0.4),
)


def make_work(load: Load, seed: int, scale: float = 1.0) -> list[TrajectorySpec]:
    """Trajectories of a kind; siblings share the prompt and half of the variance of the lengths."""
    rng = random.Random(f"{load.name}:{seed}")
    half = load.sigma / 2**0.5

    def length(middle: float, sigma: float) -> int:
        return max(2, round(middle * spread(sigma)))

    def spread(sigma: float) -> float:
        return min(MOST, rng.lognormvariate(0.0, sigma))

    work = []
    for group in range(max(2, round(scale * load.groups))):
        prompt, typical = length(load.prompt, load.sigma), spread(half)
        for sample in range(GROUP_SIZE):
            count = rng.randint(*load.turns)
            turns = []
            for number in range(count):
                last = number + 1 == count
                new = length(load.new, load.sigma) if number else 0
                tool_s = 0.0 if last else load.tool_s * spread(load.sigma)
                turns.append(TurnSpec(new, length(typical * load.generated, half), None if last else "tool", None if last else "ok", tool_s))
            work.append(TrajectorySpec(f"{load.name} {group}", sample, prompt, tuple(turns)))
    return work


class Hops(msgspec.Struct, frozen=True):
    """What the ways between the processes cost, seconds."""

    send_s: float
    answer_s: float
    env_s: float
    """Leader, environment host, leader: added to every tool time."""

    @classmethod
    def of(cls, played: Played) -> Hops:
        """From a real run.

        A turn's time outside its engine's queue and steps is both hops and the wait for the end of the step that ran when it arrived.  The latter is physics
        that the simulator has: half a step in the median, which is taken off.
        """
        outside = median([turn.answered - turn.sent - turn.queue_s - turn.run_s for turn in played.turns])
        hops = max(0.0, outside - median([step.seconds for step in played.steps]) / 2)
        # A mean: over a trajectory these add up.
        return cls(hops / 2, hops / 2, max(0.0, fmean(turn.env_s for turn in played.turns if turn.env_s)))


class Twin(msgspec.Struct, frozen=True):
    """A calibrated simulator of the machine."""

    times: MeasuredTimes
    hops: Hops
    limits: SimSettings
    engines: int

    @classmethod
    def of(cls, played: Played, setup: Setup) -> Twin:
        """Calibrate on a real run."""
        header = played.header
        calibration = Calibration(device="cpu", model="tiny", kv_capacity={header.tp: header.kv_tokens}, points=played.steps)
        hops = Hops.of(played)
        limits = SimSettings(
            max_inflight=setup.max_inflight, max_num_seqs=header.max_num_seqs, max_num_batched_tokens=header.max_num_batched_tokens,
            block_size=header.block_size, max_model_len=setup.max_model_len, send_s=hops.send_s, answer_s=hops.answer_s,
        )  # fmt: skip
        return cls(measured_times(calibration, header.tp), hops, limits, setup.engines)

    def facts(self) -> dict[str, Any]:
        """What the calibration found."""
        fit = self.times.fit
        return {"fit": msgspec.to_builtins(fit), "hops": msgspec.to_builtins(self.hops)}

    def predict(self, work: list[TrajectorySpec], policy: str, open_groups: int) -> SimResult:
        """Play a workload in the simulator, under a fresh policy of this name."""
        engines = [EngineSpec(f"r2.{number}", self.times.tp, self.times) for number in range(self.engines)]
        limits = msgspec.structs.replace(self.limits, max_open_groups=open_groups)
        return simulate([self._with_hop(spec) for spec in work], engines, make_policy(policy), limits)

    def _with_hop(self, spec: TrajectorySpec) -> TrajectorySpec:
        turns = tuple(msgspec.structs.replace(turn, tool_s=turn.tool_s + self.hops.env_s) for turn in spec.turns)
        return msgspec.structs.replace(spec, turns=turns)


class Pair(msgspec.Struct, frozen=True):
    """One figure of one workload under one policy: predicted and measured, in one repeat."""

    load: str
    policy: str
    figure: str
    predicted: float
    real: float
    own: float
    """Predicted with the step times and hops of the run itself."""


def pairs(load: str, policy: str, sim: SimResult, own: SimResult, played: Played) -> list[Pair]:
    """The figures that are compared."""
    real = quantiles([turn.latency_s for turn in played.turns])
    measured = {
        "makespan s": played.makespan_s,
        "turn p50 s": real.p50,
        "turn p95 s": real.p95,
        "steps": played.total("steps"),
        "prefilled": played.total("prefill_tokens"),
        "cached": played.total("cached_tokens"),
        "preempted": played.total("preemptions"),
    }
    return [Pair(load, policy, name, one, value, its) for (name, value), one, its in zip(measured.items(), figures(sim), figures(own), strict=True)]


def figures(sim: SimResult) -> tuple[float, ...]:
    """The same of a simulation, in the same order."""
    steps = sum(engine.steps for engine in sim.engines)
    counts = (steps, sim.prefilled_tokens, sim.cached_tokens, sim.preemptions)
    return (sim.makespan_s, sim.turn_latency.p50, sim.turn_latency.p95, *map(float, counts))


async def measure(setup: Setup, folder: Path, repeats: int, scale: float) -> tuple[list[Pair], list[dict[str, Any]]]:
    """All plays; also what each calibration found."""
    replayer = Replayer(setup, folder)
    found: list[Pair] = []
    notes: list[dict[str, Any]] = []
    await replayer.start()
    try:
        await replayer.play(make_work(CALIBRATION, -1, WARM_UP), SCHEDULERS[0], CALIBRATION.open_groups)
        for repeat in range(repeats):
            twin: Twin | None = None
            for load, policy in ((CALIBRATION, SCHEDULERS[0]), *((load, policy) for load in PREDICTED for policy in SCHEDULERS)):
                work = make_work(load, repeat, scale)
                played = await replayer.play(work, policy, load.open_groups)
                own = Twin.of(played, setup)
                if twin is None:
                    twin = own
                    notes.append({"load": played.load, **own.facts(), "header": msgspec.to_builtins(played.header)})
                sim = twin.predict(work, policy, load.open_groups)
                found += pairs(load.name, policy, sim, own.predict(work, policy, load.open_groups), played)
                words = f"{sim.makespan_s:.2f} s predicted, {played.makespan_s:.2f} s real, load {played.load:.1f}"
                print(f"{repeat + 1}: {load.name}, {policy}: {words}", file=sys.stderr)
    finally:
        await replayer.stop()
    return found, notes


def ratio(predicted: float, real: float) -> float:
    """Predicted over measured; what is 0 in both is equal."""
    return 1.0 if predicted == real else predicted / real if real else float("inf")


def rows(found: Sequence[Pair]) -> list[list[Any]]:
    """The table: medians over the repeats, and the range of the ratio."""
    out: list[list[Any]] = []
    for key in dict.fromkeys((pair.load, pair.policy, pair.figure) for pair in found):
        same = [pair for pair in found if (pair.load, pair.policy, pair.figure) == key]
        every = [ratio(pair.predicted, pair.real) for pair in same]
        own = median([ratio(pair.own, pair.real) for pair in same])
        spread = f"{min(every):.2f}..{max(every):.2f}"
        out.append(["  ".join(key), median([p.predicted for p in same]), median([p.real for p in same]), median(every), spread, own])
    return out


def ranking(found: Sequence[Pair]) -> list[list[Any]]:
    """Rows of the makespan of the second policy over that of the first."""
    first, second = SCHEDULERS
    spans = [pair for pair in found if pair.figure == "makespan s"]
    out: list[list[Any]] = []
    for load in PREDICTED:
        ones, others = ([pair for pair in spans if (pair.load, pair.policy) == (load.name, policy)] for policy in SCHEDULERS)
        predicted, real, own = ([getattr(b, f) / getattr(a, f) for a, b in zip(ones, others, strict=True)] for f in ("predicted", "real", "own"))
        every = [a / b for a, b in zip(predicted, real, strict=True)]
        owns = median([a / b for a, b in zip(own, real, strict=True)])
        spread = f"{min(every):.2f}..{max(every):.2f}"
        out.append([f"{load.name}  {second} / {first}", median(predicted), median(real), median(every), spread, owns])
    return out


def model(folder: Path = POLICIES / f"twin-{LAYERS}x{HIDDEN}") -> Path:
    """The model's folder, made once: random weights, since lengths are imposed."""
    if not (folder / "config.json").exists():
        code = (
            "import sys, torch; from transformers import Qwen2Config, Qwen2ForCausalLM; from libra_hpc.tasks.policy import write_tokenizer\n"
            f"torch.manual_seed(0); write_tokenizer(sys.argv[1])\n"
            f"Qwen2ForCausalLM(Qwen2Config(vocab_size=128, hidden_size={HIDDEN}, intermediate_size={4 * HIDDEN}, num_hidden_layers={LAYERS}, "
            f"num_attention_heads={HIDDEN // 64}, num_key_value_heads=2, max_position_embeddings=4096, tie_word_embeddings=False)).save_pretrained(sys.argv[1])"
        )
        subprocess.run([sys.executable, "-c", code, str(folder)], check=True, env=engine_environment(), stdout=subprocess.DEVNULL)
    return folder


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--scale", type=float, default=1.0, help="of the number of groups")
    arguments = parser.parse_args()
    setup = Setup(model=model())
    with tempfile.TemporaryDirectory(prefix="libra-twin-") as folder:
        found, notes = asyncio.run(measure(setup, Path(folder), arguments.repeat, arguments.scale))
    columns = ["workload, policy, figure", "predicted", "real", "ratio (median)", "range", "own steps"]
    words = [
        f"{setup.engines} vLLM engines, {LAYERS} layers x {HIDDEN}, fp32, one thread each; medians of {arguments.repeat} repeats.",
        "The last rows are ratios of makespans.  Each repeat calibrates on a run of its own; load averages at the starts of those: "
        + ", ".join(f"{note['load']:.1f}" for note in notes),
    ]
    table = [*rows(found), *ranking(found)]
    report("twin_vs_real", "Simulator against real engines", columns, table, words, {"pairs": msgspec.to_builtins(found), "calibrations": notes})


if __name__ == "__main__":
    main()
