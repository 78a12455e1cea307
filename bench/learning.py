"""Reward before and after training through the real loop, asynchronous (eta 1) and synchronous (eta 0).

    python -m bench.learning [--seeds 0,1,2] [--steps 200] [--executor local]

Each seed trains a warm-started policy with both staleness bounds.  All policies are evaluated on the same 512 prompts
at temperature 1, which training does not reach.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from libra_hpc_cli.evaluate import evaluation_config, queued, result_of

from bench.harness import KEYCHAIN, options, policy, progress, report, submit
from libra_hpc.config.learn import EvalPart
from libra_hpc.config.load import load_resolved
from libra_hpc.facts.rundir import RunDir, read_lines

PROMPTS = 512
HELD_OUT = "held-out"
BOUNDS = {"asynchronous, eta 1": 1, "synchronous, eta 0": 0}
OVERRIDES = {
    "slurm.device": "cpu",
    "model.dtype": "float32",
    "optimizer.lr": 6e-4,
    "rollout.kv_cache_mb": 64,
    "checkpoint.every": 0,
}
COLUMNS = ["seed", "reward before", "reward after", "gain", "std. error", "max staleness", "s for the steps"]


def train(folder: Path, model: Path, executor: str, own: Mapping[str, Any]) -> RunDir:
    """The smallest run with `OVERRIDES` and those of ``own``, below ``folder``."""
    where = {"run.name": folder.name, "run.dir": folder, "model.path": model}
    submit(KEYCHAIN, "--wait", "--executor", executor, overrides=OVERRIDES | where | dict(own))
    return RunDir(max(folder.glob(f"{folder.name}-*")))


def evaluate(policy: Path, run: RunDir, prompts: int = PROMPTS, **options: Any) -> dict[str, Any]:
    """The line of an evaluation as `libra-hpc eval` makes it, with the task and the engines of ``run``.

    ``options``: of the task, beside those of the run.
    """
    config = load_resolved(run.config)
    task = config.task
    part = EvalPart(name=HELD_OUT, task=task.name, options={**task.options, **options}, prompts=prompts)
    config = evaluation_config(config.changed(task={"eval": [part]}), HELD_OUT, None, policy, 1)
    place, handle = queued(config, run.path / "evaluations", HELD_OUT, 0)
    return result_of(handle, place)


def main() -> None:
    given = options("learning", __doc__, seeds=[0, 1, 2], steps=200, executor="local")
    rows, raw = [], []
    with tempfile.TemporaryDirectory(prefix="libra-learning-") as name:
        for seed in given.seeds:
            model, before = policy(seed), None
            for label, eta in BOUNDS.items():
                own = {"run.seed": seed, "run.steps": given.steps, "algorithm.eta": eta}
                run = train(Path(name) / f"eta-{eta}", model, given.executor, own)
                before = before or evaluate(model, run)
                after, metrics = evaluate(run.path / "policy", run), list(read_lines(run.metrics))
                start, end, seconds = before["mean"], after["mean"], metrics[-1]["t"] - metrics[0]["t"]
                stale = max(line["staleness_max"] for line in metrics)
                gain = f"{end - start:+.3f}"
                rows.append([f"{seed}, {label}", start, end, gain, after["stderr"], stale, seconds])
                raw.append({"seed": seed, "eta": eta, "before": before, "after": after, "run_s": seconds})
                progress(f"seed {seed} {label}: {start:.3f} -> {end:.3f} in {seconds:.0f} s")
    notes = [
        f"{given.steps} steps of 8 prompts x 8 samples; evaluation: {PROMPTS} fixed prompts at temperature 1.",
        "Goal: gain >= 0.25 in every seed.",
    ]
    report(given, "Learning through the real loop", columns=COLUMNS, rows=rows, notes=notes, raw=raw)


if __name__ == "__main__":
    main()
