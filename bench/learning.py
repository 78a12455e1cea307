"""Reward before and after training through the real loop, asynchronous (eta 1) and synchronous (eta 0).

    python bench/learning.py [--seeds 0,1,2] [--steps 200] [--executor local]

Each seed trains a warm-started policy with both staleness bounds.  All policies are evaluated on the same 512 episodes
at temperature 1.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.harness import engine_environment, policy, report

EPISODES = 512
RUN_FILE = """
[run]
name = "learning"
dir = "{dir}"
seed = {seed}
steps = {steps}
[slurm]
device = "cpu"
time_limit = "00:30:00"
[components]
planner = {{ cpus = 2, mem = "4G" }}
train = {{ nodes = 1, mem = "4G" }}
hybrid = {{ nodes = 0 }}
rollout = {{ nodes = 1, mem = "4G" }}
[model]
path = "{model}"
dtype = "float32"
[task]
name = "keychain"
[algorithm]
eta = {eta}
[optimizer]
lr = 6e-4
[rollout]
max_model_len = 640
kv_cache_mb = 64
[checkpoint]
every = 0
"""


def train(folder: Path, model: Path, *, seed: int, steps: int, eta: int, executor: str) -> tuple[Path, float]:
    """One run; returns its directory and the seconds from the first to the last step."""
    run_file = folder / f"run-{seed}-{eta}.toml"
    run_file.write_text(RUN_FILE.format(dir=folder / f"runs-{eta}", seed=seed, steps=steps, model=model, eta=eta))
    command = [
        str(Path(sys.executable).with_name("libra-hpc")),
        "submit",
        str(run_file),
        "--wait",
        "--executor",
        executor,
    ]
    subprocess.run(command, check=True, env=engine_environment(), stdout=subprocess.DEVNULL)
    run = max((folder / f"runs-{eta}").glob("learning-*"))
    times = [json.loads(line)["t"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    return run, times[-1] - times[0]


def evaluate(folder: Path, config: Path) -> dict[str, Any]:
    argv = [
        sys.executable,
        "-m",
        "libra_hpc.engine.evaluate",
        "--policy",
        str(folder),
        "--config",
        str(config),
        "--episodes",
        str(EPISODES),
    ]
    output = subprocess.run(
        argv, check=True, env=engine_environment(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ).stdout
    result: dict[str, Any] = json.loads(output.splitlines()[-1])
    return result


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--executor", default="local")
    arguments = parser.parse_args()
    rows, raw = [], []
    with tempfile.TemporaryDirectory(prefix="libra-learning-") as name:
        for seed in map(int, arguments.seeds.split(",")):
            model = policy(seed)
            begin = None
            for eta, label in ((1, "asynchronous, eta 1"), (0, "synchronous, eta 0")):
                started = time.monotonic()
                run, seconds = train(
                    Path(name), model, seed=seed, steps=arguments.steps, eta=eta, executor=arguments.executor
                )
                begin = begin or evaluate(model, run / "config.json")
                after = evaluate(run / "policy", run / "config.json")
                metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
                stale = max(m["staleness_max"] for m in metrics)
                gain = after["reward"] - begin["reward"]
                rows.append(
                    [
                        f"{seed}, {label}",
                        begin["reward"],
                        after["reward"],
                        f"{gain:+.3f}",
                        after["reward_stderr"],
                        stale,
                        seconds,
                    ]
                )
                raw.append(
                    {
                        "seed": seed,
                        "eta": eta,
                        "before": begin,
                        "after": after,
                        "run_s": seconds,
                        "wall_s": time.monotonic() - started,
                    }
                )
                print(
                    f"seed {seed} {label}: {begin['reward']:.3f} -> {after['reward']:.3f} in {seconds:.0f} s",
                    file=sys.stderr,
                )
    columns = ["seed", "reward before", "reward after", "gain", "std. error", "max staleness", "s for the steps"]
    notes = [
        f"{arguments.steps} steps of 8 prompts x 8 samples; evaluation: {EPISODES} fixed episodes at temperature 1;"
        " goal: gain >= 0.25 in every seed."
    ]
    title = "Learning through the real loop"
    report("learning", title=title, columns=columns, rows=rows, notes=notes, raw=raw)


if __name__ == "__main__":
    main()
