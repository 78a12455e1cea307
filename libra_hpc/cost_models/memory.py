"""Memory of one training device, term by term, in bytes.

Mixed precision as Megatron-Core does it: weights in the model's own type, gradients accumulated in float32
(`GRAD_BYTES`), AdamW's two moments (`MOMENT_BYTES`) and, unless the weights are float32 themselves, a float32 copy of
them (`MASTER_BYTES`): 18 bytes per bf16 parameter, of which a distributed optimizer divides the last 12 by the
data-parallel ranks.

Activations are counted by what a layer of our trainer keeps for its backward pass, per token and in the model's type:
the inputs of both norms and of both blocks (4 h, on every tensor-parallel rank), the projection (q + 2 kv), what
attention works on and gives back, padded to rectangles by `PADDING` (2 q + 2 kv), its output without padding (q), and
gate, up and their product (3 f), all divided by TP; context parallelism divides everything by CP.  A test counts what
autograd really saves.  A mixture of experts keeps each routed token's input and output, and 3 widths of its experts.
With full recomputation a layer keeps its input only, and one layer at a time the rest.  The first stage of 1F1B holds
as many micro-batches as there are stages. The last stage holds the logits of one micro-batch: `LOGITS_BYTES` per entry,
for the matmul's output and its gradient (2 each) and, for the tokens that carry loss, a copy, the float32 softmax and
its gradient; half of the tokens are taken to carry loss.

Measured on an H200 with Qwen3-4B and a third of the tokens in the loss (docs/lab/0.1-h200.md): state within 0.3 %,
the rest, as the layers were then, within 4 %.

A replica's two end stages are compared, since embedding and in-flight micro-batches weigh on the first one and head and
logits on the last.  `USABLE` of the device is planned with: the rest is lost to fragmentation.
"""

from __future__ import annotations

from functools import cache

import msgspec

from libra_hpc.hardware.devices import Device
from libra_hpc.hardware.models import ModelShape

GRAD_BYTES = 4
MOMENT_BYTES = 8
MASTER_BYTES = 4
LOGITS_BYTES = 10
PADDING = 1.25
"""Sequences of similar length share a rectangle that may cost half as much attention again as they need
(`libra_hpc.train.packing`): usually less."""
USABLE = 0.94
"""Share of device memory that one can plan with; the caching allocator of torch loses a few per cent to fragments."""


class TrainLayout(msgspec.Struct, frozen=True, order=True):
    """How training is spread over devices: ``tp * pp * cp * dp`` of them."""

    tp: int
    pp: int
    cp: int
    ep: int
    """Divides ``dp``: experts are spread over data-parallel ranks."""
    dp: int
    micro_tokens: int
    """Most tokens of one packed micro-batch."""
    recompute: bool = False
    """Full recomputation of every layer in the backward pass."""
    distributed: bool = False
    """Optimizer state divided over the data-parallel ranks."""

    @property
    def replica(self) -> int:
        """Devices of one data-parallel replica."""
        return self.tp * self.pp * self.cp

    @property
    def devices(self) -> int:
        """Devices in all."""
        return self.replica * self.dp

    def __str__(self) -> str:
        parts = [f"TP{self.tp}", f"PP{self.pp}"]
        parts += [f"CP{self.cp}"] if self.cp > 1 else []
        parts += [f"EP{self.ep}"] if self.ep > 1 else []
        return "·".join([*parts, f"DP{self.dp}"])


class TrainMemory(msgspec.Struct, frozen=True):
    """Bytes of the fullest device."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    logits: float
    workspace: float

    @property
    def total(self) -> float:
        """All terms."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.logits + self.workspace

    def terms(self) -> dict[str, float]:
        """Bytes by name."""
        return {name: getattr(self, name) for name in self.__struct_fields__}


class Limit(msgspec.Struct, frozen=True):
    """Why a choice is out of the question."""

    over: float
    """How far the choice is from possible: bytes for training, tokens of KV cache for rollout."""
    reason: str
    """In words, with the term that weighs most."""


def train_memory(
    shape: ModelShape, layout: TrainLayout, device: Device, micro_batches: int, pack_tokens: float
) -> TrainMemory:
    """Memory of the fullest device when a replica runs ``micro_batches`` of at most ``pack_tokens`` tokens each."""
    ends = [
        _stage(shape, layout, device, micro_batches, pack_tokens, first=first, last=not first or layout.pp == 1)
        for first in (True, False)
    ]
    return max(ends, key=lambda m: m.total)


def memory_limit(memory: TrainMemory, device: Device) -> Limit | None:
    """None when it fits; else which term weighs most and how much is missing."""
    over = memory.total - USABLE * device.memory_bytes
    if over <= 0:
        return None
    name, size = max(memory.terms().items(), key=lambda term: term[1])
    usable = USABLE * device.memory_bytes
    return Limit(
        over, f"{over / 1e9:.1f} GB over: {memory.total / 1e9:.0f} of {usable / 1e9:.0f} GB, {name} {size / 1e9:.0f}"
    )


@cache
def stage_params(shape: ModelShape, tp: int, pp: int, ep: int, first: bool, last: bool) -> tuple[float, float]:
    """Parameters of one device of a pipeline stage: those every data-parallel rank holds, and its share of the
    experts."""
    layers = shape.layers / pp
    ends = (1 if first else 0) + (1 if last else 0)
    if first and last and shape.tied_embeddings:
        ends = 1
    return (
        layers * shape.shared_params + ends * shape.head_params
    ) / tp, layers * shape.experts * shape.expert_params / (tp * ep)


def optimizer_bytes(shape: ModelShape) -> int:
    """Bytes of AdamW's state per parameter."""
    return MOMENT_BYTES + (MASTER_BYTES if shape.dtype_bytes < MASTER_BYTES else 0)


def activation_bytes_per_token(shape: ModelShape, recompute: bool, tp: int = 1) -> float:
    """Bytes one layer keeps of one token on each of ``tp`` ranks."""
    if recompute:
        return float(shape.hidden * shape.dtype_bytes)
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    elements = q + 2 * kv + PADDING * (2 * q + 2 * kv) + q
    if shape.experts:
        elements += 3 * shape.shared_intermediate + shape.experts_per_token * (
            2 * shape.hidden + 3 * shape.moe_intermediate
        )
    else:
        elements += 3 * shape.intermediate
    return (4 * shape.hidden + elements / tp) * shape.dtype_bytes


def _stage(
    shape: ModelShape,
    layout: TrainLayout,
    device: Device,
    micro_batches: int,
    pack_tokens: float,
    first: bool,
    last: bool,
) -> TrainMemory:
    common, experts = stage_params(shape, layout.tp, layout.pp, layout.ep, first, last)
    shard, expert_shard = (layout.dp * layout.cp, layout.dp * layout.cp // layout.ep) if layout.distributed else (1, 1)
    in_flight = min(layout.pp, micro_batches) if first else 1
    tokens = pack_tokens / layout.cp
    activations = (
        in_flight * shape.layers / layout.pp * activation_bytes_per_token(shape, layout.recompute, layout.tp) * tokens
    )
    if layout.recompute:
        activations += activation_bytes_per_token(shape, False, layout.tp) * tokens
    return TrainMemory(
        weights=(common + experts) * shape.dtype_bytes,
        gradients=(common + experts) * GRAD_BYTES,
        optimizer=(common / shard + experts / expert_shard) * optimizer_bytes(shape),
        activations=activations,
        logits=tokens / layout.tp * shape.vocab * LOGITS_BYTES if last else 0.0,
        workspace=device.workspace_bytes,
    )
