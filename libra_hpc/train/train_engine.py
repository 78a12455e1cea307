"""One rank of a Megatron-Core world: model, gradient buffers, sharded optimizer, schedule, and their state.

The torch world (``tp * pp * cp * dp`` processes) exists for the life of the process; within it, Megatron-Core sums the
gradients and shards the optimizer. Replicas outside of it (`libra_hpc.train.replicas`) enter only through ``reduce``.
"""

from __future__ import annotations

import dataclasses
import datetime
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from libra_hpc.hardware.architecture import Architecture, check_parallel
from libra_hpc.train import compat
from libra_hpc.weights.names import ReplicaPlace, stage_entries

from .device import Store, backend
from .mcore import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    OptimizerConfig,
    OptimizerParamScheduler,
    finalize_model_grads,
    get_forward_backward_func,
    get_megatron_optimizer,
    get_standard_config_overrides,
    parallel_state,
)
from .megatron_model import build_model
from .optimizer_state import OptimizerState
from .packing import Pack, PackedLayout
from .rotary import Rotary
from .settings import OptimizerSettings

Loss = Callable[[torch.Tensor, Pack], torch.Tensor]
"""Maps the logits of a pack's loss tokens, [m, vocab / tp], to the summed loss (a scalar)."""
LARGEST_NORM = 1e18
"""Largest usable gradient norm: Adam squares gradients in float32, whose range ends at 3e38."""
NO_STEP = -1
"""Step of a world without optimizer whose weights are not complete."""
CLIP_EPS = 1e-6
"""Added to the norm before the division, as torch and Megatron-Core do."""
CONSTANT_STEPS = 1 << 40
""""No end", as a number of steps for Megatron-Core's scheduler."""


def init_world(
    device: torch.device, tp: int, pp: int, rank: int, store: Store, timeout_s: float, dp: int = 1
) -> ReplicaPlace:
    """Create the torch world of ``tp * pp * dp`` processes and Megatron-Core's parallel state; collective over it."""
    compat.install()
    dist.init_process_group(
        backend(device), store=store, rank=rank, world_size=tp * pp * dp, timeout=datetime.timedelta(seconds=timeout_s)
    )
    parallel_state.initialize_model_parallel(tp, pp, create_gloo_process_groups=False)
    compat.no_random_state()
    return ReplicaPlace(
        tp=tp,
        tp_rank=parallel_state.get_tensor_model_parallel_rank(),
        pp=pp,
        pp_rank=parallel_state.get_pipeline_model_parallel_rank(),
        tp_group=parallel_state.get_tensor_model_parallel_group(),
        dp=dp,
        dp_rank=parallel_state.get_data_parallel_rank(),
    )


def close_world() -> None:
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


class TrainEngine:
    """Forward, backward and update of one rank; weights are uninitialised until a state is loaded."""

    def __init__(
        self,
        shape: Architecture,
        device: torch.device,
        dtype: torch.dtype,
        split: ReplicaPlace,
        settings: OptimizerSettings,
        recompute: bool = False,
        elastic: bool = False,
    ) -> None:
        check_parallel(shape, split.tp, split.pp)
        self.shape, self.device, self.split = shape, device, split
        self.elastic = elastic
        """Whether this world has weights and gradients only: the optimizer is elsewhere."""
        self.reduce: Callable[[], None] = lambda: None
        """Sums the gradients with those of other worlds in place; called after this world's own reduction."""
        model = build_model(shape, device, dtype, tp=split.tp, pp=split.pp, recompute=recompute)
        self._counted = _counted(shape, split)
        self._rotary = Rotary(shape, device, dtype)
        self._config = model.config
        self._config.finalize_model_grads_func = self._finalize
        self.ddp = DistributedDataParallel(
            self._config, DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True), model
        )
        self._grad_clip = settings.grad_clip
        self._optimizer: Any = None if elastic else _optimizer(self.ddp, dtype, settings)
        self._scheduler: Any = None if elastic else _scheduler(self._optimizer, settings)
        self._run = get_forward_backward_func()
        self._no_tokens = torch.zeros((), dtype=torch.int, device=device)
        self.state = OptimizerState(self._optimizer, self.named_parameters())

    def named_parameters(self) -> dict[str, torch.nn.Parameter]:
        """This rank's parameters by Megatron-Core name, ordered as `stage_entries`."""
        found = dict(self.ddp.module.named_parameters())
        return {name: found.pop(name) for name in stage_entries(self.shape, self.split.pp, self.split.pp_rank)}

    def gradients(self) -> list[torch.Tensor]:
        return [buffer.grad_data for buffer in self.ddp.buffers]

    def buckets(self) -> list[Any]:
        """Megatron-Core's flat pieces of weights and gradients, in an order that the layout alone decides."""
        return [bucket for buffer in self.ddp.buffers for bucket in buffer.buckets]

    def squared_norm(self) -> torch.Tensor:
        """This rank's share of the squared gradient norm, float64; the sum over the world is the whole.

        Float64, because the norm must not depend on how the state is sharded.
        """
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for name, shard in self.state.shards.items():
            parameter = self.state.parameters[name]
            if self._counted[name]:
                own = parameter.main_grad.view(-1)[shard.begin : shard.end]  # type: ignore[attr-defined]
                total += torch.linalg.vector_norm(own, dtype=torch.float64) ** 2
        return total

    def zero_gradients(self) -> None:
        self.ddp.zero_grad_buffer()
        if self._optimizer is not None:
            self._optimizer.zero_grad()

    def forward_backward(self, packs: list[Pack], loss: Loss) -> None:
        """Accumulate the gradient of the summed loss and reduce it over the replicas; zero without packs.

        Raises what ``reduce`` raises; gradients are then meaningless, weights unchanged.
        """
        self.zero_gradients()
        if packs:
            self._schedule(packs, loss, forward_only=False)
        else:
            # The other data-parallel ranks sum with this one.
            with compat.mcore_device():
                self._finalize([self.ddp], None, None, False)

    def layout(self, pack: Pack) -> PackedLayout:
        return dataclasses.replace(pack.layout, rotary=self._rotary.table(pack.positions[0]))

    def _padded(self, pack: Pack) -> Pack:
        """Tokens to a multiple of the tensor ranks, which share them (sequence parallelism)."""
        rest = -pack.tokens.shape[1] % self.split.tp
        if not rest:
            return pack
        return pack._replace(tokens=F.pad(pack.tokens, (0, rest)), positions=F.pad(pack.positions, (0, rest)))

    @torch.no_grad()
    def forward(self, packs: list[Pack], loss: Loss) -> None:
        """Call ``loss`` on every pack's logits without gradients; only the last pipeline stage has logits."""
        if packs:
            self._schedule(packs, loss, forward_only=True)

    def _schedule(self, packs: list[Pack], loss: Loss, *, forward_only: bool) -> None:
        def step(
            iterator: Iterator[Pack], model: torch.nn.Module
        ) -> tuple[torch.Tensor, Callable[[torch.Tensor], Any]]:
            pack = next(iterator)

            def total(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
                with compat.without_shim():
                    return loss(logits[0].index_select(0, pack.where), pack), self._no_tokens, {}

            with compat.without_shim():
                padded = self._padded(pack)
                return model(padded.tokens, padded.positions, None, packed_seq_params=self.layout(padded)), total

        with compat.mcore_device():
            self._run(
                forward_step_func=step,
                data_iterator=iter(packs),
                model=[self.ddp],
                num_microbatches=len(packs),
                seq_length=max(self._padded(p).tokens.shape[1] for p in packs),
                micro_batch_size=1,
                forward_only=forward_only,
            )

    def _finalize(
        self, model: list[torch.nn.Module], num_tokens: torch.Tensor | None, pg_collection: Any, force_all_reduce: bool
    ) -> None:
        # First within the replica (tied embeddings over stages, q/k norms over tensor ranks); sums are linear.
        finalize_model_grads(model, None, pg_collection=pg_collection, force_all_reduce=force_all_reduce)
        self.reduce()

    def norm(self) -> float:
        """The norm of the whole gradient; collective over the world."""
        total = self.squared_norm()
        if dist.get_world_size() > 1:
            dist.all_reduce(total)
        return math.sqrt(float(total))

    def update(self, scale: float, norm: float) -> float:
        """Scale gradients of norm ``norm``, clip them, take one AdamW step; returns the scaled norm before clipping."""
        scaled = norm * scale
        clip = min(1.0, self._grad_clip / (scaled + CLIP_EPS)) if self._grad_clip > 0 else 1.0
        self.ddp.scale_gradients(scale * clip)
        self.state.updates += 1
        self._set_schedule()
        with compat.mcore_device():
            self._optimizer.step()
        return scaled

    def _set_schedule(self) -> None:
        # Megatron-Core counts from 0; the number of this update starts the warm-up at lr / warmup_steps, not at 0.
        self._scheduler.num_steps = self.state.updates
        self._scheduler.step(0)

    def agree(self, ok: bool) -> bool:
        """Whether all processes of the world pass True; collective over the world."""
        if dist.get_world_size() == 1:
            return ok
        flag = torch.tensor([int(ok)], device=self.device)
        dist.all_reduce(flag, op=dist.ReduceOp.MIN)
        return bool(flag.item())

    def release(self) -> None:
        """Free device memory: drop gradient buffers and lower-precision weights, move the state to the host.

        Until `reclaim` the engine can neither compute nor be saved.
        """
        if self.elastic:
            self.state.commit(NO_STEP, 0)
        self._move_state(torch.device("cpu"))
        # Derived from the float32 masters, or taken from their owners.
        derived = self.state.mixed or self.elastic
        for buffer in self.ddp.buffers:
            if derived or self.device.type == "cuda":
                buffer.param_data_cpu = None if derived else buffer.param_data.cpu()
                buffer.param_data.untyped_storage().resize_(0)
        if self._optimizer is not None:
            self._optimizer.zero_grad()
        self.ddp.offload_grad_buffers(synchronize=False, empty_cache=self.device.type == "cuda")

    def reclaim(self) -> None:
        """End a standby; without one nothing changes. Gradients have any value: the next pass zeroes them first."""
        self._move_state(self.device)
        released = False
        for buffer in (*self.ddp.buffers, *self.ddp.expert_parallel_buffers):
            released |= _allocated(buffer.param_data)
            _allocated(buffer.grad_data)
            buffer.grad_data_size = 0
            if released and buffer.param_data_cpu is not None:
                buffer.param_data.copy_(buffer.param_data_cpu)
        if released and self.state.mixed and not self.elastic:
            self.state.refresh()

    def _move_state(self, device: torch.device) -> None:
        for shard in self.state.shards.values():
            # Masters of a float32 model are views of its weights.
            for tensor in (*shard[2:],) if self.state.mixed else (shard.exp_avg, shard.exp_avg_sq):
                tensor.data = tensor.data.to(device)


def _allocated(tensor: torch.Tensor) -> bool:
    """Give a released tensor memory; returns whether it had none."""
    storage = tensor.untyped_storage()
    if storage.nbytes():
        return False
    storage.resize_(tensor.nbytes)
    return True


def _optimizer(ddp: Any, dtype: torch.dtype, settings: OptimizerSettings) -> Any:
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
    with compat.mcore_device():
        return get_megatron_optimizer(
            optimizer_config,
            [ddp],
            config_overrides=get_standard_config_overrides(optimizer_config),
            use_gloo_process_groups=False,
        )


def _scheduler(optimizer: Any, settings: OptimizerSettings) -> OptimizerParamScheduler:
    decays = settings.decay_steps > 0
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=settings.lr,
        min_lr=0.0,
        lr_warmup_steps=settings.warmup_steps,
        lr_decay_steps=settings.decay_steps if decays else CONSTANT_STEPS,
        lr_decay_style="WSD" if decays else "constant",
        wsd_decay_steps=settings.anneal_steps,
        lr_wsd_decay_style="linear",
        start_wd=settings.weight_decay,
        end_wd=settings.weight_decay,
        wd_incr_steps=CONSTANT_STEPS,
        wd_incr_style="constant",
    )


def _counted(shape: Architecture, split: ReplicaPlace) -> dict[str, bool]:
    """Whether this rank's part of a parameter counts for the gradient norm: every element counts once."""
    entries = stage_entries(shape, split.pp, split.pp_rank)
    return {name: not entry.copy and (entry.dim is not None or not split.tp_rank) for name, entry in entries.items()}
