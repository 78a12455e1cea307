"""A whole run on one GPU: planner, trainer and engine as agents without Slurm, weights from the trainer's GPU memory
into the engine's."""

from __future__ import annotations

from pathlib import Path

from bench.gpu_check_run import run_whole

STEPS = 10


def test_a_run_completes_and_both_engines_agree(tmp_path: Path) -> None:
    records = run_whole(tmp_path, device="cuda", steps=STEPS, kv_cache_mb=1024, limit_s=290.0)
    assert records.problem(STEPS) == ""
