"""torch's AdamW, the schedule of its rate, and the fp32 state of one rank: shards of weights and moments, two counters.

Megatron-Core would take the FusedAdam of Transformer Engine or Apex where it can import one. They count the steps of a
group since the start of the process, so that a resumed run would differ from one that was not stopped.

Its distributed optimizer cuts the flat weights of a rank into one piece per data-parallel rank, across parameter
boundaries (arXiv 1910.02054, stage 1). A rank alone owns everything. All else is derived: weights of the model's type
are the shards, rounded and gathered over the data-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from libra_hpc.config.learn import OptimizerSection
from libra_hpc.trainer.device import host_buffer
from libra_hpc.trainer.model.mcore import (
    OptimizerConfig,
    OptimizerParamScheduler,
    get_megatron_optimizer,
    get_standard_config_overrides,
)
from libra_hpc.trainer.model.mcore import optimizer as megatron_optimizers

from ..model import compat
from .weight_changes import ShardWeights, WeightChanges

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


class Shard(NamedTuple):
    """Elements ``begin:end`` of a flattened parameter of this rank; tensors are float32[end - begin]."""

    begin: int
    end: int
    master: torch.Tensor
    """The weights; for a float32 model a view of the parameter."""
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor

    def kinds(self) -> dict[str, torch.Tensor]:
        return {"master": self.master, "exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq}


class OptimizerState:
    """See the module docstring; built before the first update, where torch would create Adam's moments."""

    def __init__(
        self,
        optimizer: Any,
        parameters: Mapping[str, torch.nn.Parameter],
        frozen: Mapping[str, tuple[int, int]] | None = None,
        host: bool = False,
    ) -> None:
        """``frozen``: parameters that are not trained; of each, first and last element for which this rank stands.
        Adapters, which are trained beside them, are in float32 whatever the weights are in. ``host``: the state is in
        host memory, but for what is trained in float32; `HostedAdamW` steps it."""
        self.step = 0
        self.updates = 0
        """Optimizer updates, without skipped ones: Adam's counter."""
        self.parameters = parameters
        self._optimizers = distributed(optimizer)
        self.mixed = any(p.dtype is not torch.float32 for p in parameters.values() if p.requires_grad)
        """Whether what is trained is in less than float32, with float32 masters beside it."""
        self._counters: list[torch.Tensor] = []
        zeros = self._host_memory() if host else torch.zeros_like
        found: dict[str, Shard] = {}
        names = {id(parameter): name for name, parameter in parameters.items()}
        for one in self._optimizers:
            for parameter, master in _owned(one):
                span = one._get_model_param_range_map(parameter)["param"]
                found[names[id(parameter)]] = shard = Shard(span.start, span.end, master, zeros(master), zeros(master))
                if not host:
                    self._hand_over(one.optimizer, shard)
        self.shards = {name: found[name] for name in parameters if name in found}
        """By Megatron-Core name, in the order of ``parameters``; parameters without a share of this rank are absent."""
        self.changes = WeightChanges()
        self.derived: Callable[[], None] = lambda: None
        """Derives weights from what is trained, where that is not the weights."""
        self.spans = {name: (shard.begin, shard.end) for name, shard in self.shards.items()} | dict(frozen or {})
        """First and last element of each flattened weight of which this rank offers the values."""
        if optimizer is not None:
            self._record(names, frozen or {})

    def _hand_over(self, optimizer: torch.optim.Optimizer, shard: Shard) -> None:
        """Have torch's optimizer step these moments."""
        self._counters.append(counter := torch.zeros((), dtype=torch.float32, device=shard.master.device))
        moments = {"exp_avg": shard.exp_avg, "exp_avg_sq": shard.exp_avg_sq}
        optimizer.state[shard.master] = {"step": counter, **moments}

    def _host_memory(self) -> Callable[[torch.Tensor], torch.Tensor]:
        """Move float32 masters to one buffer; returns what gives zeros for a tensor of the state there."""
        owned = [pair for one in self._optimizers for pair in _owned(one)]
        sizes = sum(master.numel() for _, master in owned)
        device = owned[0][0].device if owned else torch.device("cpu")
        buffer, used = host_buffer(device, (2 + self.mixed) * sizes), 0

        def zeros(like: torch.Tensor) -> torch.Tensor:
            nonlocal used
            used += like.numel()
            return buffer[used - like.numel() : used].zero_()

        for _, master in owned if self.mixed else ():
            master.data = zeros(master).copy_(master)
        return zeros

    def _record(self, names: Mapping[int, str], frozen: Mapping[str, tuple[int, int]]) -> None:
        for one in self._optimizers if self.mixed else ():
            owned = {names[id(parameter)] for parameter, _ in _owned(one)}
            self.changes.record(one, {n: self._weights(n, s.master) for n, s in self.shards.items() if n in owned})
        for name in frozen:
            if (weight := self.parameters[name]).dtype is not torch.float32:
                self.changes.shards[name] = self._weights(name, weight.new_empty(0))

    def _weights(self, name: str, master: torch.Tensor) -> ShardWeights:
        return ShardWeights(self.parameters[name], *self.spans[name], master)

    def tensors(self) -> list[torch.Tensor]:
        """All float32 tensors, in the memory in which the optimizer holds them."""
        return [t.data for shard in self.shards.values() for t in (shard.master, shard.exp_avg, shard.exp_avg_sq)]

    @torch.no_grad()
    def set_weight(self, name: str, weight: torch.Tensor) -> None:
        """Set this rank's part of a parameter, and its own shard in float32."""
        parameter = self.parameters[name]
        if weight.shape != parameter.shape:
            raise ValueError(f"{name}: the file has {tuple(weight.shape)} for this rank, not {tuple(parameter.shape)}")
        parameter.copy_(weight)
        self.changes.drop()
        if (shard := self.shards.get(name)) is not None:
            shard.master.data.copy_(weight.reshape(-1)[shard.begin : shard.end])

    @torch.no_grad()
    def clear_moments(self) -> None:
        for shard in self.shards.values():
            shard.exp_avg.zero_()
            shard.exp_avg_sq.zero_()

    @torch.no_grad()
    def commit(self, step: int, updates: int) -> None:
        """Make the tensors the state after ``step`` and ``updates``; weights must be those of the shards."""
        self.step, self.updates = step, updates
        for counter in self._counters:
            counter.fill_(float(updates))

    @torch.no_grad()
    def refresh(self) -> None:
        """Derive all weights from the shards; collective over the data-parallel ranks."""
        for one in self._optimizers:
            # Rounds own shards into the weights' buffer.
            one._copy_main_params_to_model_params()
        self.gather()

    def gather(self) -> None:
        """Give all copies of a parameter the weights of its shards; collective over the data-parallel ranks."""
        for one in self._optimizers:
            for chunk in one.model_chunks:
                chunk.start_param_sync(force_sync=True)
        self.derived()

    def capture(self) -> tuple[int, int, list[torch.Tensor]]:
        return self.step, self.updates, [t.clone() for t in self.tensors()]

    @torch.no_grad()
    def restore(self, saved: tuple[int, int, list[torch.Tensor]]) -> None:
        """Return to a captured state; collective over the data-parallel ranks."""
        step, updates, tensors = saved
        for tensor, old in zip(self.tensors(), tensors, strict=True):
            tensor.copy_(old)
        self.commit(step, updates)
        self.refresh()


def _owned(optimizer: Any) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor]]:
    """Parameters of which this rank owns a part, and that part in float32."""
    pairs = (
        (optimizer.model_float16_groups, optimizer.shard_fp32_from_float16_groups),
        (optimizer.model_fp32_groups, optimizer.shard_fp32_groups),
    )
    for parameters, shards in pairs:
        for group, own in zip(parameters, shards, strict=True):
            yield from zip(group, own, strict=True)
