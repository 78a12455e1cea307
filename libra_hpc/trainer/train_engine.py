"""One rank of a Megatron-Core world: model, gradient buffers, sharded optimizer, schedule, and their state.

The torch world (``tp * pp * cp * dp`` processes) exists for the life of the process; within it, Megatron-Core sums the
gradients and shards the optimizer. Replicas outside of it (`libra_hpc.trainer.elastic`) enter only through ``reduce``.
"""

from __future__ import annotations

import datetime
import math
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from libra_hpc.config.learn import OptimizerSection, Recompute
from libra_hpc.models.architecture import Architecture
from libra_hpc.trainer.model.mcore import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
    parallel_state,
)
from libra_hpc.trainer.model.packing import Pack
from libra_hpc.trainer.saved.hosted_adamw import HostedAdamW
from libra_hpc.trainer.saved.merged_adapters import Adapters
from libra_hpc.weights.names import ReplicaPlace, trained_entries

from .device import Store, backend, give_back, take_again
from .model import compat
from .packed_model import Loss, PackedModel
from .saved.optimizer_state import OptimizerState, adamw, learning_rate

LARGEST_NORM = 1e18
"""Largest usable gradient norm: Adam squares gradients in float32, whose range ends at 3e38."""
NO_STEP = -1
"""Step of a world without optimizer whose weights are not complete."""
CLIP_EPS = 1e-6
"""Added to the norm before the division, as torch and Megatron-Core do."""
_ENGINES: weakref.WeakSet[TrainEngine] = weakref.WeakSet()
"""Engines of this process."""


def init_world(
    device: torch.device,
    tp: int,
    pp: int,
    rank: int,
    store: Store,
    timeout_s: float,
    *,
    dp: int = 1,
    cp: int = 1,
    ep: int = 1,
    etp: int = 0,
) -> ReplicaPlace:
    """Create the torch world of ``tp * pp * cp * dp`` processes and Megatron-Core's parallel state.

    Collective over the world. ``ep`` and ``etp`` (0: as ``tp``) spread the experts over the processes of a stage.
    """
    compat.install()
    timeout = datetime.timedelta(seconds=timeout_s)
    dist.init_process_group(backend(device), store=store, rank=rank, world_size=tp * pp * cp * dp, timeout=timeout)
    parallel_state.initialize_model_parallel(
        tp,
        pp,
        context_parallel_size=cp,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=etp or tp,
        create_gloo_process_groups=False,
    )
    compat.no_random_state()
    return ReplicaPlace(
        tp=tp,
        tp_rank=parallel_state.get_tensor_model_parallel_rank(),
        pp=pp,
        pp_rank=parallel_state.get_pipeline_model_parallel_rank(),
        cp=cp,
        cp_rank=parallel_state.get_context_parallel_rank(),
        dp=dp,
        dp_rank=parallel_state.get_data_parallel_rank(),
        ep=ep,
        etp=etp,
    )


def close_world() -> None:
    """End the world and its engines."""
    for engine in _ENGINES:
        # Hooks of gradients hold it, and are held by nodes that the garbage collector does not see. Its memory would
        # stay, and so would the threads of all process groups.
        vars(engine.ddp).clear()
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


class TrainEngine(PackedModel):
    """Forward, backward and update of one rank; weights are uninitialised until a state is loaded."""

    def __init__(
        self,
        shape: Architecture,
        device: torch.device,
        dtype: torch.dtype,
        split: ReplicaPlace,
        settings: OptimizerSection,
        updates: int = 0,
        recompute: Recompute = "none",
        elastic: bool = False,
    ) -> None:
        super().__init__(shape, device, dtype, split, recompute)
        self.elastic = elastic
        """Whether this world has weights and gradients only: the optimizer is elsewhere."""
        self.reduce: Callable[[], None] = lambda: None
        """Sums the gradients with those of other worlds in place; called after this world's own reduction."""
        _ENGINES.add(self)
        self._counted = {
            name: not (
                entry.copy or (entry.dim is None and (split.tp_rank if entry.expert is None else split.etp_rank))
            )
            for name, entry in trained_entries(shape, split).items()
        }
        """Whether this rank's part of a parameter counts for the gradient norm: every element counts once."""
        self.adapters = Adapters(self)
        self._config = self.module.config
        reduction = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True)
        self.ddp = self._called = DistributedDataParallel(self._config, reduction, self.module)
        self._grad_clip = settings.grad_clip
        self._optimizer: Any = None if elastic else adamw(self.ddp, dtype, settings)
        self._scheduler: Any = None if elastic else learning_rate(self._optimizer, settings, updates)
        hosted, parameters = settings.host and not elastic, {**self.named_parameters(), **self.adapters.parameters}
        self.state = OptimizerState(self._optimizer, parameters, self.adapters.spans, host=hosted)
        self.state.derived = partial(self.adapters.merge, self.state)
        self._hosted = HostedAdamW(self._optimizer, self.state, device) if hosted else None
        self._kept = shape.lora is not None and not elastic
        self.frees = elastic or ((hosted or self._kept) and dtype is not torch.float32)
        """Whether a standby frees weights and gradients: they can come from elsewhere, or from host memory."""
        self._freed = False

    def buckets(self) -> tuple[list[Any], list[Any]]:
        """Megatron-Core's flat pieces of weights and gradients: of shared parameters, and of experts.

        In an order that the layout alone decides.
        """
        shared, experts = (
            [bucket for buffer in buffers for bucket in buffer.buckets]
            for buffers in (self.ddp.buffers, self.ddp.expert_parallel_buffers)
        )
        return shared, experts

    def gather_weights(self) -> None:
        """Give all copies of a parameter the pieces that each has; collective over a world without optimizer."""
        if self.split.copies > 1:
            self.ddp.start_param_sync(force_sync=True)
        self.state.derived()

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

    def forward_backward(self, packs: list[Pack], loss: Loss, *, first: bool = True, last: bool = True) -> None:
        """Accumulate the gradient of the summed loss and reduce it over the replicas; zero without packs.

        Packs may come in several calls, of which the ``last`` one reduces. Raises what ``reduce`` raises; gradients are
        then meaningless, weights unchanged.
        """
        if first:
            self.zero_gradients()
        packs = self._even(packs)
        self._config.finalize_model_grads_func = self._finalize if last else None
        if packs:
            self._schedule(packs, loss, forward_only=False)
        elif last:
            # The other data-parallel ranks sum with this one.
            with compat.mcore_device():
                self._finalize([self.ddp], None, None, False)

    def _finalize(
        self, model: list[torch.nn.Module], num_tokens: torch.Tensor | None, pg_collection: Any, force_all_reduce: bool
    ) -> None:
        # First within the replica (tied embeddings over stages, q/k norms over tensor ranks); sums are linear.
        finalize_model_grads(model, None, pg_collection=pg_collection, force_all_reduce=force_all_reduce)
        self.adapters.sum_gradients()
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
        if self._hosted is not None:
            self._hosted.step()
            return scaled
        with compat.mcore_device():
            # `step` would take the norm again.
            self._optimizer.prepare_grads()
            self._optimizer.step_with_ready_grads()
        self.state.derived()
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
        """Free weights and gradients; without an optimizer, a world has no step until it has weights again."""
        assert self.frees, "the state of others is nowhere else"
        self._freed = True
        if self.elastic:
            self.state.commit(NO_STEP, 0)
        for flat in self._flat():
            give_back(flat)
        self.adapters.drop()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def reclaim(self) -> None:
        """End a standby; gradients then have any values, and weights too, unless they come from host memory.

        Then it is collective over the data-parallel ranks.
        """
        for flat in self._flat():
            take_again(flat)
        if self._freed and not self.elastic:
            self.state.changes.cast_again()
            self.state.gather()
        self._freed = False

    def _flat(self) -> list[torch.Tensor]:
        buffers = [*self.ddp.buffers, *self.ddp.expert_parallel_buffers]
        # Adapters have no other place, and are small.
        own = [(buffer.grad_data,) if self._kept else (buffer.param_data, buffer.grad_data) for buffer in buffers]
        return [flat for both in own for flat in both]
