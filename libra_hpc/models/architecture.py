"""Shapes of the models that the trainer supports, the degrees that divide them, and their tensors; needs no torch.

Tensors have names in Megatron-Core and in Hugging Face files. Some families store q, k and v, or gate and up, as one
(`libra_hpc.models.supported.Family`). A pipeline stage numbers its layers from 0, an expert-parallel rank its experts.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from libra_hpc.errors import invalid

from .published import Shapes
from .shapes import ModelShape, read_config, shape_from_config
from .supported import FAMILIES, SLIDING, Family, check_trained, rope_settings, rotated, with_defaults

MULTIPLIERS = {
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "attention_scale": "attention_multiplier",
    "logits_scale": "logits_scaling",
}
"""Keys of a config with multipliers."""


class Architecture(ModelShape, frozen=True, kw_only=True):
    """A model with what its computation needs besides the counts."""

    family: str
    """One of `libra_hpc.models.supported.FAMILIES`."""
    norm_eps: float
    rope: dict[str, Any]
    """`libra_hpc.models.supported.rope_settings`."""
    max_positions: int
    window_rope: dict[str, Any] | None = None
    """The same of layers with windows, where it differs."""
    rotated: tuple[bool, ...] = ()
    """Whether each layer has a rotary embedding; empty: all have one."""
    norm_topk: bool = True
    """Whether the weights of a token's experts sum to 1."""
    routed_scale: float = 1.0
    """Factor of the weights of a token's experts."""
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    """Factor of what attention and MLP add to the hidden state."""
    attention_scale: float | None = None
    """None: 1 / sqrt(head_dim)."""
    logits_scale: float = 1.0
    """Logits are divided by it."""
    wrapper: str = ""
    """In whose folder it is published, one of `libra_hpc.models.published.WRAPPERS`; empty: in its own."""

    @property
    def kind(self) -> Family:
        """What all models of the family have in common."""
        return FAMILIES[self.family]


def read_shape(model_dir: Path) -> Architecture:
    """Read ``model_dir/config.json``; raises `UserError` when it is missing, or for a model the trainer lacks."""
    path = model_dir / "config.json"
    if not path.is_file():
        raise invalid("model.path", str(model_dir), "there is no config.json in it", "a Hugging Face model folder")
    return architecture(read_config(path, "model.path", str(model_dir)))


def architecture(config: dict[str, Any]) -> Architecture:
    """The model of a ``config.json``; raises `UserError` for one that the trainer lacks."""
    check_trained(config)
    config = with_defaults(config)
    family = FAMILIES[config["model_type"]]
    names = MULTIPLIERS if family.multipliers else {}
    scales: dict[str, Any] = {field: float(config.get(key, 1.0)) for field, key in names.items()}
    if family.root_embedding:
        scales = {
            "embedding_scale": config["hidden_size"] ** 0.5,
            "attention_scale": config["query_pre_attn_scalar"] ** -0.5,
        }
    return Architecture(
        **msgspec.structs.asdict(shape_from_config(config, "model.path")),
        family=config["model_type"],
        norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        rope=rope_settings(config),
        window_rope=rope_settings(config, SLIDING) if family.window_theta else None,
        rotated=rotated(config),
        max_positions=int(config.get("max_position_embeddings", 4096)),
        norm_topk=bool(config.get("norm_topk_prob", family.stacked_experts or bool(family.delta_net))),
        routed_scale=float(config["routed_scaling_factor"]) if family.sigmoid_router else 1.0,
        wrapper=config.get("wrapper", ""),
        **scales,
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
    shape.check_tp(tp)
    if shape.layers < pp:
        raise invalid("train.pp", pp, f"the model has only {shape.layers} layers", f"1 to {shape.layers}")


TIED_HEAD = "lm_head.weight"
"""With tied embeddings a file may have or omit the output head: it is the embedding."""
STACKED = {
    "linear_fc1.weight": "gate_up_proj",
    "linear_fc1.bias": "gate_up_proj_bias",
    "linear_fc2.weight": "down_proj",
    "linear_fc2.bias": "down_proj_bias",
}
"""Stacked experts: Megatron-Core's names and those in the files."""
NAMED = 3
"""Most tensor names quoted in one error message."""


class Entry(NamedTuple):
    """How one Megatron-Core parameter maps to Hugging Face tensors."""

    hf: tuple[str, ...]
    """One name for each part of the layout, or one for all of them in a row."""
    layout: Literal["plain", "qkv", "gated", "sections"]
    """``sections``: `DeltaNet.sections`, each cut over the ranks."""
    dim: int | None
    """Dimension cut over tensor-parallel ranks; None: replicated."""
    copy: bool = False
    """The last stage's copy of a tied embedding: loaded, never saved."""
    expert: int | None = None
    """Number of the expert that it belongs to; ``dim`` is then cut over expert-tensor ranks."""
    stacked: bool = False
    """It has this expert and those that follow; ``dim`` is cut over expert-parallel ranks."""


def stage_entries(shape: Architecture, pp: int, pp_rank: int, experts: range | None = None) -> dict[str, Entry]:
    """Parameters of one pipeline stage, by Megatron-Core name, in a fixed order; default: with all ``experts``."""
    experts = range(shape.experts) if experts is None else experts
    out: dict[str, Entry] = {}
    if pp_rank == 0:
        out["embedding.word_embeddings.weight"] = Entry(("model.embed_tokens.weight",), "plain", 0)
    stages = stage_layers(shape.layers, pp)
    first = sum(stages[:pp_rank])
    for local in range(stages[pp_rank]):
        ours, theirs = f"decoder.layers.{local}.", f"model.layers.{first + local}."
        out.update(_mixer(shape, first + local, ours, theirs))
        mlp = (f"{ours}mlp.", f"{theirs}mlp.")
        dense = not shape.experts or first + local < shape.dense_layers
        out.update(_mlp(shape, *mlp) if dense else _experts(shape, experts, *mlp))
    if pp_rank == pp - 1:
        out["decoder.final_layernorm.weight"] = Entry(("model.norm.weight",), "plain", None)
        if not shape.tied_embeddings:
            out["output_layer.weight"] = Entry(("lm_head.weight",), "plain", 0)
        elif pp > 1:
            out["output_layer.weight"] = Entry(("model.embed_tokens.weight",), "plain", 0, copy=True)
    return out


def _mixer(shape: Architecture, layer: int, m: str, h: str) -> dict[str, Entry]:
    """A layer without its MLP."""
    family = shape.kind
    attention = h + "self_attn."
    qkv = ["qkv_proj"] if family.fused_qkv else [f"{x}_proj" for x in "qkv"]
    plain, net = dict(family.norms), shape.delta_net
    if net and net.layers[layer]:
        out = {f"{m}{ours}.weight": Entry((f"{h}{theirs}.weight",), "plain", None) for ours, theirs in plain.items()}
        for name in net.sizes(shape.hidden):
            cut = {"norm.weight": None, "out_proj.weight": 1}.get(name, 0)
            out[f"{m}self_attention.{name}"] = Entry(
                (f"{h}linear_attn.{name}",), "sections" if net.sections(name) else "plain", cut
            )
        return out
    if shape.qk_norm:
        plain |= {f"self_attention.{x}_layernorm": f"self_attn.{x}_norm" for x in "qk"}
    out = {f"{m}{ours}.weight": Entry((f"{h}{theirs}.weight",), "plain", None) for ours, theirs in plain.items()}
    for kind in ("weight", "bias") if shape.qkv_bias else ("weight",):
        names = tuple(f"{attention}{x}.{kind}" for x in qkv)
        out[f"{m}self_attention.linear_qkv.{kind}"] = Entry(names, "qkv", 0)
    out[m + "self_attention.linear_proj.weight"] = Entry((attention + "o_proj.weight",), "plain", 1)
    if shape.sinks:
        out[m + "self_attention.linear_proj.bias"] = Entry((attention + "o_proj.bias",), "plain", None)
        out[m + "self_attention.core_attention.sinks"] = Entry((attention + "sinks",), "plain", 0)
    return out


def _mlp(shape: Architecture, m: str, h: str, expert: int | None = None) -> dict[str, Entry]:
    gated = ("gate_up_proj",) if shape.kind.fused_mlp else ("gate_proj", "up_proj")
    return {
        f"{m}linear_fc1.weight": Entry(tuple(f"{h}{x}.weight" for x in gated), "gated", 1, expert=expert),
        f"{m}linear_fc2.weight": Entry((f"{h}down_proj.weight",), "plain", 1, expert=expert),
    }


def _experts(shape: Architecture, experts: range, m: str, h: str) -> dict[str, Entry]:
    family = shape.kind
    if family.stacked_experts:
        out = {f"{m}router.{kind}": Entry((f"{h}router.{kind}",), "plain", None) for kind in ("weight", "bias")}
        for ours, theirs in STACKED.items():
            out[f"{m}experts.{ours}"] = Entry((f"{h}experts.{theirs}",), "plain", 0, expert=experts.start, stacked=True)
        return out
    out = {f"{m}router.weight": Entry((f"{h}gate.weight",), "plain", None)}
    if family.sigmoid_router:
        out[f"{m}router.expert_bias"] = Entry((f"{h}gate.e_score_correction_bias",), "plain", None)
    if family.shared_expert:
        out.update(_mlp(shape, f"{m}shared_experts.", f"{h}{family.shared_expert}."))
    if family.shared_gate:
        out[f"{m}shared_experts.gate_weight"] = Entry((f"{h}{family.shared_expert}_gate.weight",), "plain", None)
    for local, expert in enumerate(experts):
        out.update(_mlp(shape, f"{m}experts.local_experts.{local}.", f"{h}experts.{expert}.", expert))
    return out


def hf_shapes(shape: Architecture) -> dict[str, tuple[int, ...]]:
    """All tensors; in the order in which a wrapper's files have experts as one tensor."""
    names = [name for entry in stage_entries(shape, 1, 0).values() for name in entry.hf]
    last = {name: ".experts." in name and ".down_proj." in name for name in names}
    return {name: _hf_shape(shape, name) for name in sorted(names, key=last.__getitem__)}


def _hf_shape(shape: Architecture, name: str) -> tuple[int, ...]:
    hidden, q, kv = shape.hidden, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    if shape.delta_net and ".linear_attn." in name:
        return shape.delta_net.sizes(hidden)[name.partition(".linear_attn.")[2]]
    shared = ".shared_expert" in name
    ffn = shape.shared_intermediate if shared else shape.moe_intermediate if ".experts." in name else shape.intermediate
    by_suffix: dict[str, tuple[int, ...]] = {
        "q_proj.weight": (q * (1 + shape.output_gate), hidden),
        "k_proj.weight": (kv, hidden),
        "v_proj.weight": (kv, hidden),
        "qkv_proj.weight": (q + 2 * kv, hidden),
        "q_proj.bias": (q,),
        "k_proj.bias": (kv,),
        "v_proj.bias": (kv,),
        "q_norm.weight": (q if shape.whole_qk_norm else shape.head_dim,),
        "k_norm.weight": (kv if shape.whole_qk_norm else shape.head_dim,),
        "o_proj.weight": (hidden, q),
        "gate_proj.weight": (ffn, hidden),
        "up_proj.weight": (ffn, hidden),
        "gate_up_proj.weight": (2 * ffn, hidden),
        "down_proj.weight": (hidden, ffn),
        "experts.gate_up_proj": (shape.experts, hidden, 2 * ffn),
        "experts.gate_up_proj_bias": (shape.experts, 2 * ffn),
        "experts.down_proj": (shape.experts, ffn, hidden),
        "experts.down_proj_bias": (shape.experts, hidden),
        "router.weight": (shape.experts, hidden),
        "router.bias": (shape.experts,),
        "self_attn.sinks": (shape.heads,),
        "gate.weight": (shape.experts, hidden),
        "gate.e_score_correction_bias": (shape.experts,),
        "shared_expert_gate.weight": (1, hidden),
        "embed_tokens.weight": (shape.vocab, hidden),
        "lm_head.weight": (shape.vocab, hidden),
    }
    return by_suffix.get(".".join(name.split(".")[-2:]), (hidden,))


def predicts_ahead(name: str, layers: int) -> bool:
    """Whether a tensor serves the prediction of several tokens, which neither engine has: ``mtp``, or a layer more."""
    number = name.removeprefix("model.layers.").partition(".")[0]
    return name.startswith("mtp.") or (number.isdecimal() and int(number) >= layers)


def tensor_fault(found: Shapes, expected: Shapes, tied: bool) -> str:
    """How the tensors of weight files differ from those of the model, as a sentence; empty: they do not.

    ``tied``: the model shares input and output embedding, so `TIED_HEAD` may be there or not.
    """
    optional = {TIED_HEAD} if tied else set()
    if missing := sorted(expected.keys() - found.keys() - optional):
        return f"{len(missing)} tensors are missing: {_some(missing)}"
    if unknown := sorted(found.keys() - expected.keys() - optional):
        return f"{len(unknown)} tensors are not the model's: {_some(unknown)}"
    if wrong := sorted(name for name in found.keys() & expected.keys() if found[name] != expected[name]):
        first = wrong[0]
        shapes = f"{first} is {list(found[first])}, expected {list(expected[first])}"
        return f"{len(wrong)} tensors have a wrong shape: {shapes}"
    return ""


def _some(names: list[str]) -> str:
    return ", ".join(names[:NAMED]) + (", ..." if len(names) > NAMED else "")
