"""A whole run on one GPU: planner, trainer and engine as agents without Slurm, weights from the trainer's GPU memory
into the engine's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

STEPS = 10
COMMAND = [sys.executable, "-c", "from libra_hpc_cli.app import main; main()"]
RUN_FILE = """
[run]
name = "gpu"
dir = "{folder}/runs"
steps = {steps}
[slurm]
device = "cuda"
executor = "local"
[components]
planner = {{ cpus = 2, mem = "4G" }}
train = {{ nodes = 1, gpus = 1, mem = "4G" }}
hybrid = {{ nodes = 0 }}
rollout = {{ nodes = 1, gpus = 1, mem = "4G" }}
[model]
path = "{folder}/policy"
dtype = "bfloat16"
[task]
name = "keychain"
[optimizer]
lr = 3e-4
[rollout]
max_model_len = 640
kv_cache_mb = 1024
[checkpoint]
every = 5
"""


def test_a_run_completes_and_both_engines_agree(tmp_path: Path) -> None:
    # The policy's supervised warm start is meant for the CPU.
    hidden = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    subprocess.run(
        [*COMMAND, "make-policy", str(tmp_path / "policy"), "--steps", "200", "--executor", "local"],
        check=True,
        env=hidden,
    )
    run_file = tmp_path / "run.toml"
    run_file.write_text(RUN_FILE.format(folder=tmp_path, steps=STEPS))
    done = subprocess.run([*COMMAND, "submit", str(run_file), "--wait"], capture_output=True, text=True)
    run = next((tmp_path / "runs").iterdir())
    logs = (
        "\n".join(f"{log}: {log.read_text(errors='replace')[-2000:]}" for log in sorted(run.rglob("*.log")))
        if done.returncode
        else ""
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:] + logs
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [m["step"] for m in metrics] == list(range(1, STEPS + 1))
    # Sampled and recomputed log-probabilities differ by rounding, and by the one update an asynchronous sample may be
    # behind.
    assert all(m["logprob_gap"] < 0.1 for m in metrics)
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    assert max(e["version"] for e in events if e["kind"] == "weights_applied") >= STEPS - 1
