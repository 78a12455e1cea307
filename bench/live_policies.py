"""Scheduling policies on real engines of TP=1 and TP=2: the quickstart on the embedded Slurm, with equal seeds.

    python bench/live_policies.py [--policies cmlfq,least_loaded] [--seeds 0,1,2] [--steps 40] [--json]

`examples/quickstart.toml` with two rollout nodes and no hybrid node, submitted as by a user.  To make runs comparable:

* ``eta = 0`` (see `bench.live_figures`), and the planner is off.
* No prompt is admitted before both engines are up (`bench.live_task`).
* The order of the policies is reversed with every other seed.

Equal seeds give equal prompts and an equal start of the policy network; batches are equal in distribution only.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import msgspec

from bench.harness import ROOT, engine_environment, policy, report
from bench.live_figures import Figures, by_phase, figures, step_ms, table
from bench.policies import POLICIES
from libra_hpc.engine.steplog import read_steps
from libra_hpc.errors import OperationError
from libra_hpc.facts.rundir import RunDir, read_lines
from libra_hpc.slurm import submit
from libra_hpc.slurm.devcluster.cluster import Cluster
from libra_hpc.slurm.site_commands import clean_environment

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


class Run(msgspec.Struct, frozen=True):
    """One run and its figures."""

    policy: str
    seed: int
    load: float
    """Load average of the machine before the first prompt, the run's own start included."""
    seconds: float
    """From the first admission to the end of the run."""
    phases: list[Figures]
    step_ms: dict[str, float]
    """Engine -> median milliseconds of a step without prefill."""
    prefilled: dict[str, int]
    """Engine -> prompt tokens computed, warm-up included."""


def progress(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


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


def overrides(scheduler: str, seed: int, steps: int, folder: Path) -> list[str]:
    """Settings that differ from the quickstart."""
    return [
        f"run.dir={folder / 'runs'}",
        f"run.seed={seed}",
        f"run.steps={steps}",
        f"model.path={policy(0)}",
        "slurm.executor=slurm",
        "components.hybrid.nodes=0",
        "components.rollout.nodes=2",
        f"rollout.tp={list(ENGINES.values())}",
        f"rollout.policy={POLICIES[scheduler]}",
        "rollout.record_steps=true",
        "algorithm.eta=0",
        f"algorithm.prompts_per_step={PROMPTS}",
        "planner.enabled=false",
        "checkpoint.every=0",
        f"task.name={Path(__file__).with_name('live_task.py')}:HeldKeyChain",
        f"task.options.gate={folder / 'gate'}",
    ]


def start(scheduler: str, *, seed: int, steps: int, env: dict[str, str], folder: Path) -> RunDir:
    """Submit a run and wait until both engines are up; its prompts wait for ``folder / "gate"``.

    Raises `OperationError` when the engines do not start.
    """
    command = [str(Path(sys.executable).with_name("libra-hpc")), "submit", str(RUN_FILE), "--json"]
    for override in overrides(scheduler, seed, steps, folder):
        command += ["-o", override]
    done = subprocess.run(command, env=env, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    run = RunDir(json.loads(done.stdout)["path"])
    wait(run, env, lambda: up(run))
    return run


def up(run: RunDir) -> bool:
    return ENGINES.keys() <= {event["engine"] for event in read_lines(run.events) if event["kind"] == "engine_ready"}


def play(scheduler: str, *, seed: int, steps: int, env: dict[str, str], folder: Path) -> Run:
    """One run from submission to figures.  Raises `OperationError` when it does not complete."""
    folder.mkdir()
    run = start(scheduler, seed=seed, steps=steps, env=env, folder=folder)
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
        policy=scheduler,
        seed=seed,
        load=load,
        seconds=seconds,
        phases=[
            figures(scheduler, seed=seed, phase=phase, lines=lines, prompts=PROMPTS) for phase, lines in phases.items()
        ],
        step_ms={name: step_ms(points) for name, points in logs.items()},
        prefilled={name: sum(point.prefill for point in points) for name, points in logs.items()},
    )


def wait(run: RunDir, env: dict[str, str], condition: Callable[[], bool], ended: bool = False) -> None:
    """Wait for ``condition``; `OperationError` after `PATIENCE_S` or, unless ``ended``, when the job has ended."""
    began = queried = time.monotonic()
    while not condition():
        now, over = time.monotonic(), False
        if now > queried + SLURM_POLL_S and not ended:
            queried, over = now, submit.state(run, env).state.ended
        if (over and not condition()) or now > began + PATIENCE_S:
            result = run.read_json(run.result)
            raise OperationError(
                f"{run.path}: {result.get('reason') or result.get('state') or 'the job made no progress'}; see"
                f" {run.logs(1)}"
            )
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


def order(policies: list[str], turn: int) -> list[str]:
    """Reverse the order with every other seed, so that drift of the machine's speed cancels."""
    return policies[::-1] if turn % 2 else policies


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--policies",
        default="cmlfq,least_loaded",
        help=f"the first is compared with the others; of {', '.join(POLICIES)}",
    )
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--json", action="store_true", help="print every run's figures instead of the table")
    options = parser.parse_args()
    policies, seeds = options.policies.split(","), [int(seed) for seed in options.seeds.split(",")]
    policy(0)
    # SIGTERM must stop the cluster too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    runs: list[Run] = []
    try:
        with tempfile.TemporaryDirectory(prefix="libra-live-") as name, cluster() as env:
            for turn, seed in enumerate(seeds):
                for scheduler in order(policies, turn):
                    progress(f"{scheduler}, seed {seed}: starting, {len(runs) + 1} of {len(seeds) * len(policies)}")
                    folder = Path(name) / f"{scheduler}-{seed}"
                    run = play(scheduler, seed=seed, steps=options.steps, env=env, folder=folder)
                    runs.append(run)
                    words = ", ".join(f"{one.phase} {one.batch_s:.3f} s a batch" for one in run.phases)
                    progress(f"{scheduler}, seed {seed}: {words}; {run.seconds:.0f} s, load {run.load:.1f}")
    finally:
        # After an early end, the complete seeds are reported.
        whole = [run for run in runs if {other.policy for other in runs if other.seed == run.seed} == set(policies)]
        if whole and options.json:
            print(json.dumps(msgspec.to_builtins(whole), indent=1))
        elif whole:
            show(whole, policies, options.steps)


def show(runs: list[Run], policies: list[str], steps: int) -> None:
    """Report the table with notes."""
    columns = ["", *policies, *(f"{policies[0]} / {other}" for other in policies[1:])]
    degrees = "; ".join(
        f"TP={tp} " + ", ".join(f"{run.step_ms[name]:.1f}" for run in runs) for name, tp in ENGINES.items()
    )
    notes = [
        (
            f"Quickstart task, {steps} steps of {PROMPTS} prompts, eta 0, {len(runs) // len(policies)} seeds; medians"
            " over seeds."
        ),
        f"Ratios are taken within a seed: median and range.  The first {WARM_UP} batches of each phase do not count.",
        f"Median step without prefill, ms, by run: {degrees}.",
        f"Load averages at the starts of the runs: {', '.join(f'{run.load:.1f}' for run in runs)}.",
    ]
    rows = table([one for run in runs for one in run.phases], policies, ENGINES)
    title = "Scheduling policies on real engines"
    report("live_policies", title=title, columns=columns, rows=rows, notes=notes, raw=msgspec.to_builtins(runs))


if __name__ == "__main__":
    main()
