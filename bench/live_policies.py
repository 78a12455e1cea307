"""Scheduling policies on real engines of TP=1 and TP=2: the quickstart in local processes, with equal seeds.

    python -m bench.live_policies [--policies cmlfq,least_loaded] [--seeds 0,1,2] [--steps 40]

`examples/quickstart.toml` with two rollout nodes and no hybrid node.  To make runs comparable:

* ``eta = 0``, and the planner is off. So batch b has the prompts ``b * PROMPTS .. (b + 1) * PROMPTS - 1``, and nothing
  is trained meanwhile: the time from the first start to the last end of a batch is the rollout's alone.
* No prompt is admitted before both engines are up (`bench.live_task`).
* The order of the policies is reversed with every other seed.

Equal seeds give equal prompts and an equal start of the policy network; batches are equal in distribution only.
"""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec

from bench.harness import ROOT, Figures, by_turns, median, options, policy, progress, report_policies, submit
from bench.policies import POLICIES
from libra_hpc.engine.steplog import read_steps
from libra_hpc.errors import OperationError
from libra_hpc.facts.rundir import RunDir, read_lines
from libra_hpc.models.step_times.measured import StepPoint
from libra_hpc.simulator.result import quantiles

RUN_FILE = ROOT / "examples" / "quickstart.toml"
ENGINES = {"r2.0": 1, "r3.0": 2}
"""Engine -> tensor-parallel degree."""
PROMPTS = 8
"""Prompts of a step, as in the quickstart."""
WARM_UP = 2
"""Batches of each phase that do not count: engines start slowly, and a policy has not seen the new mix."""
BATCH = "rollout of a batch, s"
Line = dict[str, Any]
"""A line of `trajectories.jsonl`."""


class Run(msgspec.Struct, frozen=True):
    load: float
    """Load average of the machine before the run."""
    phases: dict[str, Figures]
    step_ms: dict[str, float]
    """Engine -> median milliseconds of a step without prefill."""


def overrides(scheduler: str, seed: int, steps: int, folder: Path) -> dict[str, Any]:
    """Settings that differ from the quickstart."""
    return {
        "run.dir": folder,
        "run.seed": seed,
        "run.steps": steps,
        "model.path": policy(0),
        "components.hybrid.nodes": 0,
        "components.rollout.nodes": 2,
        "rollout.tp": list(ENGINES.values()),
        "rollout.policy": POLICIES[scheduler],
        "rollout.record_steps": "true",
        "algorithm.eta": 0,
        "algorithm.prompts_per_step": PROMPTS,
        "planner.enabled": "false",
        "checkpoint.every": 0,
        "task.name": f"{Path(__file__).with_name('live_task.py')}:HeldKeyChain",
        "task.options.runs": folder,
        "task.options.engines": list(ENGINES),
    }


def play(scheduler: str, *, seed: int, steps: int, folder: Path) -> Run:
    load = os.getloadavg()[0]
    submit(RUN_FILE, "--wait", "--executor", "local", overrides=overrides(scheduler, seed, steps, folder))
    run = RunDir(next(folder.glob("quickstart-*")))
    logs = {name: read_steps(run.logs(1) / f"{name}.steps.jsonl")[1] for name in ENGINES}
    phases = by_phase(read_lines(run.trajectories), PROMPTS, WARM_UP)
    return Run(
        load,
        {phase: figures(lines, prompts=PROMPTS, engines=ENGINES, name=phase) for phase, lines in phases.items()},
        {name: step_ms(points) for name, points in logs.items()},
    )


# --- figures


def figures(lines: Sequence[Line], *, prompts: int, engines: Mapping[str, int], name: str = "") -> Figures:
    """Figures of the trajectories of whole batches of ``prompts`` prompts on ``engines`` (name -> TP).

    ``rollout of a batch`` is from the first start to the last end, the median over the batches. ``moves`` are turns on
    another engine than the turn before, ``re-prefilled`` their context tokens, cached there by siblings or not. Raises
    `OperationError` without any trajectory; ``name`` is that of the phase.
    """
    if not lines:
        raise OperationError(f"{name}: no trajectory has ended")
    batches: dict[int, list[Line]] = {}
    for line in lines:
        batches.setdefault(line["index"] // prompts, []).append(line)
    spans = [
        max(line["finished_at"] for line in batch) - min(line["started_at"] for line in batch)
        for batch in batches.values()
    ]
    completion = quantiles([line["finished_at"] - line["started_at"] for line in lines])
    left = [tokens for line in lines for tokens in moved(line)]
    turns = [turn for line in lines for turn in line["turns"]]
    used, count = Counter(turn["engine"] for turn in turns), len(batches)
    shares = {f"share of turns at TP={tp}": used[engine] / len(turns) for engine, tp in engines.items()}
    return {
        BATCH: median(spans),
        "completion p50, s": completion.p50,
        "completion p95, s": completion.p95,
        "completion p99, s": completion.p99,
        "tokens/s": sum(turn["gen_tokens"] for turn in turns) / sum(spans),
        "turns per batch": len(turns) / count,
        "moves per batch": len(left) / count,
        "re-prefilled per batch": sum(left) / count,
        "reward": fmean(line["reward"] for line in lines),
        **shares,
    }


def moved(line: Line) -> list[int]:
    """Per move of a trajectory, the context tokens before the last tool's answer."""
    context, last, out = line["prompt_tokens"], "", []
    for turn in line["turns"]:
        if last and turn["engine"] != last:
            out.append(context)
        last = turn["engine"]
        context += turn["new_tokens"] + turn["gen_tokens"]
    return out


def by_phase(lines: Iterable[Line], prompts: int, warm_up: int) -> dict[str, list[Line]]:
    """Lines before and after the drift of the task mix, without the first ``warm_up`` batches of each phase."""
    phases: dict[str, list[Line]] = {}
    for line in lines:
        phases.setdefault("long prompts" if line["info"]["after_drift"] else "long chains", []).append(line)
    out = {}
    for name, found in sorted(phases.items()):
        first = min(line["index"] for line in found) // prompts + warm_up
        out[name] = [line for line in found if line["index"] // prompts >= first]
    return out


def step_ms(points: Sequence[StepPoint]) -> float:
    """Median milliseconds of an engine's steps without prefill."""
    return 1e3 * median([point.seconds for point in points if not point.prefill])


def main() -> None:
    defaults: dict[str, Any] = {"policies": ["cmlfq", "least_loaded"], "seeds": [0, 1, 2], "steps": 40}
    given = options("live_policies", __doc__, **defaults)
    runs: dict[tuple[str, int], Run] = {}
    with tempfile.TemporaryDirectory(prefix="libra-live-") as name:
        for seed, scheduler in by_turns(given.seeds, given.policies):
            folder = Path(name) / f"{scheduler}-{seed}"
            run = runs[scheduler, seed] = play(scheduler, seed=seed, steps=given.steps, folder=folder)
            words = ", ".join(f"{phase} {one[BATCH]:.3f} s a batch" for phase, one in run.phases.items())
            progress(f"{scheduler}, seed {seed}: {words}, load {run.load:.1f}")
    degrees = "; ".join(
        f"TP={tp} " + ", ".join(f"{run.step_ms[name]:.1f}" for run in runs.values()) for name, tp in ENGINES.items()
    )
    notes = [
        f"Quickstart task, {given.steps} steps of {PROMPTS} prompts, eta 0; medians over {len(given.seeds)} seeds.",
        f"The first {WARM_UP} batches of each phase do not count.",
        f"Median step without prefill, ms, by run: {degrees}.",
        f"Load averages at the starts of the runs: {', '.join(f'{run.load:.1f}' for run in runs.values())}.",
    ]
    report_policies(
        given, "Scheduling policies on real engines", {key: run.phases for key, run in runs.items()}, notes=notes
    )


if __name__ == "__main__":
    main()
