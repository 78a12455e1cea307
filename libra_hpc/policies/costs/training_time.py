"""Seconds of training one global batch under one layout.

- Compute: forward FLOPs from the model shape, attention per pair of positions; backward twice that. Recomputation and
  each log-probability pass add one forward. The output layer has loss tokens alone and computes its logits twice. The
  slowest replica has 1 / dp of the work, at least the longest trajectory.
- Speed: the device's ``flops_efficiency`` times `LAYER_EFFICIENCY`; a correction factor never exceeds the peak.
- Pipeline: 1F1B takes n + pp - 1 slots for n micro-batches; the slowest stage sets the slot, the last one has the head.
- Communication: ring collectives over the link of the group. TP, CP, EP and PP are exposed. The gradient reduction
  hides behind the last backward pass; the excess is exposed.
- CP: keys and values are gathered in every pass of a layer, and their gradients scattered (`trainer.model.context`).
- Optimizer: bound by memory bandwidth; every device of the core has its share of the state.
- Hybrid nodes that train: the core's links carry one gradient and one set of new weights, exposed
  (`libra_hpc.trainer.exchange`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from libra_hpc.models.architecture import stage_layers
from libra_hpc.models.devices import Device
from libra_hpc.models.memory import (
    GRAD_BYTES,
    Limit,
    Recompute,
    TrainLayout,
    TrainMemory,
    largest_stage_params,
    memory_limit,
    optimizer_bytes,
    train_memory,
)
from libra_hpc.models.shapes import ModelShape

from .factors import NONE, Factors
from .lengths import Lengths

LAYER_EFFICIENCY = 0.75
"""Share of a layer's time in matrix products; norms, activations, rotary embedding and launches take the rest. With 0.7
of the peak in products, MFU becomes 0.4..0.5."""
LINK_EFFICIENCY = 0.8
"""Share of a link that ring collectives of megabytes reach. `Device.link_efficiency` is for the small messages of
inference."""
BACKWARD = 2.0
"""FLOPs of backward over forward."""
HEAD_PASSES = 2.0 + BACKWARD
"""Passes of the output layer: forward, recomputed forward, and backward, as in `libra_hpc.trainer.model.head`."""
PORTION_PACKS = 2
"""`libra_hpc.train_leader.portions.PACKS`."""
RECOMPUTED: dict[Recompute, float] = {"none": 0.0, "selective": 0.04, "full": 1.0}
"""Work of recomputation over that of a forward pass. Selective, estimated: 127 kB moved per token and layer of
Qwen3-8B, at 3.35 TB/s, against matrix products at 400 TFLOP/s."""


class BatchWork(msgspec.Struct, frozen=True):
    """Work of one global batch, for both stages."""

    trajectories: int
    """Prompts times group size."""
    lengths: Lengths
    eta: int = 1
    """Staleness bound: batches that rollout may be ahead. With 0, the stages take turns."""
    minibatches: int = 1
    """Optimizer steps per global batch."""
    forwards: int = 0
    """Log-probability passes before the update: one for the proximal policy with several minibatches, one for a
    reference. Its weights come from host memory in below a second, not counted."""

    @property
    def streamed(self) -> bool:
        """Whether groups are trained as they are complete, and not when the batch is (`RunConfig.streamed`)."""
        return self.eta == 0 and self.minibatches == 1 and not self.forwards

    @property
    def tokens(self) -> float:
        return self.trajectories * self.lengths.context

    @property
    def generated(self) -> float:
        return self.trajectories * self.lengths.generated


class TrainTime(msgspec.Struct, frozen=True):
    """Seconds of one global batch; communication terms are the exposed parts."""

    compute: float
    bubble: float
    """Time of the pp - 1 idle slots, per optimizer step."""
    tp: float
    pp: float
    cp: float
    ep: float
    dp: float
    optimizer: float
    exchange: float
    """With hybrid nodes that train."""
    micro_batches: int
    """Per replica and optimizer step."""
    mfu: float
    """Model FLOPs of one forward and backward pass over the peak FLOPs of all devices in that time."""

    @property
    def total(self) -> float:
        communication = self.tp + self.pp + self.cp + self.ep + self.dp + self.exchange
        return self.compute + self.bubble + communication + self.optimizer


def hidden_seconds(train_s: float, rollout_s: float, ends: Sequence[tuple[float, float]], portion: float) -> float:
    """Return the seconds of ``train_s`` beside rollout; ``ends`` has rising (seconds, share of trajectories).

    A portion of so many trajectories is trained once its last one has ended, if those before it are done.
    """
    free, ended = rollout_s, 0.0
    for end, share in ends:
        free = max(free, end + train_s * (1.0 - ended**portion))
        ended += share
    return train_s - (free - rollout_s)


def packed(batch: BatchWork, micro_tokens: int) -> float:
    """Micro-batches of at most ``micro_tokens`` tokens that the batch fills; a longer trajectory fills one.

    Trajectories are packed from long to short, so neighbours are alike: ``floor(micro_tokens / length)`` of a bin per
    micro-batch.
    """
    return batch.trajectories * sum(b.share / max(1, int(micro_tokens // b.context)) for b in batch.lengths.bins)


def forward_flops(shape: ModelShape, context: float, context_square: float, loss: float | None = None) -> float:
    """FLOPs of one trajectory's forward pass with causal attention; ``loss`` tokens of it carry loss, None: all."""
    return (
        context * shape.layer_flops_per_token
        + (context if loss is None else loss) * shape.head_flops_per_token
        + 0.5 * context_square * shape.attention_flops_per_pair
    )


class HybridWorlds(NamedTuple):
    """Hybrid nodes that train beside the core, or worlds of several."""

    nodes: int = 0
    replicas: int = 1
    """Replicas of each world."""


ALONE = HybridWorlds()


class TrainCost:
    """Time and memory of layouts of one model on one kind of device, for one batch."""

    def __init__(
        self, shape: ModelShape, device: Device, devices_per_node: int, batch: BatchWork, factors: Factors = NONE
    ) -> None:
        self.shape, self.device, self.batch = shape, device, batch
        self._node, self._factors = devices_per_node, factors
        lengths = batch.lengths
        self._flops = batch.trajectories * forward_flops(
            shape, lengths.context, lengths.context_square, lengths.generated
        )
        self._head = batch.generated * shape.head_flops_per_token
        longest, last = lengths.longest_context, lengths.bins[-1]
        loss = longest * last.generated / last.context
        self._longest = forward_flops(shape, longest, longest**2, loss) / self._flops
        efficiency = min(1.0, device.flops_efficiency * LAYER_EFFICIENCY / factors.compute)
        self._speed = device.peak_flops * efficiency
        self._packs: dict[int, float] = {}

    def micro_batches(self, layout: TrainLayout) -> int:
        """Micro-batches of one replica and optimizer step."""
        packs = self._packs.get(layout.micro_tokens)
        if packs is None:
            packs = self._packs[layout.micro_tokens] = packed(self.batch, layout.micro_tokens)
        return max(1, math.ceil(packs / (layout.dp * self.batch.minibatches)))

    def pack_tokens(self, layout: TrainLayout) -> float:
        """Tokens of the largest micro-batch."""
        return float(max(layout.micro_tokens, self.batch.lengths.longest_context))

    def portion(self, layout: TrainLayout) -> float:
        """Trajectories that are trained together as they are complete (`libra_hpc.train_leader.portions`)."""
        packs = PORTION_PACKS * layout.dp * layout.pp
        return packs * max(1.0, layout.micro_tokens / self.batch.lengths.context)

    def memory(self, layout: TrainLayout) -> TrainMemory:
        return train_memory(
            self.shape,
            layout,
            self.device,
            micro_batches=self.micro_batches(layout),
            pack_tokens=self.pack_tokens(layout),
            minibatches=self.batch.minibatches,
        )

    def limit(self, layout: TrainLayout) -> Limit | None:
        """Why the layout does not fit; None when it does."""
        return memory_limit(self.memory(layout), self.device)

    def never_fits(self, layout: TrainLayout) -> bool:
        """Whether the layout fits with no ``dp`` at all: weights, gradients and one micro-batch exceed the device."""
        stateless, pack = msgspec.structs.replace(layout, elastic=True), self.pack_tokens(layout)
        least = train_memory(self.shape, stateless, self.device, micro_batches=1, pack_tokens=pack)
        return memory_limit(least, self.device) is not None

    @property
    def longest_share(self) -> float:
        """Least share of the batch's work of the slowest replica: that of the longest trajectory."""
        return self._longest

    def device_seconds(self, layout: TrainLayout) -> float:
        """Lower bound of ``time(layout).total * layout.devices`` for every ``dp``: work and traffic of a perfect
        division."""
        compute, tp = self._stage_seconds(layout, 1.0)
        return (compute + tp + sum(self._traffic(layout, 1.0))) * layout.replica

    def time(self, layout: TrainLayout, beside: HybridWorlds = ALONE) -> TrainTime:
        """Seconds of one global batch, whether the layout fits or not; ``beside`` the core, hybrid nodes train too."""
        batch, every = self.batch, layout
        if beside.nodes:
            every = msgspec.structs.replace(layout, dp=layout.dp + beside.nodes * beside.replicas)
        n = self.micro_batches(every)
        share = max(1.0 / every.dp, self._longest)
        compute, tp = self._stage_seconds(layout, share)
        layers = max(stage_layers(self.shape.layers, layout.pp))
        if layout.tp > 1:
            # All micro-batches of all optimizer steps, at the latency of one small all-reduce each.
            latency = self.device.allreduce_s * self._factors.comm
            tp += self._reduces(layout) * layers * n * batch.minibatches * latency
        cp, ep, pp = self._traffic(layout, share)
        slots = (n + layout.pp - 1) / n
        pp *= slots
        dp = 0.0
        if layout.copies > 1:
            backward = compute * BACKWARD / self._passes(layout) / n
            dp = max(0.0, batch.minibatches * self._reduction(layout) * self._factors.comm - backward)
        optimizer = batch.minibatches * self._update(layout) * self._factors.optimizer
        exchange = batch.minibatches * self._exchange(layout, beside) * self._factors.comm
        bubble = (slots - 1.0) * (compute + tp + cp + ep)
        total = compute + bubble + tp + pp + cp + ep + dp + optimizer + exchange
        mfu = (1.0 + BACKWARD) * self._flops / (total * every.devices * self.device.peak_flops)
        return TrainTime(
            compute=compute,
            bubble=bubble,
            tp=tp,
            pp=pp,
            cp=cp,
            ep=ep,
            dp=dp,
            optimizer=optimizer,
            exchange=exchange,
            micro_batches=n,
            mfu=mfu,
        )

    def _traffic(self, layout: TrainLayout, share: float) -> tuple[float, float, float]:
        """Seconds of context ranks, expert ranks, and of stages without a bubble, with ``share`` of the batch."""
        shape, comm = self.shape, self._factors.comm
        tokens = share * self.batch.tokens / layout.cp
        element, layers = shape.dtype_bytes, max(stage_layers(shape.layers, layout.pp))
        cp = ep = pp = 0.0
        if layout.cp > 1:
            kv = 2 * shape.kv_heads * shape.head_dim / min(layout.tp, shape.kv_heads) * element
            gathers = self._reduces(layout) / 2
            cp = gathers * layers * kv * tokens * (layout.cp - 1) / self._link(layout.tp * layout.cp) * comm
        if layout.ep > 1:
            sent = tokens / layout.tp * shape.experts_per_token * shape.hidden * element
            spread = (layout.ep - 1) / layout.ep / self._link(layout.degrees.expert_processes)
            ep = self._reduces(layout) * layers * sent * spread * comm
        if layout.pp > 1:
            sent = (2 + self.batch.forwards) * tokens / layout.tp * shape.hidden * element
            pp = sent / self._link(layout.replica) * comm
        return cp, ep, pp

    def _passes(self, layout: TrainLayout) -> float:
        """Work of a layer over that of its forward pass."""
        return 1.0 + BACKWARD + RECOMPUTED[layout.recompute] + self.batch.forwards

    def _reduces(self, layout: TrainLayout) -> float:
        """Collectives per layer: two in each forward, recomputed and backward pass."""
        return 2.0 * (2 + (layout.recompute == "full") + self.batch.forwards)

    def _stage_seconds(self, layout: TrainLayout, share: float) -> tuple[float, float]:
        """Compute, and the bandwidth-bound TP traffic, of the slowest stage with ``share`` of the batch."""
        shape = self.shape
        stages = stage_layers(shape.layers, layout.pp)
        layer = (self._flops - self._head) / shape.layers * self._passes(layout)
        stage = max(max(stages) * layer, stages[-1] * layer + self._head * (HEAD_PASSES + self.batch.forwards))
        compute = share * stage / (layout.tp * layout.cp * self._speed)
        if layout.tp == 1:
            return compute, 0.0
        # Of the two collectives that of the MLP is one of routed tokens, or none, where there are experts.
        width = float(shape.hidden)
        if shape.experts:
            width *= 0.5 + 0.5 * (shape.experts_per_token if layout.etp != 1 else 0)
        if shape.kv_heads < layout.tp:
            # Megatron-Core gathers q, k and v: half the traffic of an all-reduce, one for every two of them.
            width += (shape.heads + 2 * shape.kv_heads) * shape.head_dim / 4
        message = share * self.batch.tokens / layout.cp * width * shape.dtype_bytes
        ring = 2 * (layout.tp - 1) / layout.tp * message / self._link(layout.tp)
        return compute, self._reduces(layout) * max(stages) * ring * self._factors.comm

    def _reduction(self, layout: TrainLayout) -> float:
        """Seconds to reduce gradients over the copies of a parameter, and to gather its new weights."""
        common, experts = largest_stage_params(self.shape, layout)
        copies, expert_copies = layout.copies, layout.expert_copies
        sent = common * (copies - 1) / copies + experts * (expert_copies - 1) / expert_copies
        return (GRAD_BYTES + self.shape.dtype_bytes) * sent / self._link(layout.devices)

    def _update(self, layout: TrainLayout) -> float:
        common, experts = largest_stage_params(self.shape, layout)
        moved = GRAD_BYTES + 2 * optimizer_bytes(self.shape) + self.shape.dtype_bytes
        own = common / layout.copies + experts / layout.expert_copies
        return own * moved / (self.device.hbm_bytes_s * self.device.hbm_efficiency)

    def _exchange(self, layout: TrainLayout, beside: HybridWorlds) -> float:
        """Seconds of gradients to the core and new weights back: of the slower side.

        The hybrid nodes sum gradients among themselves, and pass new weights on, before one of them talks to the core.
        """
        if not beside.nodes:
            return 0.0
        common, experts = largest_stage_params(self.shape, layout)
        own = msgspec.structs.replace(layout, dp=beside.replicas)
        bytes_each = GRAD_BYTES + self.shape.dtype_bytes
        core = (common / layout.copies + experts / layout.expert_copies) * bytes_each
        piece = (common / own.copies + experts / own.expert_copies) * bytes_each
        others = (beside.nodes - 1) / beside.nodes
        # An all-reduce sends gradients twice, the broadcast weights once.
        among = piece * others * (2 * GRAD_BYTES + self.shape.dtype_bytes) / bytes_each
        return max(core, piece / beside.nodes + among) / self._link(self._node + 1)

    def _link(self, group: int) -> float:
        """Bytes per second of one device within a group of so many neighbours."""
        raw = self.device.intra_bytes_s if group <= self._node else self.device.inter_bytes_s
        return raw * LINK_EFFICIENCY
