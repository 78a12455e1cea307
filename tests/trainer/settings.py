"""Settings of a worker for tests: those of an empty run file, but for what a test names."""

from __future__ import annotations

from typing import Any

import msgspec

from libra_hpc.config.run import RunConfig
from libra_hpc.trainer import settings
from libra_hpc.trainer.settings import AlgorithmSettings, OptimizerSettings, WorkerConfig

_run = RunConfig()


def optimizer(**changes: float) -> OptimizerSettings:
    """AdamW."""
    return msgspec.structs.replace(settings.optimizer_settings(_run), **changes)


def algorithm(**changes: Any) -> AlgorithmSettings:
    """GRPO."""
    return msgspec.structs.replace(settings.algorithm_settings(_run), **changes)


def worker_config(**changes: Any) -> WorkerConfig:
    """One process on a CPU, in float32."""
    values: dict[str, Any] = {
        **dict.fromkeys(("model_dir", "world_rendezvous", "start_dir"), ""),
        "device": "cpu",
        "device_index": 0,
        "dtype": "float32",
        "threads": 1,
        "seed": 0,
        "tp": 1,
        "pp": 1,
        "rank": 0,
        "micro_tokens": _run.train.micro_tokens,
        "recompute": "none",
        "optimizer": optimizer(),
        "algorithm": algorithm(),
    }
    return WorkerConfig(**values | changes)
