"""Reward before and after training through the real loop, asynchronous (eta 1) and synchronous (eta 0).

    python -m bench.learning [--seeds 0,1,2] [--steps 200] [--executor local]

Each seed trains a warm-started policy with both staleness bounds.  All policies are evaluated on the same 512 episodes
at temperature 1.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from bench.harness import KEYCHAIN, child, options, policy, progress, report, submit
from libra_hpc.facts.rundir import RunDir, read_lines

EPISODES = 512
BOUNDS = {"asynchronous, eta 1": 1, "synchronous, eta 0": 0}
OVERRIDES = {
    "run.name": "learning",
    "slurm.device": "cpu",
    "model.dtype": "float32",
    "optimizer.lr": 6e-4,
    "rollout.kv_cache_mb": 64,
    "checkpoint.every": 0,
}
COLUMNS = ["seed", "reward before", "reward after", "gain", "std. error", "max staleness", "s for the steps"]


def train(folder: Path, model: Path, *, seed: int, steps: int, eta: int, executor: str) -> RunDir:
    own = {"run.dir": folder / f"runs-{eta}", "run.seed": seed, "run.steps": steps}
    own |= {"model.path": model, "algorithm.eta": eta}
    submit(KEYCHAIN, "--wait", "--executor", executor, overrides=OVERRIDES | own)
    return RunDir(max((folder / f"runs-{eta}").glob("learning-*")))


def evaluate(folder: Path, config: Path) -> dict[str, Any]:
    words = ("--policy", str(folder), "--config", str(config), "--episodes", str(EPISODES))
    result: dict[str, Any] = child("-m", "bench.evaluate", *words)
    return result


def main() -> None:
    given = options("learning", __doc__, seeds=[0, 1, 2], steps=200, executor="local")
    rows, raw = [], []
    with tempfile.TemporaryDirectory(prefix="libra-learning-") as name:
        for seed in given.seeds:
            model, before = policy(seed), None
            for label, eta in BOUNDS.items():
                run = train(Path(name), model, seed=seed, steps=given.steps, eta=eta, executor=given.executor)
                before = before or evaluate(model, run.config)
                after, metrics = evaluate(run.path / "policy", run.config), list(read_lines(run.metrics))
                start, end, seconds = before["reward"], after["reward"], metrics[-1]["t"] - metrics[0]["t"]
                stale = max(line["staleness_max"] for line in metrics)
                gain = f"{end - start:+.3f}"
                rows.append([f"{seed}, {label}", start, end, gain, after["reward_stderr"], stale, seconds])
                raw.append({"seed": seed, "eta": eta, "before": before, "after": after, "run_s": seconds})
                progress(f"seed {seed} {label}: {start:.3f} -> {end:.3f} in {seconds:.0f} s")
    notes = [
        f"{given.steps} steps of 8 prompts x 8 samples; evaluation: {EPISODES} fixed episodes at temperature 1.",
        "Goal: gain >= 0.25 in every seed.",
    ]
    report(given, "Learning through the real loop", columns=COLUMNS, rows=rows, notes=notes, raw=raw)


if __name__ == "__main__":
    main()
