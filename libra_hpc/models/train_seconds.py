"""Seconds of one global batch of training under one layout: counted operations over measured rates, added up.

- Products of layers and head: FLOPs over `Device.product_efficiency`. The head computes its logits again backward.
- Attention: pairs of positions, forward and backward at rates of their own; backward has 5 products for 2 forward.
- Elementwise operations of layers and head, sums of gradients and the update: bytes over the memory's bandwidth.
- Recomputation and each log-probability pass repeat the forward operations.
- The slowest replica has 1 / dp of the work, at least the longest trajectory; the slowest pipeline stage counts.
- Pipeline: 1F1B takes n + pp - 1 slots for n micro-batches.
- Communication: ring collectives over the link of the group, exposed. The gradient reduction hides behind the last
  backward pass, and the excess is exposed.
- One factor, measured over counted seconds, multiplies everything (`calibrate train`, or an earlier run).

The rates are of one H100, chosen before the comparison with its clean steps (docs/data/h100.toml): within 1 %.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from libra_hpc.errors import UserError

from .architecture import stage_layers
from .devices import Device
from .memory import (
    GRAD_BYTES,
    Limit,
    TrainLayout,
    TrainMemory,
    largest_trained_params,
    memory_limit,
    optimizer_bytes,
    train_memory,
)
from .shapes import ModelShape

BACKWARD = 2.0
"""FLOPs of backward over forward, of products."""
ATTENTION_BACKWARD = 2.5
"""The same of attention: scores again, and four products."""
LAYER_PASSES = (5, 10, 9, 4), (12, 18, 13, 8)
"""Passes over memory of a layer's elementwise operations, forward and backward: over the MLP's width (gated
activation), the hidden state (norms, residuals), queries and keys (norms, rotation, splits), and the hidden state of
each routed token (sorted to its expert and back, weighted). Counted on the forms that the trainer has on CUDA without
Triton's kernels of a layer, which no GPU has timed."""
SELECTIVE_PASSES = 5
"""Passes over the MLP's width that selective recomputation repeats."""
LOGIT_BYTES = 50, 70
"""Moved for a logit, forward and backward: 24 of them by products, the rest in float32."""
GRADIENT_SUM_BYTES = 2 * GRAD_BYTES
"""A micro-batch reads and writes the float32 sum of gradients; the gradient itself, twice that of a weight, comes
beside it."""
SCALED_BYTES = 3 * GRAD_BYTES
"""An update sets the gradients to zero and scales them, on all devices. The rest is shared."""
LINK_EFFICIENCY = 0.8
"""Share of a link that ring collectives of megabytes reach. `Device.link_efficiency` is for the small messages of
inference."""
PORTION_PACKS = 2
"""`libra_hpc.train_leader.step_requests.PACKS`."""


class TrainWork(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of one global batch."""

    sizes: tuple[tuple[float, float], ...]
    """(Trajectories, tokens of each)."""
    squares: float
    """Sum of squared tokens of trajectories."""
    loss: float
    """Tokens that carry loss."""
    longest: float
    longest_loss: float
    minibatches: int = 1
    """Optimizer steps per global batch."""
    reference: ModelShape | None = None
    """A frozen model with a pass before the update. Its weights come from host memory in a second, not counted."""

    @property
    def trajectories(self) -> float:
        return sum(count for count, _ in self.sizes)

    @property
    def tokens(self) -> float:
        return sum(count * tokens for count, tokens in self.sizes)

    @property
    def mean(self) -> float:
        """Mean tokens of a trajectory."""
        return self.tokens / self.trajectories

    def packs(self, micro_tokens: int) -> float:
        """Micro-batches of at most ``micro_tokens`` tokens; a longer trajectory fills one.

        Trajectories are packed from long to short, so neighbours are alike.
        """
        return sum(count / max(1, int(micro_tokens // tokens)) for count, tokens in self.sizes)


def work_of(
    lengths: Iterable[tuple[int, int]],
    trajectories: int = 0,
    *,
    minibatches: int = 1,
    reference: ModelShape | None = None,
) -> TrainWork:
    """The work of so many trajectories like these, of (tokens, loss tokens) each; 0: of these.

    Raises `UserError` where there is none.
    """
    known = sorted(lengths)
    if not known:
        raise UserError("The lengths cannot be planned with: there is no finished trajectory; valid: at least one.")
    each = trajectories / len(known) if trajectories else 1.0
    return TrainWork(
        sizes=tuple((each, float(tokens)) for tokens, _ in known),
        squares=each * sum(tokens * tokens for tokens, _ in known),
        loss=each * sum(loss for _, loss in known),
        longest=float(known[-1][0]),
        longest_loss=float(known[-1][1]),
        minibatches=minibatches,
        reference=reference,
    )


def portion(layout: TrainLayout, tokens: float) -> float:
    """Trajectories of so many tokens that are trained together as they are complete: see
    `libra_hpc.train_leader.step_requests`."""
    return PORTION_PACKS * layout.dp * layout.pp * max(1.0, layout.micro_tokens / tokens)


class TrainTime(msgspec.Struct, frozen=True):
    """Seconds of one global batch; communication is its exposed part."""

    parts: dict[str, float]
    micro_batches: int
    """Per replica and optimizer step."""
    mfu: float
    """Model FLOPs of one forward and backward pass over the peak FLOPs of all devices in that time."""

    @property
    def total(self) -> float:
        return sum(self.parts.values())


class HybridWorlds(NamedTuple):
    """Hybrid nodes that train beside the core, or worlds of several."""

    nodes: int = 0
    replicas: int = 1
    """Replicas of each world."""


ALONE = HybridWorlds()


def forward_flops(shape: ModelShape, tokens: float, squares: float, loss: float) -> float:
    """FLOPs of a forward pass with causal attention; ``loss`` of the tokens carry loss."""
    layers = tokens * shape.layer_flops_per_token + shape.pairs(tokens, squares) * shape.attention_flops_per_pair
    return layers + loss * shape.head_flops_per_token


class TrainCost:
    """Time and memory of layouts of one model on one kind of device, for one batch."""

    def __init__(
        self, shape: ModelShape, device: Device, devices_per_node: int, work: TrainWork, factor: float = 1.0
    ) -> None:
        """``factor``: measured over counted seconds."""
        self.shape, self.device, self.work = shape, device, work
        self._node, self._factor = devices_per_node, factor
        self._flops_s = device.peak_flops * device.product_efficiency
        self._bytes_s = device.hbm_bytes_s * device.stream_efficiency
        self._products = BACKWARD / (2 if shape.lora else 1)
        """Work of the products of a backward pass; frozen weights have no gradient, and that of adapters is little."""
        self._tokens = work.tokens
        self._forwards = float(work.minibatches > 1)
        """Passes before the update, of this model: of the proximal policy, and of a reference by its products."""
        if work.reference:
            self._forwards += work.reference.layer_flops_per_token / shape.layer_flops_per_token
        self._flops = forward_flops(shape, self._tokens, work.squares, work.loss)
        self._forward, self._backward = self._layer_seconds(self._tokens, work.squares)
        self._head = self._head_seconds(work.loss)
        self.longest_share = self._alone(work.longest, work.longest**2, work.longest_loss) / self._alone(
            self._tokens, work.squares, work.loss
        )
        """Least share of the batch's work of the slowest replica: that of the longest trajectory."""
        self._packs: dict[int, float] = {}

    def _alone(self, tokens: float, squares: float, loss: float) -> float:
        """Seconds of a forward and a backward pass on one device."""
        layer = sum(sum(one.values()) for one in self._layer_seconds(tokens, squares))
        return self.shape.layers * layer + self._head_seconds(loss)

    def _head_seconds(self, loss: float) -> float:
        """Seconds of the head on one device, with its log-probability passes."""
        forward, backward = (
            2 * products * self.shape.hidden / self._flops_s + moved / self._bytes_s
            for products, moved in zip((1, 1 + self._products), LOGIT_BYTES, strict=True)
        )
        return loss * self.shape.vocab * (forward * (1 + self._forwards) + backward)

    def _layer_seconds(self, tokens: float, squares: float) -> tuple[dict[str, float], dict[str, float]]:
        """Seconds of one layer on one device: of a forward pass, and of its backward pass."""
        shape, device = self.shape, self.device
        product = tokens * shape.layer_flops_per_token / shape.layers / self._flops_s
        scores = shape.pairs(tokens, squares) * shape.attention_flops_per_pair / shape.layers / device.peak_flops
        attention = (
            scores / device.attention_forward_efficiency,
            scores * ATTENTION_BACKWARD / device.attention_backward_efficiency,
        )
        rotated = (shape.heads + shape.kv_heads) * shape.head_dim
        widths = self._mlp_width, shape.hidden, rotated, shape.experts_per_token * shape.hidden
        moved = [sum(map(operator.mul, passes, widths)) * self._element_s * tokens for passes in LAYER_PASSES]
        return (
            {"products": product, "attention": attention[0], "elementwise": moved[0]},
            {"products": product * self._products, "attention": attention[1], "elementwise": moved[1]},
        )

    @property
    def _mlp_width(self) -> int:
        """Width of the gated activation of one token."""
        shape = self.shape
        if shape.experts:
            return shape.shared_intermediate + shape.experts_per_token * shape.moe_intermediate
        return shape.intermediate

    @property
    def _element_s(self) -> float:
        """Seconds to move one element."""
        return self.shape.dtype_bytes / self._bytes_s

    def micro_batches(self, layout: TrainLayout) -> int:
        """Micro-batches of one replica and optimizer step."""
        packs = self._packs.get(layout.micro_tokens)
        if packs is None:
            packs = self._packs[layout.micro_tokens] = self.work.packs(layout.micro_tokens)
        return max(1, math.ceil(packs / (layout.dp * self.work.minibatches)))

    def pack_tokens(self, layout: TrainLayout) -> float:
        """Tokens of the largest micro-batch."""
        return float(max(layout.micro_tokens, self.work.longest))

    def memory(self, layout: TrainLayout, shared: bool = False) -> TrainMemory:
        """``shared``: elastic replicas train beside it."""
        return train_memory(
            self.shape,
            layout,
            self.device,
            micro_batches=self.micro_batches(layout),
            pack_tokens=self.pack_tokens(layout),
            copies=shared and self.work.minibatches > 1,
            reference=self.work.reference,
        )

    def limit(self, layout: TrainLayout, shared: bool = False) -> Limit | None:
        """Why the layout does not fit; None when it does."""
        return memory_limit(self.memory(layout, shared), self.device)

    def never_fits(self, layout: TrainLayout) -> bool:
        """Whether the layout fits with no ``dp`` at all: weights, gradients and one micro-batch exceed the device."""
        stateless, pack = msgspec.structs.replace(layout, elastic=True), self.pack_tokens(layout)
        least = train_memory(self.shape, stateless, self.device, micro_batches=1, pack_tokens=pack)
        return memory_limit(least, self.device) is not None

    def device_seconds(self, layout: TrainLayout) -> float:
        """Lower bound of ``time(layout).total * layout.devices`` for every ``dp``: work and traffic of a perfect
        division."""
        parts = self._stage_seconds(layout, 1.0) | self._traffic(layout, 1.0)
        return sum(parts.values()) * layout.replica * self._factor

    def time(self, layout: TrainLayout, beside: HybridWorlds = ALONE) -> TrainTime:
        """Seconds of one global batch, whether the layout fits or not; ``beside`` the core, hybrid nodes train too."""
        updates, every = self.work.minibatches, layout
        if beside.nodes:
            every = msgspec.structs.replace(layout, dp=layout.dp + beside.nodes * beside.replicas)
        n = self.micro_batches(every)
        parts = self._stage_seconds(layout, share := max(1.0 / every.dp, self.longest_share))
        compute = sum(parts.values())
        traffic = self._traffic(layout, share)
        packs = n * updates
        if layout.tp > 1:
            # At the latency of one small all-reduce each.
            layers = max(stage_layers(self.shape.layers, layout.pp))
            traffic["tp"] += self._reduces(layout) * layers * packs * self.device.allreduce_s
        own = sum(largest_trained_params(self.shape, layout.degrees))
        parts["gradients"] = packs * own * (GRADIENT_SUM_BYTES + 2 * self.shape.dtype_bytes) / self._bytes_s
        slots = (n + layout.pp - 1) / n
        parts["bubble"] = (slots - 1.0) * (sum(parts.values()) + traffic["tp"] + traffic["cp"] + traffic["ep"])
        traffic["pp"] *= slots
        if layout.copies > 1:
            backward = compute * self._products / (1.0 + self._products + self._repeated(layout)) / n
            traffic["dp"] = max(0.0, updates * self._reduction(layout) - backward)
        traffic["exchange"] = updates * self._exchange(layout, beside)
        parts["optimizer"] = updates * self._update(layout)
        parts = {name: seconds * self._factor for name, seconds in (parts | traffic).items()}
        peak_s = (1.0 + self._products) * self._flops / (every.devices * self.device.peak_flops)
        return TrainTime(parts, n, peak_s / sum(parts.values()))

    def _repeated(self, layout: TrainLayout) -> float:
        """Forward passes of a layer beside the first."""
        return (layout.recompute == "full") + self._forwards

    def _reduces(self, layout: TrainLayout) -> float:
        """Collectives per layer: two in each forward and backward pass."""
        return 2.0 * (2 + self._repeated(layout))

    def _stage_seconds(self, layout: TrainLayout, share: float) -> dict[str, float]:
        """Computation of the slowest stage with ``share`` of the batch, without what each micro-batch takes."""
        stages, times = stage_layers(self.shape.layers, layout.pp), 1 + self._repeated(layout)
        layer = {name: self._forward[name] * times + self._backward[name] for name in self._forward}
        if layout.recompute == "selective":
            layer["elementwise"] += SELECTIVE_PASSES * self._mlp_width * self._element_s * self._tokens
        ends, head = (max(stages), 0.0), self._head
        if stages[-1] * (each := sum(layer.values())) + head > ends[0] * each:
            ends = stages[-1], head
        scale = share / (layout.tp * layout.cp)
        return {name: ends[0] * seconds * scale for name, seconds in layer.items()} | {"head": ends[1] * scale}

    def _traffic(self, layout: TrainLayout, share: float) -> dict[str, float]:
        """Collectives of tensor, context and expert ranks, and of stages without a bubble, with ``share`` of the
        batch."""
        shape = self.shape
        tokens = share * self._tokens / layout.cp
        element, layers, reduces = shape.dtype_bytes, max(stage_layers(shape.layers, layout.pp)), self._reduces(layout)
        tp = cp = ep = pp = 0.0
        if layout.tp > 1:
            # Of the two collectives that of the MLP is one of routed tokens, or none, where there are experts.
            width = float(shape.hidden)
            if shape.experts:
                width *= 0.5 + 0.5 * (shape.experts_per_token if layout.etp != 1 else 0)
            if shape.kv_heads < layout.tp:
                # Megatron-Core gathers q, k and v: half the traffic of an all-reduce, one for every two of them.
                width += (shape.heads + 2 * shape.kv_heads) * shape.head_dim / 4
            ring = 2 * (layout.tp - 1) / layout.tp * tokens * width * element / self._link(layout.tp)
            tp = reduces * layers * ring
        if layout.cp > 1:
            # Keys and values are gathered in every pass of a layer, their gradients scattered.
            kv = 2 * shape.kv_heads * shape.head_dim / min(layout.tp, shape.kv_heads) * element
            cp = reduces / 2 * layers * kv * tokens * (layout.cp - 1) / self._link(layout.tp * layout.cp)
        if layout.ep > 1:
            sent = tokens / layout.tp * shape.experts_per_token * shape.hidden * element
            ep = reduces * layers * sent * (layout.ep - 1) / layout.ep / self._link(layout.degrees.expert_processes)
        if layout.pp > 1:
            pp = (2 + self._forwards) * tokens / layout.tp * shape.hidden * element / self._link(layout.replica)
        return {"tp": tp, "cp": cp, "ep": ep, "pp": pp}

    def _reduction(self, layout: TrainLayout) -> float:
        """Seconds to reduce gradients over the copies of a parameter, and to gather its new weights."""
        common, experts = largest_trained_params(self.shape, layout.degrees)
        copies, expert_copies = layout.copies, layout.expert_copies
        sent = common * (copies - 1) / copies + experts * (expert_copies - 1) / expert_copies
        return (GRAD_BYTES + self.shape.dtype_bytes) * sent / self._link(layout.devices)

    def _update(self, layout: TrainLayout) -> float:
        common, experts = largest_trained_params(self.shape, layout.degrees)
        # Norm of the gradients, then state and gradient read, state written, the float32 weights rounded. Bases of
        # adapted weights come from host memory.
        moved = 2 * GRAD_BYTES + 2 * optimizer_bytes(self.shape) + GRAD_BYTES + self.shape.dtype_bytes
        own = common / layout.copies + experts / layout.expert_copies
        # Both ways of the link at once, beside the arithmetic.
        hosted_s = own * optimizer_bytes(self.shape) / self.device.host_bytes_s if layout.host else 0.0
        merged_s = bool(self.shape.lora) * self.shape.weight_bytes / layout.devices / self.device.host_bytes_s
        return max(hosted_s, own * moved / self._bytes_s) + (common + experts) * SCALED_BYTES / self._bytes_s + merged_s

    def _exchange(self, layout: TrainLayout, beside: HybridWorlds) -> float:
        """Seconds of gradients to the core and new weights back: of the slower side.

        The hybrid nodes sum gradients among themselves, and pass new weights on, before one of them talks to the core.
        """
        if not beside.nodes:
            return 0.0
        common, experts = largest_trained_params(self.shape, layout.degrees)
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
