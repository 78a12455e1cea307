"""Settings of a Megatron worker process: one JSON file, decoded into `WorkerConfig`.

Needs neither torch nor pydantic: a dry run starts many workers on one machine. Defaults of what a run
file may set stand in `libra_hpc.config` alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from libra_hpc.errors import UserError
from libra_hpc.models.memory import Recompute
from libra_hpc.models.shapes import model_shape

if TYPE_CHECKING:
    from libra_hpc.config.run import RunConfig


class OptimizerSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """AdamW; biases and norm weights are not decayed."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    grad_clip: float
    warmup_steps: int
    """Updates over which the learning rate rises linearly: update ``k`` (from 1) uses ``lr * k / warmup_steps``."""
    decay_steps: int = 0
    """The update at which the rate is 0, after ``anneal_steps`` that lower it; 0: the rate stays constant."""
    anneal_steps: int = 0
    decay: str = "linear"
    """A style of Megatron-Core's scheduler."""


class AlgorithmSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """GRPO, see `libra_hpc.trainer.grpo`."""

    loss: str
    """A name of `libra_hpc.trainer.losses`, or ``file.py:f``."""
    clip: tuple[float, float]
    """Below and above a ratio of 1."""
    by_sequence: bool
    """Sequences weigh the same, not tokens."""
    is_truncation: float
    mask_tokens: tuple[float, ...] = ()
    """Lowest and highest ratio of a token that is trained on; empty: any."""
    mask_sequences: tuple[float, ...] = ()
    """The same of the product over a sequence."""
    kl: str = "k3"
    kl_in: str = "loss"
    """``loss`` or ``reward``."""
    kl_coef: float
    reference: str
    """Folder of the reference policy; empty: there is none."""
    reference_kl_coef: float
    temperature: float
    """Sampling temperature of the rollout: log-probabilities are those of ``softmax(logits / temperature)``."""


class WorkerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One process: rank ``rank`` of a torch world of ``tp * pp * cp * dp``.

    Tensor ranks count fastest, then context ranks, data-parallel ranks and stages.
    """

    model_dir: str
    """Hugging Face folder: config.json and tokenizer always, weights when ``start_dir`` is empty."""
    world_rendezvous: str
    """Path of a fresh FileStore that only the processes of this world share."""
    start_dir: str
    """Checkpoint or snapshot to start from; empty: the weights in ``model_dir`` at step 0."""
    device: Literal["cpu", "cuda"]
    device_index: int
    dtype: Literal["float32", "bfloat16"]
    tp: int
    pp: int
    dp: int = 1
    cp: int = 1
    """Context ranks, which share the tokens of a pack."""
    ep: int = 1
    """Expert-parallel ranks among the processes of a stage."""
    etp: int = 0
    """Tensor ranks of an expert: 1 or ``tp``; 0: ``tp``."""
    core_dp: int = 1
    """Data-parallel ranks of the core, which owns the optimizer state; in the core itself ``dp``."""
    elastic_dp: int = 1
    """Data-parallel ranks of every replica beside the core; in one of them ``dp``."""
    elastic: bool = False
    """A replica without optimizer, outside the core."""
    rank: int
    optimizer: OptimizerSettings
    algorithm: AlgorithmSettings
    attention: float = 0.0
    """Work of attention of a sample per squared token, in the work of all else per token; 0: tokens alone count."""
    micro_tokens: int
    """Most tokens of one packed micro-batch; a longer sample is a micro-batch of its own."""
    recompute: Recompute
    """What layers do not store for the backward pass."""
    threads: int
    seed: int
    step_timeout_s: float = 900.0
    """Longest wait for a slower peer in one gradient sum.  A dead peer needs none: its socket closes at once."""
    random_weights: bool = False
    """Start from random weights of the model's shape, for a measurement of speed; ``model_dir`` then needs none."""
    join_timeout_s: float = 60.0
    """Longest wait for all members of a generation to appear; a newer order ends it at once."""


def optimizer_settings(config: RunConfig) -> OptimizerSettings:
    given = msgspec.to_builtins(config.optimizer)
    decay, last = given.pop("decay"), given.pop("decay_steps")
    if decay != "none":
        end = 1 + config.updates
        given |= {"decay": decay, "decay_steps": end, "anneal_steps": 1 + last if last else end - given["warmup_steps"]}
    return OptimizerSettings(**given)


def algorithm_settings(config: RunConfig) -> AlgorithmSettings:
    algorithm = config.algorithm
    return AlgorithmSettings(
        loss=algorithm.loss,
        clip=algorithm.clip_range,
        by_sequence=algorithm.aggregate == "sequence",
        is_truncation=algorithm.is_truncation,
        mask_tokens=tuple(algorithm.mask_tokens),
        mask_sequences=tuple(algorithm.mask_sequences),
        kl=algorithm.kl,
        kl_in=algorithm.kl_in,
        kl_coef=algorithm.kl_coef,
        reference=algorithm.reference_folder(config.model.path),
        reference_kl_coef=algorithm.reference_kl_coef,
        temperature=config.rollout.temperature,
    )


def attention_work(config: RunConfig) -> float:
    """``attention`` of `WorkerConfig`, of the model's own sizes; 0 where they are not known, as in a dry run."""
    try:
        shape = model_shape(config.model.path)
    except UserError:
        return 0.0
    # Causal: half of all pairs.
    return 0.5 * shape.attention_flops_per_pair / (shape.layer_flops_per_token + shape.head_flops_per_token)


def write_config(config: WorkerConfig, path: Path) -> None:
    path.write_bytes(msgspec.json.format(msgspec.json.encode(config)))


def read_config(path: Path) -> WorkerConfig:
    """Raises `msgspec.ValidationError` when the file does not fit the schema."""
    return msgspec.json.decode(path.read_bytes(), type=WorkerConfig)
