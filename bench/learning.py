"""Reward before and after training through the real loop: asynchronously and synchronously, and by each algorithm.

    python -m bench.learning [--seeds 0,1,2,4] [--rows "eta 1|eta 1 kept|eta 4|eta 4 kept|eta 0|grpo|dapo|..."]

- ``eta 1``, ``eta 4``, ``eta 0``: a warm-started policy of the key chain, 200 steps with a staleness bound. ``kept``:
  KV caches are kept at an update; the column ``old KV`` is the share of tokens that were sampled over older ones.
- The others: a tiny chat model learns sums of reasoning-gym, 24 steps of two minibatches with eta 1. The task is
  `chain_sum` with three terms of two digits, and the calculator of `examples/my_gym_task.py`; ``no tool``: without it.
- Policies are evaluated on the same held-out prompts at temperature 1. Goals: +0.25 in every seed of the key chain,
  +0.2 of the sums, at most +0.05 without the tool.

The warm start of seed 3 did not learn to copy digits: it is at 0.02, below the start of 0.1 to 0.5 that was fixed.
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path
from typing import Any

from libra_hpc_cli.evaluate import evaluation_config, new_folder, queued, results_of

from bench.harness import KEYCHAIN, POLICIES, child, options, policy, progress, report, spread, submit
from libra_hpc.config.learn import EvalPart
from libra_hpc.config.load import load_resolved
from libra_hpc.facts.rundir import RunDir, read_lines

HELD_OUT = "held-out"
HELD_OUT_SEED = 1000
"""Of the sums that policies are evaluated on; runs have those from 0."""
SIZES = {"min_terms": 3, "max_terms": 3, "min_digits": 2, "max_digits": 2}
TOOL, NO_TOOL = "examples/my_gym_task.py:Sums", "reasoning_gym:chain_sum"
WARM_STEPS = 1500
CHAIN = {"run.steps": 200, "checkpoint.every": 0}
SUMS = {
    "run.steps": 24,
    "checkpoint.every": 0,
    "task.name": TOOL,
    "task.trial": "false",
    "algorithm.minibatches": 2,
    "algorithm.guard": "off",
    "rollout.max_model_len": 320,
    **{f"task.options.{name}": value for name, value in SIZES.items()},
}
ROWS: dict[str, dict[str, Any]] = {
    "eta 1": CHAIN | {"algorithm.eta": 1},
    "eta 1 kept": CHAIN | {"algorithm.eta": 1, "rollout.kv_after_update": "keep"},
    "eta 4": CHAIN | {"algorithm.eta": 4},
    "eta 4 kept": CHAIN | {"algorithm.eta": 4, "rollout.kv_after_update": "keep"},
    "eta 0": CHAIN | {"algorithm.eta": 0},
    "grpo": SUMS | {"algorithm.aggregate": "sequence"},
    "dapo": SUMS
    | {"algorithm.aggregate": "token", "algorithm.clip": [0.2, 0.28]}
    | {"algorithm.overlong_soft": 64, "algorithm.truncated": "mask"},
    "gspo": SUMS | {"algorithm.aggregate": "sequence", "algorithm.loss": "gspo", "algorithm.clip": [0.02, 0.03]},
    "cispo": SUMS | {"algorithm.aggregate": "token", "algorithm.loss": "cispo", "algorithm.clip": [0.2, 0.28]},
    "no tool": SUMS | {"algorithm.aggregate": "sequence", "task.name": NO_TOOL},
}
OVERRIDES = {"slurm.device": "cpu", "model.dtype": "float32", "rollout.kv_cache_mb": 64}
COLUMNS = ["", "reward before", "reward after", "gain, mean ± std. error", "smallest", "log-prob. gap", "old KV"]


def chat_policy(seed: int) -> Path:
    """A chat model warm-started with and without the tool, made once under `models/`."""
    folder = POLICIES / f"chat-{seed}-{WARM_STEPS}"
    if not (folder / "generation_config.json").exists():
        progress(f"making {folder.name} ...")
        code = (
            "from bench.chat_model import Lesson, make_chat_model, summer; from pathlib import Path;"
            f" lessons = [Lesson(task, {SIZES}, summer) for task in ({TOOL!r}, {TOOL!r}, {TOOL!r}, {NO_TOOL!r})];"
            f" make_chat_model(Path({str(folder)!r}), lessons, seed={seed}, steps={WARM_STEPS}); print(0)"
        )
        child("-c", code)
    return folder


def evaluate(policies: dict[int, str], run: RunDir, sums: bool) -> list[float]:
    """The mean reward of each policy as `libra-hpc eval` makes it, with the task and the engines of ``run``."""
    config = load_resolved(run.config)
    own = {**config.task.options, "seed": HELD_OUT_SEED} if sums else config.task.options
    part = EvalPart(name=HELD_OUT, task=config.task.name, options=own, prompts=256 if sums else 512)
    config = evaluation_config(config.changed(task={"eval": [part]}), HELD_OUT, None, Path(policies[0]), 1)
    place = new_folder(config, run.path / "evaluations", policies)
    return [float(found["mean"]) for found in results_of(queued(config, place, policies), place)]


def play(name: str, seed: int, lr: float) -> tuple[float, ...]:
    """Rewards before and after a run, its mean `logprob_gap` in nats, and its share of tokens over older KV."""
    sums = "task.name" in ROWS[name]
    model = chat_policy(seed) if sums else policy(seed)
    with tempfile.TemporaryDirectory(prefix="libra-learning-") as folder:
        own = {"run.name": "learning", "run.dir": folder, "run.seed": seed, "model.path": model, "optimizer.lr": lr}
        submit(KEYCHAIN, "--wait", "--executor", "local", overrides=OVERRIDES | own | ROWS[name])
        run = RunDir(Path(folder, "learning-001"))
        steps = list(read_lines(run.metrics))
        before, after = evaluate({0: str(model), len(steps): str(run.policy)}, run, sums)
        gap = statistics.fmean(step["logprob_gap"] for step in steps if "logprob_gap" in step)
        old_kv = sum(step["old_kv_tokens"] for step in steps) / sum(step["gen_tokens"] for step in steps)
    found = before, after, gap, old_kv
    progress(f"{name}, seed {seed}: {found}")
    return found


def line(name: str, found: list[tuple[float, ...]]) -> list[str]:
    before, after, gap, old_kv = zip(*found, strict=True)
    gains = [b - a for a, b, *_ in found]
    error = statistics.stdev(gains) / len(gains) ** 0.5 if len(gains) > 1 else float("nan")
    ranges = [f"{min(values):.2f}..{max(values):.2f}" for values in (before, after)]
    return [
        name,
        *ranges,
        f"{statistics.fmean(gains):+.3f} ± {error:.3f}",
        f"{min(gains):+.3f}",
        spread(gap, ".4f"),
        spread(old_kv),
    ]


def main() -> None:
    given = options("learning", __doc__, rows=ROWS, seeds=[0, 1, 2, 4], lr=6e-4)
    raw = {name: [play(name, seed, given.lr) for seed in given.seeds] for name in given.rows}
    rows = [line(name, found) for name, found in raw.items()]
    notes = [f"Steps of 8 prompts x 8 samples, lr {given.lr}; {len(given.seeds)} seeds; held-out prompts."]
    report(given, "Learning through the real loop", columns=COLUMNS, rows=rows, notes=notes, raw=raw)


if __name__ == "__main__":
    main()
