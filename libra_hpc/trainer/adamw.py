"""torch's AdamW with Megatron-Core's sharded state, and the schedule of its learning rate.

Megatron-Core would take the FusedAdam of Transformer Engine or Apex where it can import one. They count the steps of a
group since the start of the process, so that a resumed run would differ from one that was not stopped.
"""

from __future__ import annotations

from typing import Any

import torch

from libra_hpc.config.learn import OptimizerSection
from libra_hpc.trainer.model.mcore import (
    OptimizerConfig,
    OptimizerParamScheduler,
    get_megatron_optimizer,
    get_standard_config_overrides,
)
from libra_hpc.trainer.model.mcore import optimizer as megatron_optimizers

from .model import compat

CONSTANT_STEPS = 1 << 40
""""No end", as a number of steps for Megatron-Core's scheduler."""


def adamw(ddp: Any, dtype: torch.dtype, settings: OptimizerSection) -> Any:
    """The optimizer of a model, its state divided over the data-parallel ranks; biases and norms do not decay."""
    optimizer_config = OptimizerConfig(
        optimizer="adam",
        lr=settings.lr,
        min_lr=0.0,
        weight_decay=settings.weight_decay,
        adam_beta1=settings.beta1,
        adam_beta2=settings.beta2,
        adam_eps=settings.eps,
        # Clipped here, by a norm in float64.
        clip_grad=0.0,
        bf16=dtype is torch.bfloat16,
        params_dtype=dtype,
        use_distributed_optimizer=True,
    )
    megatron_optimizers.USING_PYTORCH_OPTIMIZER = True
    with compat.mcore_device(), compat.masters_in_host_memory(settings.host):
        optimizer = get_megatron_optimizer(
            optimizer_config,
            [ddp],
            config_overrides=get_standard_config_overrides(optimizer_config),
            use_gloo_process_groups=False,
        )
    for part in distributed(optimizer):
        if type(part.optimizer) is not torch.optim.AdamW:
            raise RuntimeError(f"Megatron-Core took {type(part.optimizer)} for torch's AdamW")
        for group in part.optimizer.param_groups:
            # torch's default on a GPU makes temporary tensors of 4 bytes a parameter.
            group.update(fused=True, foreach=False)
    return optimizer


def distributed(optimizer: Any) -> list[Any]:
    """The distributed optimizers inside of Megatron-Core's: one, and one of the experts; none without an optimizer."""
    parts = [] if optimizer is None else getattr(optimizer, "chained_optimizers", [optimizer])
    return [part for part in parts if not part.is_stub_optimizer]


def learning_rate(optimizer: Any, settings: OptimizerSection, updates: int) -> OptimizerParamScheduler:
    """Warm-up, then constant, or with a falling end of which 0 would be the next after all ``updates``."""
    decays, end = settings.decay != "none", 1 + updates
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=settings.lr,
        min_lr=0.0,
        lr_warmup_steps=settings.warmup_steps,
        lr_decay_steps=end if decays else CONSTANT_STEPS,
        lr_decay_style="WSD" if decays else "constant",
        wsd_decay_steps=1 + settings.decay_steps if settings.decay_steps else end - settings.warmup_steps,
        lr_wsd_decay_style=settings.decay if decays else "linear",
        start_wd=settings.weight_decay,
        end_wd=settings.weight_decay,
        wd_incr_steps=CONSTANT_STEPS,
        wd_incr_style="constant",
    )
