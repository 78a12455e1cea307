"""Settings of a worker for tests: those of an empty run file, but for what a test names."""

from __future__ import annotations

from typing import Any

import msgspec

from libra_hpc.config.learn import OptimizerSection
from libra_hpc.config.run import RunConfig
from libra_hpc.trainer.settings import WorkerConfig

MICRO_TOKENS = 96


def optimizer(**changes: Any) -> OptimizerSection:
    """AdamW."""
    return msgspec.structs.replace(RunConfig().optimizer, **changes)


def algorithm(temperature: float = 1.0, **changes: Any) -> RunConfig:
    """A run whose ``[algorithm]`` has ``changes``."""
    sections = {"rollout": {"temperature": temperature}, "train": {"micro_tokens": MICRO_TOKENS}}
    return RunConfig().changed(algorithm=changes, **sections)


def worker_config(
    run: RunConfig | None = None,
    *,
    optimizer: OptimizerSection | None = None,
    model_dir: str = "",
    device: str = "cpu",
    dtype: str = "float32",
    recompute: str = "none",
    core_dp: int = 0,
    elastic_dp: int = 1,
    tp: int = 1,
    pp: int = 1,
    cp: int = 1,
    dp: int = 1,
    ep: int = 1,
    etp: int = 0,
    **place: Any,
) -> WorkerConfig:
    """One process on a CPU, in float32; ``place``: fields of `WorkerConfig`."""
    run = run or RunConfig()
    parts = run.components
    components = {
        "train": msgspec.structs.replace(parts.train, nodes=core_dp or dp),
        "hybrid": msgspec.structs.replace(parts.hybrid, nodes_per_replica=elastic_dp),
    }
    degrees = {"tp": tp, "pp": pp, "cp": cp, "ep": ep, "etp": etp, "processes": tp * pp * cp}
    made = run.changed(
        model={"path": model_dir, "dtype": dtype},
        slurm={"device": device},
        components=components,
        train={**degrees, "recompute": recompute},
    )
    if optimizer is not None:
        made = msgspec.structs.replace(made, optimizer=optimizer)
    return WorkerConfig(run=made, **{"world_rendezvous": "", "rank": 0, **place})
