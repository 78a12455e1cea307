"""Shapes of the models that the trainer supports, and the parallel degrees that divide them."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from libra_hpc.errors import invalid

from .supported import FAMILIES, Family, Widths, check_trained, has_qkv_bias, rope_settings, with_defaults
from .train_parallel import Degrees, expert_fault


class Architecture(msgspec.Struct, frozen=True):
    family: str
    """One of `libra_hpc.models.supported.FAMILIES`."""
    layers: int
    hidden: int
    heads: int
    groups: int
    """Key/value heads."""
    head_dim: int
    ffn: int
    vocab: int
    tied: bool
    """Whether input and output embedding are one matrix."""
    norm_eps: float
    rope: dict[str, Any]
    """`libra_hpc.models.supported.rope_settings`."""
    qkv_bias: bool
    max_positions: int
    experts: int = 0
    """Routed experts of every layer; 0: dense."""
    experts_per_token: int = 0
    moe_ffn: int = 0
    """MLP width of one expert."""
    norm_topk: bool = True
    """Whether the weights of a token's experts sum to 1."""

    @property
    def kind(self) -> Family:
        """What all models of the family have in common."""
        return FAMILIES[self.family]

    @property
    def qk_norm(self) -> bool:
        return self.kind.qk_norm

    @property
    def rotary_dim(self) -> int:
        """Channels of a head that the rotary embedding turns."""
        return int(self.head_dim * self.rope["partial_rotary_factor"])

    @property
    def widths(self) -> Widths:
        return Widths(self.heads, self.groups, self.head_dim, self.ffn, self.vocab)


def _read_config(path: Path) -> Any:
    try:
        config = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise invalid("model.path", str(path), f"is not valid JSON ({error})", "a Hugging Face config.json") from error
    if not isinstance(config, dict):
        raise invalid("model.path", str(path), "holds no JSON object", "a Hugging Face config.json")
    return config


def read_shape(model_dir: Path) -> Architecture:
    """Read ``model_dir/config.json``; raises `UserError` when it is missing, or for a model the trainer lacks."""
    path = model_dir / "config.json"
    if not path.is_file():
        raise invalid("model.path", str(model_dir), "there is no config.json in it", "a Hugging Face model folder")
    config = _read_config(path)
    check_trained(config)
    config = with_defaults(config)
    heads = int(config["num_attention_heads"])
    experts = int(config["num_experts"]) if config["model_type"] == "qwen3_moe" else 0
    return Architecture(
        family=str(config["model_type"]),
        layers=int(config["num_hidden_layers"]),
        hidden=int(config["hidden_size"]),
        heads=heads,
        groups=int(config.get("num_key_value_heads") or heads),
        head_dim=int(config.get("head_dim") or config["hidden_size"] // heads),
        ffn=int(config["intermediate_size"]),
        vocab=int(config["vocab_size"]),
        tied=bool(config.get("tie_word_embeddings", False)),
        norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        rope=rope_settings(config),
        qkv_bias=has_qkv_bias(config),
        max_positions=int(config.get("max_position_embeddings", 4096)),
        experts=experts,
        experts_per_token=int(config["num_experts_per_tok"]) if experts else 0,
        moe_ffn=int(config["moe_intermediate_size"]) if experts else 0,
        norm_topk=bool(config.get("norm_topk_prob", False)),
    )


@cache
def stage_layers(layers: int, pp: int) -> tuple[int, ...]:
    """Layers of each of ``pp`` pipeline stages, which differ by at most one.

    The last stage has the logits and the first one the embedding: the larger stages stand before the last ones, after
    the first.
    """
    each, more = divmod(layers, pp)
    larger = range(pp - 1 - more, pp - 1) if more < pp - 1 else range(pp - 1)
    return tuple(each + (stage in larger) for stage in range(pp))


def check_parallel(shape: Architecture, tp: int, pp: int) -> None:
    """Raise `UserError` unless ``tp`` divides the model and each of ``pp`` stages has a layer."""
    shape.widths.check(tp)
    if shape.layers < pp:
        raise invalid("train.pp", pp, f"the model has only {shape.layers} layers", f"1 to {shape.layers}")


def check_experts(shape: Architecture, *, tp: int, ep: int, etp: int, ranks: int) -> None:
    """Raise `UserError` unless ``ep`` and ``etp`` fit the model and the ``ranks`` processes of a stage."""
    fault = expert_fault(shape.experts, shape.moe_ffn, Degrees(tp, ep=ep, etp=etp), ranks)
    if fault is not None:
        raise fault.error()
