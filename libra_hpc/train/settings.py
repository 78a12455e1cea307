"""What a Megatron worker process is told at its start: one JSON file, decoded into `WorkerConfig`.

Plain data: importable on a login node and by an agent, neither of which has torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec


class OptimizerSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """AdamW; biases and norm weights are not decayed."""

    lr: float = 1e-6
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.0
    grad_clip: float = 1.0
    """Largest global gradient norm."""
    warmup_steps: int = 0
    """Optimizer updates over which the learning rate rises linearly: update ``k`` (from 1) uses ``lr * k /
    warmup_steps``."""
    decay_steps: int = 0
    """0: the rate stays constant.  Else total updates; over the last ``anneal_steps`` of them the rate falls
    linearly to 0."""
    anneal_steps: int = 0


class AlgorithmSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """GRPO, see `libra_hpc.train.grpo`."""

    clip: float = 0.2
    is_truncation: float = 2.0
    kl_coef: float = 0.0
    temperature: float = 1.0
    """Sampling temperature of the rollout: log-probabilities are those of ``softmax(logits / temperature)``."""


class WorkerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One process of a replica: rank ``local_rank`` of a torch world of ``tp * pp`` processes, tensor-parallel ranks
    fastest."""

    model_dir: str
    """Hugging Face folder: config.json and tokenizer always, weights when ``start_dir`` is empty."""
    world_rendezvous: str
    """Path of a fresh FileStore shared by the processes of this replica alone."""
    start_dir: str = ""
    """State to start from: a checkpoint, a snapshot, or a folder of snapshots; empty: the weights in ``model_dir``
    at step 0."""
    device: Literal["cpu", "cuda"] = "cpu"
    device_index: int = 0
    """CUDA device of this process."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    tp: int = 1
    pp: int = 1
    local_rank: int = 0
    optimizer: OptimizerSettings = OptimizerSettings()
    algorithm: AlgorithmSettings = AlgorithmSettings()
    micro_tokens: int = 8192
    """Most tokens of one packed micro-batch; a longer sample travels alone."""
    recompute: bool = False
    """Keep only the inputs of layers for the backward pass."""
    snapshot_dir: str = ""
    """Folder (in /dev/shm) for snapshots after committed steps; empty: none."""
    snapshot_every: int = 0
    """Steps between snapshots; 0: none."""
    threads: int = 1
    seed: int = 0
    step_timeout_s: float = 900.0
    """Longest wait for a live but slower peer inside one gradient sum.  A dead peer is noticed at once, by its
    closed socket."""
    join_timeout_s: float = 60.0
    """Longest wait for all members of a generation to appear; a newer order ends it at once."""


def write_config(config: WorkerConfig, path: Path) -> None:
    """Write ``config`` as the JSON file that ``python -m libra_hpc.train.worker --config`` takes."""
    path.write_bytes(msgspec.json.format(msgspec.json.encode(config)))


def read_config(path: Path) -> WorkerConfig:
    """Read a worker's JSON file; raises `msgspec.ValidationError` when it does not fit the schema."""
    return msgspec.json.decode(path.read_bytes(), type=WorkerConfig)
