"""Scheduling policies on real engines of TP=1 and TP=2: the quickstart on the embedded Slurm, with equal seeds.

    python -m bench.live_policies [--policies cmlfq,least_loaded] [--seeds 0,1,2] [--steps 40]

`examples/quickstart.toml` with two rollout nodes and no hybrid node, submitted as by a user.  To make runs comparable:

* ``eta = 0``, and the planner is off. So batch b has the prompts ``b * PROMPTS .. (b + 1) * PROMPTS - 1``, and nothing
  is trained meanwhile: the time from the first start to the last end of a batch is the rollout's alone.
* No prompt is admitted before both engines are up (`bench.live_task`).
* The order of the policies is reversed with every other seed.

Equal seeds give equal prompts and an equal start of the policy network; batches are equal in distribution only.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec

from bench.harness import (
    ROOT,
    Options,
    by_turns,
    engine_environment,
    median,
    options,
    policy,
    progress,
    report,
    spread,
    submit,
)
from bench.policies import POLICIES
from libra_hpc.engine.steplog import read_steps
from libra_hpc.errors import OperationError
from libra_hpc.facts.rundir import RunDir, read_lines
from libra_hpc.models.step_times.measured import StepPoint
from libra_hpc.simulator.result import quantiles
from libra_hpc.slurm.devcluster.cluster import Cluster
from libra_hpc.slurm.site_commands import clean_environment
from libra_hpc.slurm.submit import state

RUN_FILE = ROOT / "examples" / "quickstart.toml"
ENGINES = {"r2.0": 1, "r3.0": 2}
"""Engine -> tensor-parallel degree."""
PROMPTS = 8
"""Prompts of a step, as in the quickstart."""
WARM_UP = 2
"""Batches of each phase that do not count: engines start slowly, and a policy has not seen the new mix."""
PATIENCE_S = 600.0
"""Longest run, about ten times the usual one."""
POLL_S = 0.5
"""Seconds between two checks of a condition."""
SLURM_POLL_S = 10.0
"""Seconds between two queries of the job's state."""
PROGRESS_STEPS = 10
"""Steps between two lines of progress."""
Line = dict[str, Any]
"""A line of `trajectories.jsonl`."""


BATCH = "rollout of a batch, s"
Figures = dict[str, float]
"""Figures of one phase of one run; all but seconds, tokens/s, shares and reward are per batch.

``rollout of a batch`` is from the first start to the last end, the median over the batches. ``moves`` are turns on
another engine than the turn before, ``re-prefilled`` their context tokens, cached there by siblings or not.
"""


class Run(msgspec.Struct, frozen=True):
    """One run and its figures."""

    load: float
    """Load average of the machine before the first prompt, the run's own start included."""
    seconds: float
    """From the first admission to the end of the run."""
    phases: dict[str, Figures]
    step_ms: dict[str, float]
    """Engine -> median milliseconds of a step without prefill."""


@contextmanager
def cluster() -> Iterator[dict[str, str]]:
    """An embedded Slurm for this benchmark; yields the environment variables for its commands and `libra-hpc`."""
    # A short path: Slurm's sockets are below it.
    home = Path(tempfile.mkdtemp(prefix="libra-", dir="/tmp"))
    try:
        info = Cluster(home).up(progress)
        yield {**clean_environment(engine_environment()), **info.environment}
    finally:
        Cluster(home).down()
        shutil.rmtree(home, ignore_errors=True)


def overrides(scheduler: str, seed: int, steps: int, folder: Path) -> dict[str, Any]:
    """Settings that differ from the quickstart."""
    return {
        "run.dir": folder / "runs",
        "run.seed": seed,
        "run.steps": steps,
        "model.path": policy(0),
        "slurm.executor": "slurm",
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
        "task.options.gate": folder / "gate",
    }


def play(scheduler: str, *, seed: int, steps: int, env: dict[str, str], folder: Path) -> Run:
    """One run from submission to figures; its prompts wait for the file ``gate`` until both engines are up.

    Raises `OperationError` when the engines do not start, or the run does not complete.
    """
    folder.mkdir()
    changes = overrides(scheduler, seed, steps, folder)
    run = RunDir(json.loads(submit(RUN_FILE, "--json", overrides=changes, env=env))["path"])
    wait(run, env, lambda: up(run))
    load, began = os.getloadavg()[0], time.monotonic()
    (folder / "gate").touch()
    follow(run, env, f"{scheduler}, seed {seed}", steps)
    seconds = time.monotonic() - began
    expected = steps * PROMPTS * int(run.read_json(run.config)["algorithm"]["group_size"])
    # The rollout leader writes its last lines as the run ends.
    wait(run, env, lambda: len(list(read_lines(run.trajectories))) >= expected, ended=True)
    logs = {name: read_steps(run.logs(1) / f"{name}.steps.jsonl")[1] for name in ENGINES}
    phases = by_phase(read_lines(run.trajectories), PROMPTS, WARM_UP)
    return Run(
        load,
        seconds,
        {phase: figures(lines, prompts=PROMPTS, engines=ENGINES, name=phase) for phase, lines in phases.items()},
        step_ms={name: step_ms(points) for name, points in logs.items()},
    )


def up(run: RunDir) -> bool:
    return ENGINES.keys() <= {event["engine"] for event in read_lines(run.events) if event["kind"] == "engine_ready"}


def wait(run: RunDir, env: dict[str, str], condition: Callable[[], bool], ended: bool = False) -> None:
    """Wait for ``condition``; `OperationError` after `PATIENCE_S` or, unless ``ended``, when the job has ended."""
    began = queried = time.monotonic()
    while not condition():
        now, over = time.monotonic(), False
        if now > queried + SLURM_POLL_S and not ended:
            queried, over = now, state(run, env).state.ended
        if (over and not condition()) or now > began + PATIENCE_S:
            result = run.read_json(run.result)
            reason = result.get("reason") or result.get("state") or "the job made no progress"
            raise OperationError(f"{run.path}: {reason}; see {run.logs(1)}")
        time.sleep(POLL_S)


def follow(run: RunDir, env: dict[str, str], name: str, steps: int) -> None:
    """Wait for the end of the run, with a line of progress every `PROGRESS_STEPS` steps."""
    reported = 0

    def over() -> bool:
        nonlocal reported
        lines = list(read_lines(run.metrics))
        if lines and len(lines) >= reported + PROGRESS_STEPS:
            reported = len(lines) - len(lines) % PROGRESS_STEPS
            progress(f"{name}: step {len(lines)} of {steps}, reward {lines[-1]['reward']:.2f}")
        return run.read_json(run.result).get("state") == "completed"

    wait(run, env, over)


# --- figures


def figures(lines: Sequence[Line], *, prompts: int, engines: Mapping[str, int], name: str = "") -> Figures:
    """Figures of the trajectories of whole batches of ``prompts`` prompts on ``engines`` (name -> TP).

    Raises `OperationError` without any; ``name`` is that of the phase.
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


def table(found: Mapping[tuple[str, int], Mapping[str, Figures]], policies: Sequence[str]) -> list[list[Any]]:
    """Rows by phase and figure: medians over the seeds, and ratios of the first policy to each other.

    ``found``: (policy, seed) -> phase -> figures.
    """
    first, *others = policies
    rows: list[list[Any]] = []
    for phase, some in next(iter(found.values())).items():
        for name in some:
            values = {key: phases[phase][name] for key, phases in found.items()}
            row: list[Any] = [f"{phase}  {name}"]
            row += [median([value for (policy, _), value in values.items() if policy == one]) for one in policies]
            for other in others:
                ratios = [
                    value / values[other, seed]
                    for (policy, seed), value in values.items()
                    if policy == first and values[other, seed]
                ]
                row.append(spread(ratios) if ratios else "-")
            rows.append(row)
    return rows


def main() -> None:
    """Command line."""
    defaults: dict[str, Any] = {"policies": ["cmlfq", "least_loaded"], "seeds": [0, 1, 2], "steps": 40}
    given = options("live_policies", __doc__, **defaults)
    policy(0)
    # SIGTERM must stop the cluster too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    runs: dict[tuple[str, int], Run] = {}
    try:
        with tempfile.TemporaryDirectory(prefix="libra-live-") as name, cluster() as env:
            for seed, scheduler in by_turns(given.seeds, given.policies):
                folder = Path(name) / f"{scheduler}-{seed}"
                run = runs[scheduler, seed] = play(scheduler, seed=seed, steps=given.steps, env=env, folder=folder)
                words = ", ".join(f"{phase} {one[BATCH]:.3f} s a batch" for phase, one in run.phases.items())
                progress(f"{scheduler}, seed {seed}: {words}; {run.seconds:.0f} s, load {run.load:.1f}")
    finally:
        # After an early end, the complete seeds are reported.
        whole = [seed for seed in given.seeds if all((one, seed) in runs for one in given.policies)]
        if whole:
            show(given, {key: run for key, run in runs.items() if key[1] in whole})


def show(given: Options, runs: dict[tuple[str, int], Run]) -> None:
    """Report the table with notes."""
    first, *others = given.policies
    degrees = "; ".join(
        f"TP={tp} " + ", ".join(f"{run.step_ms[name]:.1f}" for run in runs.values()) for name, tp in ENGINES.items()
    )
    notes = [
        f"Quickstart task, {given.steps} steps of {PROMPTS} prompts, eta 0; medians over"
        f" {len(runs) // len(given.policies)} seeds.",
        f"Ratios are taken within a seed: median and range.  The first {WARM_UP} batches of each phase do not count.",
        f"Median step without prefill, ms, by run: {degrees}.",
        f"Load averages at the starts of the runs: {', '.join(f'{run.load:.1f}' for run in runs.values())}.",
    ]
    columns = ["", first, *others, *(f"{first} / {other}" for other in others)]
    rows = table({key: run.phases for key, run in runs.items()}, given.policies)
    raw = [{"policy": key[0], "seed": key[1]} | msgspec.to_builtins(run) for key, run in runs.items()]
    report(given, "Scheduling policies on real engines", columns=columns, rows=rows, notes=notes, raw=raw)


if __name__ == "__main__":
    main()
