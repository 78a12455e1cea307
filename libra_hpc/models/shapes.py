"""Model shapes: the integers of a transformer that determine memory, FLOPs and communication.

A shape comes from a short name (`models.toml`) or a Hugging Face ``config.json``. A multiply-add counts as two FLOPs.
"""

from __future__ import annotations

import json
import math
import os
import tomllib
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from libra_hpc.config.run import RunConfig
from libra_hpc.errors import UserError, error_text, invalid

from .published import text_config
from .supported import FAMILIES, MIXTURE, delta_layers, has_qkv_bias, refusals, sliding_window, windows, with_defaults

CONFIG = "a Hugging Face config.json"
BUILTIN = Path(__file__).with_name("models.toml")
ARCHITECTURES = tuple(FAMILIES)
"""Values of ``model_type`` for `model_shape`."""
LARGEST_COUNT = 10_000_000
"""Largest count of layers, channels or tokens; the largest vocabulary has 300,000."""
DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
FUSED, SPLIT = ("in_proj_qkvz", "in_proj_ba"), ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
"""Projections of gated delta nets: queries, keys and values, gates, and two numbers of each head."""
KV_ELEMENT_BYTES = {"auto": 0, "fp8": 1}
"""Values of ``rollout.kv_dtype``; 0: as of a weight."""
BLOCK = 32
"""Tokens of a block of KV cache where no run file has ``rollout.block_size``, whose default it is."""
IN_FLIGHT = 4096
"""Tokens of two steps of vLLM on a GPU: a layer with a window retains them besides until a step has ended."""
STATE, STATES = -1, 2
"""Layers with a state, which vLLM retains twice: at the last whole block, for other turns, and now."""
PADDED = 1.5
"""Kinds of layers whose counts differ by less have groups of the larger one."""


class DeltaNet(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The gated delta nets of a model, which are alike."""

    layers: tuple[bool, ...]
    """Whether each layer of the model is one; others have attention."""
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int
    """Tokens that the convolution sees."""
    fused: bool
    """Projections are `FUSED`, else `SPLIT`."""
    state_element_bytes: int = 0
    """Bytes of an element of the state of an engine; 0: as of a weight."""

    @property
    def projections(self) -> tuple[str, ...]:
        return FUSED if self.fused else SPLIT

    @property
    def keys(self) -> int:
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Queries, keys and values, which are convolved."""
        return 2 * self.keys + self.values

    def state_bytes(self, tp: int, weight_bytes: int) -> int:
        """Bytes of the states of a layer and a sequence on each of ``tp`` devices."""
        convolved = self.channels * (self.kernel - 1) * weight_bytes
        state = self.values * self.key_dim * (self.state_element_bytes or weight_bytes)
        return (convolved + state) // tp

    def sections(self, name: str) -> tuple[int, ...]:
        """Rows of queries, of keys and of values in a tensor that has them one after the other; empty: it has not."""
        one_after_the_other = name in ("conv1d.weight", f"{SPLIT[0]}.weight")
        return (self.keys, self.keys, self.values) if one_after_the_other else ()

    def sizes(self, hidden: int) -> dict[str, tuple[int, ...]]:
        """Tensors of one layer, by their names in the files."""
        rows: tuple[int, ...] = (self.channels, self.values, self.value_heads, self.value_heads)
        rows = (sum(rows[:2]), sum(rows[2:])) if self.fused else rows
        inputs = {f"{name}.weight": (count, hidden) for name, count in zip(self.projections, rows, strict=True)}
        return inputs | {
            "conv1d.weight": (self.channels, 1, self.kernel),
            "A_log": (self.value_heads,),
            "dt_bias": (self.value_heads,),
            "norm.weight": (self.value_dim,),
            "out_proj.weight": (hidden, self.values),
        }


class Lora(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Low-rank adapters, which are trained in the place of weights (`libra_hpc.models.adapters`)."""

    rank: int
    scale: float
    """Factor of their products."""
    targets: tuple[str, ...]
    """What has them: some of ``attention``, ``mlp``, ``experts``."""


class ModelShape(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A decoder-only transformer with grouped-query attention and a gated MLP, dense or mixture of experts."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    """Width of the dense gated MLP; unused in a mixture of experts."""
    vocab: int
    tied_embeddings: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    whole_qk_norm: bool = False
    """The norms of q and k are over all heads."""
    norms: int = 2
    """Norms of a layer's hidden state."""
    pre_norm: bool = True
    """Attention and MLP read a norm's output."""
    experts: int = 0
    """Routed experts per layer; 0: dense."""
    experts_per_token: int = 0
    moe_intermediate: int = 0
    """Width of one routed expert."""
    shared_intermediate: int = 0
    """Width of the expert for every token; 0: none."""
    shared_gate: bool = False
    """A sigmoid of the token weighs its result."""
    router_bias: bool = False
    delta_net: DeltaNet | None = None
    """Its layers have a state in the place of keys and values."""
    output_gate: bool = False
    """The projection of queries has a gate for each channel of the output of attention."""
    stacked_experts: bool = False
    """Experts have biases, and no tensor ranks."""
    sinks: bool = False
    """Heads have a score each, and the output of attention a bias."""
    dense_layers: int = 0
    """First layers of a mixture of experts that have a dense MLP."""
    windows: tuple[int, ...] = ()
    """Width of every layer's attention window, 0 for full attention; empty: no layer has one."""
    dtype_bytes: int = 2
    """Bytes of a weight."""
    kv_element_bytes: int = 0
    """Bytes of an element of the KV cache; 0: as of a weight."""
    block: int = BLOCK
    """Tokens of a block of KV cache."""
    longest: int = 0
    """Tokens of the sequences that KV caches are counted for; 0: windows count as whole caches, and no states."""
    lora: Lora | None = None
    """Adapters that are trained, and nothing else; None: all weights are."""
    untrained: str = ""
    """Why this version can only plan with the model; empty: it can train it."""

    @property
    def attention_params(self) -> int:
        """Weights of one layer's attention and norms."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        matrices = self.hidden * ((2 + self.output_gate) * q + 2 * kv)
        heads = self.heads + self.kv_heads if self.whole_qk_norm else 2
        norms = self.norms * self.hidden + heads * self.head_dim * self.qk_norm
        sinks = (self.heads + self.hidden) * self.sinks
        return matrices + (q + 2 * kv) * self.qkv_bias + norms + sinks

    @property
    def group_rows(self) -> int:
        """Rows of the projection of queries for each key and value head."""
        return self.heads // self.kv_heads * self.head_dim * (1 + self.output_gate)

    @property
    def attention_layers(self) -> int:
        return self.layers - self._nets(0, self.layers)

    def _nets(self, first: int, count: int) -> int:
        return sum(self.delta_net.layers[first : first + count]) if self.delta_net else 0

    @property
    def net_params(self) -> int:
        """Weights of one gated delta net and its layer's norms."""
        sizes = self.delta_net.sizes(self.hidden).values() if self.delta_net else ()
        return sum(map(math.prod, sizes)) + self.norms * self.hidden

    @property
    def expert_params(self) -> int:
        """Weights of one routed expert; 0 for a dense model."""
        biases = (2 * self.moe_intermediate + self.hidden) * self.stacked_experts
        return 3 * self.hidden * self.moe_intermediate + biases

    @property
    def expert_columns(self) -> int:
        """MLP columns of a routed expert that tensor ranks may share; 1: none."""
        return 1 if self.stacked_experts else self.moe_intermediate

    def layer_params(self, first: int, count: int) -> tuple[int, int]:
        """Weights of ``count`` layers from ``first`` on: those for every token, and of routed experts.

        For every token: attention, router, dense MLP or shared experts.
        """
        dense = min(max(self.dense_layers - first, 0), count) if self.experts else count
        router = self.hidden * (self.experts + self.shared_gate) + self.experts * self.router_bias
        mlp = dense * self.intermediate + (count - dense) * self.shared_intermediate
        nets = self._nets(first, count)
        mixers = (count - nets) * self.attention_params + nets * self.net_params
        common = mixers + (count - dense) * router + 3 * self.hidden * mlp
        return common, (count - dense) * self.experts * self.expert_params

    @property
    def head_params(self) -> int:
        """Weights of the output projection (those of the input embedding when tied)."""
        return self.hidden * self.vocab

    @property
    def params(self) -> int:
        embeddings = self.head_params * (1 if self.tied_embeddings else 2)
        return sum(self.layer_params(0, self.layers)) + embeddings + self.hidden

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights; biases of routers by sigmoids are in float32 whatever the others are."""
        biases = (self.layers - self.dense_layers) * self.experts * (self.router_bias and not self.stacked_experts)
        return self.params * self.dtype_bytes + biases * (DTYPE_BYTES["float32"] - self.dtype_bytes)

    def kv_bytes_per_device(self, tp: int, in_flight: int = IN_FLIGHT) -> int:
        """Bytes on each of ``tp`` devices for a token of a sequence of `longest`, its layers' states shared out.

        Heads are replicated if ``tp > kv_heads``.
        """
        each = 2 * -(-self.kv_heads // tp) * self.head_dim * (self.kv_element_bytes or self.dtype_bytes)
        if not self.longest:
            return self.attention_layers * each
        return -(-each * self._reserved(each, tp, in_flight) // self.longest)

    def _reserved(self, each: int, tp: int, in_flight: int) -> int:
        """Tokens of one layer's cache that vLLM reserves for a sequence of `longest`; ``each``: bytes of one.

        Layers of a kind form groups of one size, the last of them padded. A group takes blocks from one pool.
        """
        state = self.delta_net.state_bytes(tp, self.dtype_bytes) if self.delta_net else 0
        # A block of attention is as large as a state.
        block = self.block * max(1, -(-state // (self.block * each)))
        kinds = Counter(self.windows) if self.windows else Counter({0: self.attention_layers})
        blocks = {width: -(-min(width - 1 + in_flight, self.longest) // block) + 1 for width in kinds}
        blocks[0] = -(-self.longest // block)
        if self.delta_net:
            kinds[STATE], blocks[STATE] = self.layers - self.attention_layers, STATES
        fewest, most = min(kinds.values()), max(kinds.values())
        size = most if most < PADDED * fewest else fewest
        return sum(-(-count // size) * size * blocks[kind] * block for kind, count in kinds.items())

    @property
    def kv_ratio(self) -> float:
        """Bytes of a KV cache over those of one in the type of the weights."""
        return (self.kv_element_bytes or self.dtype_bytes) / self.dtype_bytes

    def with_kv(self, kv_dtype: str, longest: int = 0, block: int = BLOCK) -> ModelShape:
        """This model with KV caches of a type as in the run file, for contexts of at most ``longest`` tokens."""
        differs = bool(self.windows or self.delta_net)
        return msgspec.structs.replace(
            self, kv_element_bytes=KV_ELEMENT_BYTES[kv_dtype], longest=longest * differs, block=block
        )

    @property
    def layer_flops_per_token(self) -> int:
        """FLOPs of one token's forward pass through all layers, without attention scores and output projection."""
        common, routed = self.layer_params(0, self.layers)
        return 2 * (common + routed // max(1, self.experts) * self.experts_per_token)

    @property
    def head_flops_per_token(self) -> int:
        """FLOPs of the output projection for one position."""
        return 2 * self.head_params

    @property
    def attention_flops_per_pair(self) -> int:
        """FLOPs of scores and weighted sum for one (query, key) pair, all layers and heads."""
        return 4 * self.attention_layers * self.heads * self.head_dim

    def pairs(self, tokens: float, squares: float) -> float:
        """(Query, key) pairs of an average layer; ``squares``: sum of the squared lengths of all sequences."""
        each = [min(squares / 2, window * tokens) if window else squares / 2 for window in self.windows or (0,)]
        return sum(each) / len(each)

    def fault(self, tp: int) -> str:
        """Why Megatron-Core cannot cut the model over ``tp`` devices; empty: it can."""
        fault = self.head_fault(tp)
        if self.output_gate and tp > self.kv_heads:
            return f"exceeds num_key_value_heads = {self.kv_heads} of a model with an output gate"
        # Fewer key/value heads than devices: Megatron-Core cuts the rows of q, k and v evenly, and gathers the result.
        rows = (self.heads + 2 * self.kv_heads) * self.head_dim
        sizes = {"intermediate_size": self.intermediate, "vocab_size": self.vocab, "rows of q, k and v": rows}
        others = (f"does not divide the model's {what} = {size}" for what, size in sizes.items() if size % tp)
        return fault or next(others, "")

    def head_fault(self, tp: int) -> str:
        """Why ``tp`` devices cannot share the heads: q heads evenly, k and v heads evenly or by replication.

        The rule of vLLM, and a part of that of Megatron-Core.
        """
        if self.delta_net and self.delta_net.key_heads % tp:
            return f"does not divide the model's linear_num_key_heads = {self.delta_net.key_heads}"
        if self.heads % tp:
            return f"does not divide the model's num_attention_heads = {self.heads}"
        if self.kv_heads % tp and tp % self.kv_heads:
            return f"neither divides the model's num_key_value_heads = {self.kv_heads} nor is a multiple of it"
        return ""

    def check_tp(self, tp: int, field: str = "train.tp", *, rollout: bool = False) -> None:
        """Raise `UserError` for a degree that Megatron-Core cannot use, or vLLM for ``rollout``."""
        fault = self.head_fault if rollout else self.fault
        if why := fault(tp):
            raise invalid(field, tp, why, ", ".join(str(n) for n in range(1, self.heads + 1) if not fault(n)))

    def divides(self, tp: int) -> bool:
        """Whether vLLM can cut the model over ``tp`` devices."""
        return tp > 0 and not self.head_fault(tp)

    def trains(self, tp: int, pp: int = 1) -> bool:
        """Whether Megatron-Core can cut the model over ``tp`` devices and ``pp`` stages of different lengths."""
        return pp <= self.layers and not self.fault(tp)


_shape = msgspec.json.Decoder(ModelShape)
"""Makes the type whole, for `msgspec.convert`."""


def read_config(path: Path, field: str, value: str) -> dict[str, Any]:
    """Read a Hugging Face ``config.json``, or what a wrapper's has of its text model.

    Raises `UserError` about the ``value`` of a field.
    """
    try:
        config = json.loads(path.read_bytes())
    except RecursionError as error:
        raise invalid(field, value, "its config.json is nested too deeply", CONFIG) from error
    except (OSError, ValueError) as error:
        raise invalid(field, value, f"its config.json is not valid JSON ({error_text(error)})", CONFIG) from error
    if not isinstance(config, dict):
        raise invalid(field, value, "its config.json is not a JSON object", CONFIG)
    return text_config(config)


def model_shape(name_or_path: str | Path) -> ModelShape:
    """A shape by short name (``qwen3-14b``, in any case), or from a ``config.json`` or its folder.

    Raises `UserError` for an unknown name, an unreadable file, or an architecture or variant that the counts do not
    cover.
    """
    text = str(name_or_path)
    found = shapes().get(text.lower())
    if found is not None:
        return found
    path = Path(text).expanduser()
    if os.path.isdir(path):
        path = path / "config.json"
    if not os.path.exists(path):
        why = "neither a known short name nor a folder or file with a Hugging Face config"
        raise invalid("model", text, why, sorted(shapes()))
    config = read_config(path, "model", text)
    return shape_from_config(config, name=path.parent.name if path.name == "config.json" else path.stem)


def reference_shape(config: RunConfig, policy: ModelShape) -> ModelShape | None:
    """The reference policy's, in the trainer's type; that of ``policy`` where no folder is named, None without one."""
    algorithm = config.algorithm
    if not algorithm.has_reference or not os.path.isdir(algorithm.reference):
        return policy if algorithm.has_reference else None
    return msgspec.structs.replace(model_shape(algorithm.reference), dtype_bytes=policy.dtype_bytes)


@cache
def shapes() -> dict[str, ModelShape]:
    raw = tomllib.loads(BUILTIN.read_text())
    built = {name: msgspec.convert({**fields, "name": name}, ModelShape) for name, fields in raw.items()}
    # Of the mixtures, Qwen3's has norms of q and k.
    study = {name for name, shape in built.items() if shape.experts and not shape.qk_norm}
    return {name: msgspec.structs.replace(s, untrained=MIXTURE) if name in study else s for name, s in built.items()}


def shape_from_config(config: dict[str, Any], name: str) -> ModelShape:
    """A shape from the content of a Hugging Face ``config.json``.

    Raises `UserError` that names a missing, mistyped or unsupported key.
    """
    kind = config.get("model_type")
    family = FAMILIES.get(str(kind))
    if family is None:
        raise invalid(f"{name}: model_type", kind, "unknown architecture", ARCHITECTURES)
    if config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1:
        raise invalid(
            f"{name}: mlp_only_layers",
            config.get("mlp_only_layers"),
            "dense layers among mixture-of-experts layers are not modelled",
            "no such layers",
        )
    config = with_defaults(config)
    _check_window(config, name, family.full_every)
    heads = _count(config, name, "num_attention_heads")
    hidden = _count(config, name, "hidden_size")
    moe = family.experts
    intermediate = _count(config, name, "intermediate_size")
    return ModelShape(
        name=name,
        layers=_count(config, name, "num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=_count(config, name, "num_key_value_heads", heads),
        head_dim=_count(config, name, "head_dim", hidden // heads),
        intermediate=intermediate,
        vocab=_count(config, name, "vocab_size"),
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=has_qkv_bias(config),
        qk_norm=family.qk_norm or ("use_qk_norm" in family.defaults and bool(config["use_qk_norm"])),
        whole_qk_norm=family.whole_qk_norm,
        norms=len(family.norms),
        pre_norm="input_layernorm" in family.norms,
        experts=_count(config, name, "num_experts") if moe else 0,
        experts_per_token=_count(config, name, "num_experts_per_tok") if moe else 0,
        moe_intermediate=_count(config, name, "moe_intermediate_size", intermediate) if moe else 0,
        shared_intermediate=_shared_width(config, name) if family.shared_expert else 0,
        shared_gate=family.shared_gate,
        router_bias=family.sigmoid_router or family.stacked_experts,
        delta_net=_delta_net(config, name, family.delta_net) if family.delta_net else None,
        output_gate=bool(family.delta_net),
        stacked_experts=family.stacked_experts,
        sinks=family.sinks,
        dense_layers=config["first_k_dense_replace"] if family.sigmoid_router else 0,
        windows=windows(config),
        dtype_bytes=_dtype_bytes(config, name),
        untrained=next((refusal.reason for refusal in refusals(config)), ""),
    )


def _delta_net(config: dict[str, Any], name: str, kind: str) -> DeltaNet:
    return DeltaNet(
        layers=delta_layers(config),
        key_heads=_count(config, name, "linear_num_key_heads"),
        value_heads=_count(config, name, "linear_num_value_heads"),
        key_dim=_count(config, name, "linear_key_head_dim"),
        value_dim=_count(config, name, "linear_value_head_dim"),
        kernel=_count(config, name, "linear_conv_kernel_dim"),
        fused=kind == "fused",
        state_element_bytes=DTYPE_BYTES.get(str(config.get("mamba_ssm_dtype")), 0) if kind == "split" else 0,
    )


def _count(config: dict[str, Any], name: str, key: str, default: int | None = None) -> int:
    value = config.get(key)
    if value is None:
        if default is None:
            raise UserError(f"{name}: the model's config has no {key!r}; valid: an integer from 1 to {LARGEST_COUNT}.")
        return default
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= LARGEST_COUNT:
        raise invalid(f"{name}: {key}", value, "is no count", f"an integer from 1 to {LARGEST_COUNT}")
    return value


def _check_window(config: dict[str, Any], name: str, full_every: int) -> None:
    window = sliding_window(config)
    if window is not None and full_every < 0:
        raise invalid(f"{name}: sliding_window", window, "sliding-window attention is not modelled", "null")
    if window is not None or full_every > 0:
        _count(config, name, "sliding_window")


def _shared_width(config: dict[str, Any], name: str) -> int:
    if "n_shared_experts" in config:
        return _count(config, name, "n_shared_experts") * _count(config, name, "moe_intermediate_size")
    return _count(config, name, "shared_expert_intermediate_size")


def _dtype_bytes(config: dict[str, Any], name: str) -> int:
    dtype = config.get("dtype") or config.get("torch_dtype") or "bfloat16"
    if dtype not in DTYPE_BYTES:
        raise invalid(f"{name}: dtype", dtype, "unknown type of weights", sorted(DTYPE_BYTES))
    return DTYPE_BYTES[dtype]
