"""One rank of a Megatron-Core replica: model, gradient buffers, optimizer, schedule, and their state.

The replica's torch world (``tp * pp`` processes) exists for the life of the process. Data parallelism
(`libra_hpc.train.replicas`) enters only through the ``reduce`` callback.
"""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from libra_hpc.hardware.architecture import Architecture, check_parallel
from libra_hpc.train import compat
from libra_hpc.weights.names import ReplicaPlace, own_entries

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
from .packing import Pack, PackedLayout
from .rotary import Rotary
from .settings import OptimizerSettings

Loss = Callable[[torch.Tensor, Pack], torch.Tensor]
"""Maps the logits of a pack's loss tokens, [m, vocab / tp], to the summed loss (a scalar)."""
LARGEST_NORM = 1e18
"""Largest usable gradient norm of one rank; beyond it, the squares that clipping sums in float32 overflow."""
CONSTANT_STEPS = 1 << 40
""""No end", as a number of steps for Megatron-Core's scheduler."""


def init_world(device: torch.device, tp: int, pp: int, rank: int, store: Store, timeout_s: float) -> ReplicaPlace:
    """Create the replica's torch world and Megatron-Core's parallel state; collective over the replica."""
    compat.install()
    dist.init_process_group(
        backend(device), store=store, rank=rank, world_size=tp * pp, timeout=datetime.timedelta(seconds=timeout_s)
    )
    parallel_state.initialize_model_parallel(tp, pp, create_gloo_process_groups=False)
    return ReplicaPlace(
        tp=tp,
        tp_rank=parallel_state.get_tensor_model_parallel_rank(),
        pp=pp,
        pp_rank=parallel_state.get_pipeline_model_parallel_rank(),
        tp_group=parallel_state.get_tensor_model_parallel_group(),
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
    ) -> None:
        check_parallel(shape, split.tp, split.pp)
        self.shape, self.device, self.split = shape, device, split
        self.reduce: Callable[[list[torch.Tensor]], None] = lambda _buffers: None
        """Sums the flat gradient buffers over replicas in place; called after the replica's own reduction."""
        model = build_model(shape, device, dtype, split, recompute=recompute)
        _mark_sharded(model, shape, split)
        self._rotary = Rotary(shape, device, dtype)
        self._config = model.config
        self._config.finalize_model_grads_func = self._finalize
        self.ddp = DistributedDataParallel(self._config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), model)
        optimizer_config = OptimizerConfig(
            optimizer="adam",
            lr=settings.lr,
            min_lr=0.0,
            weight_decay=settings.weight_decay,
            adam_beta1=settings.beta1,
            adam_beta2=settings.beta2,
            adam_eps=settings.eps,
            clip_grad=settings.grad_clip,
            bf16=dtype is torch.bfloat16,
            params_dtype=dtype,
        )
        with compat.mcore_device():
            self._optimizer = get_megatron_optimizer(
                optimizer_config,
                [self.ddp],
                config_overrides=get_standard_config_overrides(optimizer_config),
                use_gloo_process_groups=False,
            )
        decays = settings.decay_steps > 0
        self._scheduler = OptimizerParamScheduler(
            self._optimizer,
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
        self._run = get_forward_backward_func()
        self._no_tokens = torch.zeros((), dtype=torch.int, device=device)
        self.state = EngineState(self)

    def named_parameters(self) -> dict[str, torch.nn.Parameter]:
        """This rank's parameters by Megatron-Core name, ordered as `stage_entries`."""
        found = dict(self.ddp.module.named_parameters())
        return {name: found.pop(name) for name in own_entries(self.shape, self.split)}

    def adam_state(self) -> Any:
        return self._optimizer.optimizer.state

    def gradients(self) -> list[torch.Tensor]:
        return [buffer.grad_data for buffer in self.ddp.buffers]

    def finite(self) -> bool:
        """Whether this rank's gradients can be used for an update."""
        return all(float(torch.linalg.vector_norm(buffer)) <= LARGEST_NORM for buffer in self.gradients())

    def zero_gradients(self) -> None:
        self.ddp.zero_grad_buffer()
        self._optimizer.zero_grad()

    def forward_backward(self, packs: list[Pack], loss: Loss) -> None:
        """Accumulate the gradient of the summed loss and reduce it over the replicas; zero without packs.

        Raises what ``reduce`` raises; gradients are then meaningless, weights unchanged.
        """
        self.zero_gradients()
        if packs:
            self._schedule(packs, loss, forward_only=False)
        else:
            self.reduce(self.gradients())

    def layout(self, pack: Pack) -> PackedLayout:
        return dataclasses.replace(pack.layout, rotary=self._rotary.table(pack.positions[0]))

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
                return model(pack.tokens, pack.positions, None, packed_seq_params=self.layout(pack)), total

        with compat.mcore_device():
            self._run(
                forward_step_func=step,
                data_iterator=iter(packs),
                model=[self.ddp],
                num_microbatches=len(packs),
                seq_length=max(p.tokens.shape[1] for p in packs),
                micro_batch_size=1,
                forward_only=forward_only,
            )

    def _finalize(
        self, model: list[torch.nn.Module], num_tokens: torch.Tensor | None, pg_collection: Any, force_all_reduce: bool
    ) -> None:
        # First within the replica (tied embeddings over stages, q/k norms over tensor ranks); sums are linear.
        finalize_model_grads(model, None, pg_collection=pg_collection, force_all_reduce=force_all_reduce)
        self.reduce(self.gradients())

    def update(self, scale: float) -> float:
        """Scale the gradients, clip them, take one AdamW step; returns the gradient norm before clipping."""
        self.ddp.scale_gradients(scale)
        self.state.updates += 1
        self._set_schedule()
        with compat.mcore_device():
            _, norm, _ = self._optimizer.step()
        return float(norm)

    def _set_schedule(self) -> None:
        # Megatron-Core counts from 0; the number of this update starts the warm-up at lr / warmup_steps, not at 0.
        self._scheduler.num_steps = self.state.updates
        self._scheduler.step(0)

    def agree(self, ok: bool) -> bool:
        """Whether all processes of the replica pass True; collective over the replica."""
        if self.split.tp * self.split.pp == 1:
            return ok
        flag = torch.tensor([int(ok)], device=self.device)
        dist.all_reduce(flag, op=dist.ReduceOp.MIN)
        return bool(flag.item())

    def release(self) -> None:
        """Free device memory: drop gradient buffers and lower-precision weights, move the state to the host.

        Until `reclaim` the engine can neither compute nor be saved.
        """
        state = self.state
        self._move_state(torch.device("cpu"))
        if state.mixed:
            # Derived from the float32 masters.
            for p in state.parameters.values():
                p.data = torch.empty(0, dtype=p.dtype, device=self.device)
        self._optimizer.zero_grad()
        self.ddp.offload_grad_buffers(synchronize=False, empty_cache=self.device.type == "cuda")

    def reclaim(self) -> None:
        state = self.state
        self._move_state(self.device)
        if state.mixed:
            for name, p in state.parameters.items():
                p.data = state.master[name].data.to(p.dtype)
        self.ddp.restore_grad_buffers(synchronize=False)

    def _move_state(self, device: torch.device) -> None:
        for tensor in self.state.tensors_in_place():
            tensor.data = tensor.data.to(device)


def _mark_sharded(model: torch.nn.Module, shape: Architecture, split: ReplicaPlace) -> None:
    # Megatron-Core sets this when it draws initial weights, which we skip. Without it the gradient norm counts
    # sharded tensors on one rank only.
    parameters = dict(model.named_parameters())
    for name, entry in own_entries(shape, split).items():
        parameters[name].tensor_model_parallel = entry.dim is not None  # type: ignore[attr-defined]


class EngineState:
    """The state of training: float32 weights, Adam's moments, two counters; all else is derived."""

    def __init__(self, engine: TrainEngine) -> None:
        self.step = 0
        self.updates = 0
        """Optimizer updates, without skipped ones: Adam's counter."""
        self.parameters = engine.named_parameters()
        # In bfloat16 the optimizer works on float32 "master" copies, in float32 on the parameters.
        self.master: dict[str, torch.Tensor] = {
            name: getattr(p, "main_param", p) for name, p in self.parameters.items()
        }
        self.mixed = any(self.master[name] is not p for name, p in self.parameters.items())
        """Whether weights are in less than float32, with float32 masters beside them."""
        adam = engine.adam_state()
        self._counters: list[torch.Tensor] = []
        self.exp_avg: dict[str, torch.Tensor] = {}
        self.exp_avg_sq: dict[str, torch.Tensor] = {}
        # torch creates Adam's state at the first update; a newcomer receives it before that.
        for name, weight in self.master.items():
            counter = torch.zeros((), dtype=torch.float32)
            self.exp_avg[name], self.exp_avg_sq[name] = torch.zeros_like(weight.data), torch.zeros_like(weight.data)
            adam[weight] = {"step": counter, "exp_avg": self.exp_avg[name], "exp_avg_sq": self.exp_avg_sq[name]}
            self._counters.append(counter)

    def tensors_in_place(self) -> list[torch.Tensor]:
        """All float32 tensors as the optimizer holds them, in the same order on every replica."""
        return [t for name in self.master for t in (self.master[name], self.exp_avg[name], self.exp_avg_sq[name])]

    def tensors(self) -> list[torch.Tensor]:
        return [t.data for t in self.tensors_in_place()]

    @torch.no_grad()
    def commit(self, step: int, updates: int) -> None:
        """Make the tensors the state after ``step`` and ``updates``: refresh weights and Adam's counters."""
        self.step, self.updates = step, updates
        for counter in self._counters:
            counter.fill_(float(updates))
        if self.mixed:
            for name, p in self.parameters.items():
                p.copy_(self.master[name])

    def capture(self) -> tuple[int, int, list[torch.Tensor]]:
        return self.step, self.updates, [t.clone() for t in self.tensors()]

    @torch.no_grad()
    def restore(self, saved: tuple[int, int, list[torch.Tensor]]) -> None:
        step, updates, tensors = saved
        for tensor, old in zip(self.tensors(), tensors, strict=True):
            tensor.copy_(old)
        self.commit(step, updates)
