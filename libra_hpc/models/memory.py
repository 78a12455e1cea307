"""Memory of one training device, term by term, in bytes; mixed precision as in Megatron-Core.

- State: weights, float32 gradients, AdamW's moments, and a float32 copy of weights of another type: 18 bytes per bf16
  parameter, and a bit that marks changes. All copies of a parameter in the core share all but weights and gradients;
  an elastic replica lacks them. With ``optimizer.host`` they are in host memory (`host_memory`), but for pieces.
  Adapters have 16 bytes, and weights that are frozen beside them no state: their bases are in host memory, and come
  back a layer at a time, when there are no activations.
- A reference policy is in host memory (`host_memory`), and for its pass in the place of activations and logits.
- Several minibatches beside elastic replicas: a step that loses one returns to a copy of the optimizer's state.
- Activations: what a layer retains for its backward pass (`activation_bytes_per_token`); context parallelism divides
  it, but for gathered keys and values. With full recomputation, a layer retains its input, and one at a time the rest.
- Pipeline: stage i of 1F1B holds as many micro-batches as there are stages from it on, the last one the output layer.
- The fullest stage counts.
"""

from __future__ import annotations

from functools import cache
from typing import ClassVar, get_args

import msgspec

from libra_hpc.config.learn import Recompute
from libra_hpc.config.node_groups import Degrees, TrainWorld, core_world
from libra_hpc.config.run import RunConfig

from .adapters import adapter_params
from .architecture import stage_layers
from .devices import Device
from .shapes import ModelShape

GRAD_BYTES = 4
"""Bytes per parameter: float32 gradients."""
MOMENT_BYTES = 8
"""AdamW's two moments, float32."""
MASTER_BYTES = 4
"""The float32 copy of weights of another type."""
SLICE_LOGITS = 32 << 20
"""Logits of `libra_hpc.trainer.model.head` at a time: 128 MiB in float32, at most twice that with their exponentials;
64 MiB for kernels. At 32k tokens 1,024 columns. Half: thinner matrix products. Double: 256 MiB more at the peak."""
LOGIT_BYTES = (8, 6)
"""Bytes of each in the forward pass (float32, and its exponential) and in the backward pass (float32 and bfloat16), in
plain torch; kernels of the head need 2."""
MARK_BYTES = 1 / 8
"""A bit for each rounded weight: whether it changed (`trainer.saved.weight_changes`)."""
STATE_BYTES = MOMENT_BYTES + MASTER_BYTES
"""What an update changes, per parameter: moments, and float32 weights whatever their type."""
HOSTED_PIECE, HOSTED_LANES = 1 << 24, 2
"""Elements of a piece of the state that streams through the device, and pieces at once. Half: copies of 64 MB are as
fast. Double: 0.8 GB of the device instead of 0.4."""
PADDING = 1.25
"""Factor on attention activations: sequences that share a padded block (`libra_hpc.trainer.model.packing`) cost up to
half as much again, usually less. The variable-length kernel pads nothing, but a GPU that fails its check attends over
blocks."""
USABLE = 0.94
"""Share of device memory to plan with; torch's caching allocator loses a few per cent to fragments."""

RECOMPUTE: tuple[Recompute, ...] = get_args(Recompute)


class TrainLayout(msgspec.Struct, frozen=True, order=True):
    """How training is spread over ``tp * pp * cp * dp`` devices."""

    tp: int
    pp: int
    cp: int
    ep: int
    """Expert-parallel ranks among the devices of a stage."""
    dp: int
    micro_tokens: int
    """Most tokens of a packed micro-batch."""
    recompute: Recompute = "none"
    """What every layer computes again in the backward pass."""
    etp: int = 0
    """Tensor ranks of an expert; 0: ``tp``."""
    elastic: bool = False
    """Replicas beside the core: weights and gradients alone."""
    host: bool = False
    """Whether AdamW's state is in host memory."""

    @property
    def degrees(self) -> Degrees:
        return Degrees(self.tp, self.pp, self.cp, self.ep, self.etp)

    @property
    def replica(self) -> int:
        """Devices of one data-parallel replica."""
        return self.tp * self.pp * self.cp

    @property
    def copies(self) -> int:
        """Devices with the same parameters, which share their optimizer state in the core."""
        return self.dp * self.cp

    @property
    def expert_copies(self) -> int:
        """Devices with the same experts."""
        return max(1, self.copies * self.tp // self.degrees.expert_processes)

    @property
    def recomputed(self) -> str:
        """For sentences: ", recomputed" or nothing."""
        return {"none": "", "selective": ", partly recomputed", "full": ", recomputed"}[self.recompute]

    @property
    def devices(self) -> int:
        return self.replica * self.dp

    def __str__(self) -> str:
        return "·".join([*str(self.degrees).split(), f"DP{self.dp}"])


def core_layout(config: RunConfig) -> TrainLayout:
    """The layout of a run's core."""
    return world_layout(config, core_world(config))


def world_layout(config: RunConfig, world: TrainWorld, *, elastic: bool = False) -> TrainLayout:
    """The layout of one of a run's worlds; ``elastic``: it has no optimizer."""
    return TrainLayout(
        **world.degrees._asdict(),
        dp=world.dp,
        micro_tokens=config.train.micro_tokens,
        recompute=config.train.recompute,
        elastic=elastic,
        host=config.optimizer.host,
    )


class MemoryTerms(msgspec.Struct, frozen=True):
    """Bytes by what they are for."""

    ALWAYS: ClassVar[tuple[str, ...]] = ()
    """Terms that are shown where they are 0, too."""

    @property
    def total(self) -> float:
        return sum(self.terms().values())

    def terms(self) -> dict[str, float]:
        """Terms by their names in words."""
        sizes = {name.replace("_", " "): float(getattr(self, name)) for name in self.__struct_fields__}
        return {name: size for name, size in sizes.items() if size or name in self.ALWAYS}


class TrainMemory(MemoryTerms, frozen=True):
    """Bytes of the fullest device."""

    ALWAYS = ("logits",)
    weights: float
    gradients: float
    optimizer: float
    minibatch_copy: float
    activations: float
    logits: float
    reference_policy: float
    """What it needs beyond activations and logits."""
    workspace: float

    @property
    def largest(self) -> str:
        """The largest term with its gigabytes."""
        name, size = max(self.terms().items(), key=lambda term: term[1])
        return f"{name} {size / 1e9:.0f}"


class Limit(msgspec.Struct, frozen=True):
    """Why a choice is impossible."""

    over: float
    """Bytes that are missing for training, tokens of KV cache for rollout."""
    reason: str
    """In words, with the largest term."""


def train_memory(
    shape: ModelShape,
    layout: TrainLayout,
    device: Device,
    *,
    micro_batches: int,
    pack_tokens: float,
    copies: bool = False,
    reference: ModelShape | None = None,
) -> TrainMemory:
    """Memory of the fullest device when a replica runs ``micro_batches`` of at most ``pack_tokens`` tokens each.

    ``copies``: whether steps have several minibatches, and elastic replicas. ``reference``: a frozen model.
    """
    layers = stage_layers(shape.layers, layout.pp)
    # Of stages with equally many layers the first has the most micro-batches in flight.
    stages = {0, layers.index(max(layers)), layout.pp - 1}
    return max(
        (
            _stage(
                shape,
                layout,
                device,
                stage=stage,
                in_flight=min(layout.pp - stage, micro_batches),
                pack_tokens=pack_tokens,
                copies=copies,
                reference=reference,
            )
            for stage in sorted(stages)
        ),
        key=lambda m: m.total,
    )


def memory_limit(memory: TrainMemory, device: Device) -> Limit | None:
    """What is missing and the largest term; None when it fits."""
    usable = USABLE * device.memory_bytes
    over = memory.total - usable
    if over <= 0:
        return None
    sizes = f"{over / 1e9:.1f} GB over: {memory.total / 1e9:.0f} of {usable / 1e9:.0f} GB"
    return Limit(over, f"{sizes}, {memory.largest}")


@cache
def stage_params(shape: ModelShape, degrees: Degrees, stage: int) -> tuple[float, float]:
    """Parameters of one device of a pipeline stage: those on every data-parallel rank, and its share of the experts."""
    tp, pp = degrees.tp, degrees.pp
    stages = stage_layers(shape.layers, pp)
    common, experts = shape.layer_params(sum(stages[:stage]), stages[stage])
    ends = (stage == 0) + (stage == pp - 1)
    if pp == 1 and shape.tied_embeddings:
        ends = 1
    return (common + ends * shape.head_params) / tp, experts / degrees.expert_processes


@cache
def trained_params(shape: ModelShape, degrees: Degrees, stage: int) -> tuple[float, float]:
    """What of `stage_params` has gradients, or the adapters that have them."""
    return (adapter_params if shape.lora else stage_params)(shape, degrees, stage)


@cache
def largest_trained_params(shape: ModelShape, degrees: Degrees) -> tuple[float, float]:
    """`trained_params` of the stage with the most."""
    return max((trained_params(shape, degrees, stage) for stage in range(degrees.pp)), key=sum)


def optimizer_bytes(shape: ModelShape) -> int:
    """Bytes of AdamW's state per parameter; adapters are in float32 themselves."""
    return MOMENT_BYTES + (MASTER_BYTES if shape.dtype_bytes < MASTER_BYTES and not shape.lora else 0)


def activation_bytes_per_token(shape: ModelShape, recompute: Recompute, tp: int = 1, etp: int = 0) -> float:
    """Bytes that one layer retains of one token on each of ``tp`` ranks.

    - Divided by TP (sequence parallelism): the inputs of all norms and both blocks, mostly 4 h.
    - Divided by TP: attention's padded input q and output q, and its unpadded output q.
    - Divided by TP, at most by the key/value heads: projection q + 2 kv, and padded inputs 2 kv. A rank has whole ones.
    - An output gate: itself and the gated output. A gated delta net has its inputs, outputs and gates; the mean counts.
    - Divided by TP, dense: gate, up and product, 3 f.
    - Mixture of experts, divided by TP: 3 expert widths of each routed token. Its input and output on every one of the
      ``etp`` (0: ``tp``) tensor ranks of an expert.

    Selective recomputation leaves out the inputs of both blocks if they are outputs of norms, the padded output and
    the dense product.
    """
    if recompute == "full":
        return shape.hidden * shape.dtype_bytes / tp
    stored = recompute == "none"
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    whole = max(1.0, tp / shape.kv_heads)
    elements = whole * (q + 2 * kv + PADDING * 2 * kv) + PADDING * (1 + stored) * q + q + 2 * q * shape.output_gate
    if net := shape.delta_net:
        mixed = net.channels + 4 * net.values
        elements += (1 - shape.attention_layers / shape.layers) * (mixed - elements)
    if shape.experts:
        elements += 3 * shape.shared_intermediate + shape.experts_per_token * (
            2 * shape.hidden * (etp or tp) + 3 * shape.moe_intermediate
        )
    else:
        elements += (2 + stored) * shape.intermediate
    states = shape.norms + 2 * (stored or not shape.pre_norm)
    return (states * shape.hidden + elements) / tp * shape.dtype_bytes


def gathered_bytes_per_token(shape: ModelShape, layout: TrainLayout) -> float:
    """Bytes of the keys and values of one token of the whole pack that one layer gathers over context ranks."""
    if layout.cp == 1:
        return 0.0
    return 2 * shape.kv_heads * shape.head_dim / min(layout.tp, shape.kv_heads) * shape.dtype_bytes


def head_bytes(shape: ModelShape, tokens: float, tp: int) -> float:
    """Bytes of the output layer at its peak, on each of ``tp`` ranks, when all ``tokens`` carry loss.

    The backward pass has the tokens' hidden states, their float32 gradient and a slice's part of it, and the gradient
    of a trained weight beside a slice of logits.
    """
    vocab = shape.vocab / tp
    logits = min(SLICE_LOGITS, tokens * vocab)
    states = tokens * shape.hidden * (2 * shape.dtype_bytes + GRAD_BYTES)
    forward, backward = (logits * size for size in LOGIT_BYTES)
    return max(forward, backward + states + (not shape.lora) * vocab * shape.hidden * shape.dtype_bytes)


def _stage(
    shape: ModelShape,
    layout: TrainLayout,
    device: Device,
    *,
    stage: int,
    in_flight: int,
    pack_tokens: float,
    copies: bool,
    reference: ModelShape | None,
) -> TrainMemory:
    (common, experts), trained = (count(shape, layout.degrees, stage) for count in (stage_params, trained_params))
    shared = layout.copies, layout.expert_copies
    own, marked = (
        0.0 if layout.elastic else one[0] / shared[0] + one[1] / shared[1] for one in (trained, (common, experts))
    )
    here = min(own, HOSTED_LANES * HOSTED_PIECE) if layout.host else own
    tokens = pack_tokens / layout.cp
    layers = stage_layers(shape.layers, layout.pp)[stage]
    marks, factor = (MARK_BYTES, device.activation_factor) if shape.dtype_bytes < MASTER_BYTES else (0, 1.0)

    def layer(recompute: Recompute) -> float:
        each = activation_bytes_per_token(shape, recompute, layout.tp, layout.etp) * tokens * factor
        return each + (gathered_bytes_per_token(shape, layout) * pack_tokens if recompute != "full" else 0.0)

    activations = in_flight * layers * layer(layout.recompute)
    if layout.recompute == "full":
        activations += layer("none")
    last, frozen = stage == layout.pp - 1, 0.0
    logits = head_bytes(shape, tokens, layout.tp) if last else 0.0
    if reference:
        frozen = activation_bytes_per_token(reference, "none", layout.tp, layout.etp) * tokens
        frozen = max(frozen, head_bytes(reference, tokens, layout.tp) if last else 0.0)
        frozen += sum(stage_params(reference, layout.degrees, stage)) * reference.dtype_bytes
    return TrainMemory(
        weights=(common + experts) * shape.dtype_bytes + sum(trained) * MASTER_BYTES * bool(shape.lora),
        gradients=sum(trained) * GRAD_BYTES,
        optimizer=here * optimizer_bytes(shape) + marked * marks,
        minibatch_copy=own * STATE_BYTES if copies and not layout.host else 0.0,
        activations=activations,
        logits=logits,
        reference_policy=max(0.0, frozen - activations - logits),
        workspace=device.workspace_bytes,
    )
