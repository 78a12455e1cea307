"""The one table of model families: what each one has, and why some cannot be trained; needs no torch.

- `FAMILIES`: every ``model_type`` with a shape, as a `Family`.
- `refusals`: keys of a Hugging Face ``config.json`` that the trainer does not support.

`check`, `submit`, the planner, the search and the trainer (`libra_hpc.models.architecture`) use these.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

import msgspec

from libra_hpc.errors import UserError, invalid

from .published import WRAPPERS

ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""Rotary embeddings of the trainer (`libra_hpc.trainer.model.rotary`).

``dynamic`` and ``longrope`` change with the length of a sequence, in vLLM with that of the longest one allowed: the
two engines would disagree.
"""
ROPE_NUMBERS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
}
"""Numbers that a rotary embedding needs."""
YARN_OPTIONS = ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim")
"""Numbers that YaRN may have."""


PRE_NORMS = {"input_layernorm": "input_layernorm", "pre_mlp_layernorm": "post_attention_layernorm"}
"""Hugging Face's name of the second is for its place: behind attention, before the MLP."""


class Family(msgspec.Struct, frozen=True, kw_only=True):
    """What a ``model_type`` has besides pre-norm RMSNorm, SwiGLU, rotary embedding and grouped-query attention.

    Shapes, memory and seconds (`libra_hpc.models.shapes`), names (`libra_hpc.models.architecture`) and the model itself
    (`libra_hpc.trainer.model.megatron_model`) follow from it.
    """

    untrained: str = ""
    """Why this version cannot train it; empty: it can."""
    qkv_bias: bool = False
    """Biases on q, k and v, whatever ``attention_bias`` is."""
    qkv_bias_only: bool = False
    """``attention_bias`` means q, k and v; elsewhere it means the output projection too, which the trainer lacks."""
    qk_norm: bool = False
    """Norms of the heads of q and k."""
    whole_qk_norm: bool = False
    """Each of these norms is one over all heads."""
    multipliers: bool = False
    """Factors of the embedding, of what layers add, of attention and of logits are in the config."""
    norms: dict[str, str] = msgspec.field(default_factory=PRE_NORMS.copy)
    """A layer's norms: Megatron-Core's names and those in the files. ``*_bda.norm`` stands behind attention or MLP,
    before the result is added."""
    norm_offset: bool = False
    """Norms multiply by 1 + weight."""
    activation: Literal["silu", "gelu_pytorch_tanh"] = "silu"
    """What the MLP applies to its gate."""
    root_embedding: bool = False
    """Embeddings are multiplied by the root of their width, scores divided by that of ``query_pre_attn_scalar``."""
    experts: bool = False
    """All layers are a router and experts."""
    shared_expert: str = ""
    """Name of the expert for every token in the files; empty: there is none."""
    shared_gate: bool = False
    """A sigmoid of the token weighs its result."""
    sigmoid_router: bool = False
    """Experts are chosen by sigmoids and a bias that stays as it is, and weighed by ``routed_scaling_factor``; the
    first ``first_k_dense_replace`` layers are dense. Files may have layers beyond the last one."""
    stacked_experts: bool = False
    """All experts of a layer are one tensor in the files, transposed, with gate and up in turns. They have biases, as
    the router, and gate and up are clamped."""
    sinks: bool = False
    """Each head has a learned score that takes a share of the attention; all projections of attention have biases."""
    delta_net: Literal["", "fused", "split"] = ""
    """Layers but each fourth are gated delta nets unless ``layer_types`` differ, with one projection of all inputs in
    the files or several; attention has an output gate."""
    fused_qkv: bool = False
    """One ``qkv_proj`` in the files: all q, all k, all v."""
    fused_mlp: bool = False
    """One ``gate_up_proj`` in the files."""
    partial_rotary: bool = False
    """``partial_rotary_factor`` is the share of a head that turns."""
    interleaved_rotary: bool = False
    """Channels 2i and 2i+1 turn together; elsewhere i and i + half."""
    rope_types: tuple[str, ...] = ROPE_TYPES
    full_every: int = -1
    """Layers have windows, but each so-manyth one full attention unless ``layer_types`` differ; 0: all have windows;
    -1: the trainer has no windows for the family."""
    window_theta: float = 0.0
    """Base of the rotary embedding of layers with windows, which is then unscaled by default; 0: that of the others."""
    rotated: int = 0
    """Each so-manyth layer has no rotary embedding unless ``no_rope_layers`` (0: none) differ; 0: all have one."""
    window_switch: bool = False
    """``use_sliding_window`` turns ``sliding_window`` on, and is off by default."""
    float32: tuple[str, ...] = ()
    """Ends of the names of tensors that are not trained, and in float32 whatever ``model.dtype`` is, as in both engines
    and the files."""
    defaults: dict[str, Any] = {}
    """Values that transformers assumes for missing keys, where they differ from ours."""


_GLM_MOE = {
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "partial_rotary_factor": 0.5,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "moe_intermediate_size": 1408,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.0,
    "norm_topk_prob": True,
    "use_qk_norm": False,
}
_ERNIE = {
    "num_key_value_heads": 2,
    "head_dim": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e5,
    "tie_word_embeddings": True,
}
_GLM_NORMS = PRE_NORMS | {"self_attn_bda.norm": "post_self_attn_layernorm", "mlp_bda.norm": "post_mlp_layernorm"}
FULL, SLIDING = LAYER_TYPES = ("full_attention", "sliding_attention")
DELTA = "linear_attention"
_GEMMA_NORMS = {
    "input_layernorm": "input_layernorm",
    "self_attn_bda.norm": "post_attention_layernorm",
    "pre_mlp_layernorm": "pre_feedforward_layernorm",
    "mlp_bda.norm": "post_feedforward_layernorm",
}
_OPTIONS = ("use_bias", "clip_qkv", "attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention")
_GEMMA = {
    "num_key_value_heads": 4,
    "head_dim": 256,
    "rope_theta": 1e6,
    "sliding_window": 4096,
    "query_pre_attn_scalar": 256,
    "tie_word_embeddings": True,
}
_OLMO_NORMS = {"self_attn_bda.norm": "post_attention_layernorm", "mlp_bda.norm": "post_feedforward_layernorm"}
MIXTURE = "a mixture of experts of another kind than Qwen3's"
_QWEN = {"num_key_value_heads": 32, "sliding_window": 4096}
_QWEN_MOE = {
    "num_key_value_heads": 4,
    "sliding_window": 4096,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
}
_QWEN2_MOE = {
    "num_key_value_heads": 16,
    "sliding_window": 4096,
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 1408,
    "shared_expert_intermediate_size": 5632,
}
_GLM = {
    "num_key_value_heads": 2,
    "head_dim": 128,
    "rms_norm_eps": 1.5625e-7,
    "attention_bias": True,
    "partial_rotary_factor": 0.5,
}
_GPT_OSS = {
    "num_key_value_heads": 8,
    "head_dim": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1.5e5,
    "attention_bias": True,
    "num_experts": 128,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
    "rope_parameters": {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
}
_DELTA_NET = {
    "num_key_value_heads": 2,
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
_DELTA_MOE = {
    **_DELTA_NET,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_experts": 256,
    "num_experts_per_tok": 8,
}
CLAMPED = {"swiglu_alpha": 1.702, "swiglu_limit": 7.0}
"""Numbers of the clamped activation, in vLLM and in the trainer."""
IN_TURNS = "sliding_attention and full_attention in turns"
FAMILIES: dict[str, Family] = {
    "ernie4_5": Family(interleaved_rotary=True, defaults=_ERNIE),
    "gemma3_text": Family(
        qk_norm=True,
        norms=_GEMMA_NORMS,
        norm_offset=True,
        activation="gelu_pytorch_tanh",
        root_embedding=True,
        full_every=6,
        window_theta=1e4,
        defaults=_GEMMA,
    ),
    "glm": Family(qkv_bias_only=True, fused_mlp=True, partial_rotary=True, interleaved_rotary=True, defaults=_GLM),
    "glm4": Family(
        qkv_bias_only=True,
        norms=_GLM_NORMS,
        fused_mlp=True,
        partial_rotary=True,
        interleaved_rotary=True,
        defaults=_GLM,
    ),
    "glm4_moe": Family(
        qkv_bias_only=True,
        partial_rotary=True,
        experts=True,
        shared_expert="shared_experts",
        sigmoid_router=True,
        float32=("gate.e_score_correction_bias",),
        defaults=_GLM_MOE,
    ),
    # vLLM takes any rotary embedding for YaRN.
    "gpt_oss": Family(
        qkv_bias=True,
        experts=True,
        stacked_experts=True,
        sinks=True,
        rope_types=("yarn",),
        full_every=2,
        defaults=_GPT_OSS,
    ),
    "granite": Family(multipliers=True),
    "llama": Family(),
    # vLLM's own factor of queries beyond the original positions is under another key: `most_positions`.
    "ministral3": Family(
        defaults={
            "num_key_value_heads": 8,
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e6,
                "factor": 16.0,
                "original_max_position_embeddings": 16384,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.1,
            },
        }
    ),
    "mistral": Family(full_every=0, defaults={"num_key_value_heads": 8, "sliding_window": 4096}),
    "mixtral": Family(untrained=MIXTURE, experts=True),
    "olmo2": Family(qk_norm=True, whole_qk_norm=True, norms=_OLMO_NORMS, defaults={"rms_norm_eps": 1e-5}),
    "olmo3": Family(
        qk_norm=True,
        whole_qk_norm=True,
        norms=_OLMO_NORMS,
        full_every=4,
        window_theta=5e5,
        defaults={"rms_norm_eps": 1e-5, "rope_theta": 5e5, "sliding_window": 4096},
    ),
    "olmoe": Family(
        qk_norm=True,
        whole_qk_norm=True,
        experts=True,
        defaults={"rms_norm_eps": 1e-5, "num_experts": 64, "num_experts_per_tok": 8},
    ),
    # transformers takes "yarn" in a Phi-3 model for "longrope".
    "phi3": Family(
        fused_qkv=True,
        fused_mlp=True,
        partial_rotary=True,
        rope_types=("default",),
        full_every=0,
        defaults={"rms_norm_eps": 1e-5},
    ),
    "qwen2": Family(qkv_bias=True, window_switch=True, defaults=_QWEN),
    "qwen2_moe": Family(
        qkv_bias=True,
        experts=True,
        shared_expert="shared_expert",
        shared_gate=True,
        window_switch=True,
        defaults=_QWEN2_MOE,
    ),
    "qwen3": Family(qk_norm=True, window_switch=True, defaults={**_QWEN, "head_dim": 128}),
    "qwen3_moe": Family(qk_norm=True, experts=True, window_switch=True, defaults=_QWEN_MOE),
    "qwen3_5_moe_text": Family(
        qk_norm=True,
        norm_offset=True,
        partial_rotary=True,
        delta_net="split",
        window_switch=True,
        experts=True,
        shared_expert="shared_expert",
        shared_gate=True,
        defaults=_DELTA_MOE,
    ),
    "qwen3_5_text": Family(
        qk_norm=True,
        norm_offset=True,
        partial_rotary=True,
        delta_net="split",
        window_switch=True,
        defaults={**_DELTA_NET, "num_key_value_heads": 4},
    ),
    "qwen3_next": Family(
        qk_norm=True,
        norm_offset=True,
        partial_rotary=True,
        delta_net="fused",
        window_switch=True,
        experts=True,
        shared_expert="shared_expert",
        shared_gate=True,
        defaults={**_DELTA_MOE, "num_experts": 512, "num_experts_per_tok": 10},
    ),
    "seed_oss": Family(
        qkv_bias_only=True, defaults={"num_key_value_heads": 8, "head_dim": 128, "attention_bias": True}
    ),
    "smollm3": Family(
        rotated=4,
        window_switch=True,
        defaults={"num_key_value_heads": 4, "tie_word_embeddings": True, "rope_theta": 2e6},
    ),
}
TRAINED = tuple(name for name, family in FAMILIES.items() if not family.untrained)
"""``model_type`` of the models that can be trained."""
_FLOAT32 = tuple({end for family in FAMILIES.values() for end in family.float32})


def in_float32(name: str) -> bool:
    """Whether a tensor of the files is one of those that a row of `FAMILIES` has in float32, untrained."""
    return name.endswith(_FLOAT32)


class Refusal(msgspec.Struct, frozen=True):
    """One key of a ``config.json`` that prevents training."""

    key: str
    value: Any
    why: str
    valid: tuple[str, ...] | str

    @property
    def reason(self) -> str:
        return self.why if self.key == "model_type" else f"{self.key} = {self.value!r}: {self.why}"

    def error(self, field: str) -> UserError:
        valid: Iterable[str] | str = self.valid
        return invalid(f"{field}: {self.key}", self.value, self.why, valid)


def _family(config: Mapping[str, Any]) -> Family:
    return FAMILIES.get(str(config.get("model_type")), Family())


def with_defaults(config: Mapping[str, Any]) -> dict[str, Any]:
    """``config`` and what transformers assumes for missing keys (not for keys that are null)."""
    # transformers 5 writes the first of the other names in most families.
    others = [config[name] for name in ("num_local_experts", "n_routed_experts") if name in config]
    experts = {"num_experts": others[0]} if others else {}
    return {**_family(config).defaults, **experts, **config}


def refusals(config: Mapping[str, Any]) -> Iterator[Refusal]:
    """All keys that prevent training by this version; none: the model can be trained."""
    kind = config.get("model_type")
    family = FAMILIES.get(str(kind))
    if family is None or family.untrained:
        why = family.untrained if family else "this version cannot train this architecture"
        inner = (config.get("text_config") or {}).get("model_type")
        alone = f"its language model alone, in a folder of its own ({inner})"
        yield Refusal("model_type", kind, why, alone if inner in TRAINED else (*TRAINED, *WRAPPERS))
        return
    if family.delta_net and FULL not in (config.get("layer_types") or (FULL,)):
        yield Refusal("layer_types", [DELTA], "no layer has keys and values", f"{FULL} among them")
    yield from _numbers(config)
    yield from _variants(with_defaults(config), family)
    yield from _rope(with_defaults(config), family)


def check_trained(config: Mapping[str, Any], field: str = "model.path") -> None:
    """Raise `UserError` for the first of `refusals`."""
    for refusal in refusals(config):
        raise refusal.error(field)


def sliding_window(config: Mapping[str, Any]) -> Any:
    """Width of the attention window; None: there is none, or no sequence that the model admits is longer."""
    config = with_defaults(config)
    family = _family(config)
    window = config.get("sliding_window")
    # Without a switch of the family transformers and vLLM ignore one in the config.
    if window is None or (family.window_switch and not config.get("use_sliding_window")):
        return None
    positions = config.get("max_position_embeddings")
    inert = isinstance(positions, int) and isinstance(window, int) and window >= positions
    return None if inert else window


def windows(config: Mapping[str, Any]) -> tuple[int, ...]:
    """Width of every layer's attention window, 0 for full attention; empty: no layer has one."""
    config = with_defaults(config)
    every, layers = FAMILIES[config["model_type"]].full_every, range(config["num_hidden_layers"])
    if every > 0:
        every = config.get("sliding_window_pattern") or every
        kinds = config.get("layer_types") or [LAYER_TYPES[(i + 1) % every > 0] for i in layers]
        return tuple(config["sliding_window"] * (kind == SLIDING) for kind in kinds)
    window = sliding_window(config)
    return (window,) * len(layers) if window else ()


def delta_layers(config: Mapping[str, Any]) -> tuple[bool, ...]:
    """Whether each layer is a gated delta net."""
    every = config.get("full_attention_interval") or 4
    kinds = config.get("layer_types") or [
        (FULL, DELTA)[(i + 1) % every > 0] for i in range(config["num_hidden_layers"])
    ]
    return tuple(kind == DELTA for kind in kinds)


def rotated(config: Mapping[str, Any]) -> tuple[bool, ...]:
    """Whether each layer has a rotary embedding; empty: all have one."""
    if not (every := _family(config).rotated):
        return ()
    every = config.get("no_rope_layer_interval") or every
    layers = config.get("no_rope_layers") or [(i + 1) % every for i in range(config["num_hidden_layers"])]
    return tuple(map(bool, layers))


def has_qkv_bias(config: Mapping[str, Any]) -> bool:
    config = with_defaults(config)
    family = FAMILIES[config["model_type"]]
    return family.qkv_bias or bool(config.get("attention_bias"))


def rope_settings(config: Mapping[str, Any], layer: str = FULL) -> dict[str, Any]:
    """Settings of the rotary embedding of a type of layers, read as transformers does.

    transformers 5 writes ``rope_parameters``, earlier versions ``rope_scaling`` and ``rope_theta``.
    """
    config = with_defaults(config)
    found = dict(_rope_section(config, "rope_scaling", layer) or _rope_section(config, "rope_parameters", layer) or {})
    own = _family(config).window_theta if layer == SLIDING else 0.0
    if own:
        config["rope_theta"] = config.get("rope_local_base_freq") or own
    found["rope_type"] = found.get("rope_type") or found.get("type") or "default"
    for key, default in (("rope_theta", 10000.0), ("partial_rotary_factor", 1.0)):
        found[key] = found.get(key) or config.get(key) or default
    # A key beside the rotary settings stands above theirs; the model's positions stand in for a missing one.
    original = config.get("original_max_position_embeddings")
    if original is not None:
        found["original_max_position_embeddings"] = original
    found.setdefault("original_max_position_embeddings", config.get("max_position_embeddings"))
    return found


def _rope_section(config: Mapping[str, Any], section: str, layer: str) -> Any:
    """What a section has for a type of layers; without types in it, it is for full attention."""
    settings = config.get(section)
    if not _family(config).window_theta or not isinstance(settings, Mapping):
        return settings
    return settings.get(layer) if settings.keys() & set(LAYER_TYPES) else settings if layer == FULL else None


def most_positions(config: Mapping[str, Any]) -> int | None:
    """Longest sequence of both engines; None when the config has no limit.

    vLLM tabulates YaRN's angles for ``factor`` times the original positions and no more. It ignores Ministral 3's
    factor of queries, which is 1 within the original positions, and so does the trainer.
    """
    limit = config.get("max_position_embeddings")
    if not isinstance(limit, int):
        return None
    rope = rope_settings(config)
    if rope["rope_type"] == "yarn":
        factor = 1.0 if rope.get("llama_4_scaling_beta") else rope["factor"]
        return min(limit, int(factor * rope["original_max_position_embeddings"]))
    return limit


def _variants(config: Mapping[str, Any], family: Family) -> Iterator[Refusal]:
    for key in ("hidden_act", "hidden_activation"):
        act = config.get(key) or family.activation
        if act != family.activation:
            yield Refusal(key, act, "the trainer has no such activation", (family.activation,))
    yield from _windows(config, family)
    for key in (
        "attention_out_bias" if family.qkv_bias_only or family.sinks else "attention_bias",
        "mlp_bias",
        *_OPTIONS,
    ):
        if config.get(key):
            yield Refusal(key, config[key], f"the trainer has no such {key.rpartition('_')[2]}", "false or null")
    yield from _experts(config, family)
    if quantized := config.get("quantization_config"):
        why, cure = "the trainer reads weights of bfloat16, float16 or float32", "no such key"
        if "mxfp4" in str(quantized):
            cure += ", as in what transformers saves of a model loaded with Mxfp4Config(dequantize=True)"
        elif "fp8" in str(quantized):
            cure += ", as in the folder with BF16 in its name, if there is one"
        yield Refusal("quantization_config", quantized, why, cure)


def _experts(config: Mapping[str, Any], family: Family) -> Iterator[Refusal]:
    # Qwen3-MoE: the trainer builds all layers alike.
    if config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1:
        key = "mlp_only_layers" if config.get("mlp_only_layers") else "decoder_sparse_step"
        yield Refusal(key, config[key], "the trainer has no dense layers among layers of experts", "no such layers")
    for key in ("n_group", "topk_group") if family.sigmoid_router else ():
        if config.get(key, 1) != 1:
            yield Refusal(key, config[key], "the trainer has no groups of experts", "1")
    if family.stacked_experts:
        for key, value in {**CLAMPED, "rms_norm_eps": 1e-5}.items():
            if config.get(key, value) != value:
                yield Refusal(key, config[key], "vLLM has another number for it", str(value))
        if any(kind != LAYER_TYPES[(i + 1) % 2] for i, kind in enumerate(config.get("layer_types") or ())):
            yield Refusal("layer_types", config["layer_types"], "vLLM has others", IN_TURNS)
    if family.sigmoid_router and not config["norm_topk_prob"]:
        yield Refusal("norm_topk_prob", config["norm_topk_prob"], "weights of experts sum to 1 in the trainer", "true")


def _windows(config: Mapping[str, Any], family: Family) -> Iterator[Refusal]:
    window = sliding_window(config)
    possible = LAYER_TYPES if family.full_every > 0 else (FULL, DELTA) if family.delta_net else (FULL,)
    layers = {str(layer) for layer in config.get("layer_types") or ()} - set(possible)
    if window is not None and family.full_every < 0:
        why = "the trainer has no sliding-window attention for this family"
        yield Refusal("sliding_window", window, why, "null (full attention)")
    elif (window is not None and (not isinstance(window, int) or window < 1)) or (
        family.full_every > 0 and config.get("sliding_window") is None
    ):
        yield Refusal("sliding_window", window, "is no size", "a number > 0")
    elif layers:
        yield Refusal("layer_types", sorted(layers)[0], "the trainer has no such layers", possible)


def _numbers(config: Mapping[str, Any]) -> Iterator[Refusal]:
    for key in ("rms_norm_eps", "max_position_embeddings"):
        value = config.get(key, 1)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
            yield Refusal(key, value, "is no size", "a number > 0")


def _rope(config: Mapping[str, Any], family: Family) -> Iterator[Refusal]:
    """Unsupported rotary embeddings, in either spelling."""
    for layer in LAYER_TYPES if family.window_theta else (FULL,):
        kinds = list(_rope_kind(config, family, layer))
        yield from kinds or _rope_numbers(config, family, layer)


def _rope_kind(config: Mapping[str, Any], family: Family, layer: str) -> Iterator[Refusal]:
    """At most one: settings that differ between layers, or a kind that the trainer lacks."""
    for section in ("rope_scaling", "rope_parameters"):
        settings = _rope_section(config, section, layer)
        if not settings:
            continue
        if not isinstance(settings, Mapping) or any(isinstance(value, Mapping) for value in settings.values()):
            yield Refusal(
                section, settings, "not one set of rotary settings for all layers", "one table for all layers"
            )
            return
        given = {key: settings[key] for key in ("rope_type", "type") if settings.get(key)}
        for key, kind in (given or {"rope_type": "default"}).items():
            if kind not in family.rope_types:
                yield Refusal(key, kind, "the trainer has no such rotary embedding", family.rope_types)
                return


def _rope_numbers(config: Mapping[str, Any], family: Family, layer: str) -> Iterator[Refusal]:
    settings = rope_settings(config, layer)
    share = settings["partial_rotary_factor"]
    if share != 1 and not family.partial_rotary:
        yield Refusal("partial_rotary_factor", share, "the trainer turns whole heads", "1")
    kind = settings["rope_type"]
    optional = tuple(key for key in YARN_OPTIONS if key in settings) if kind == "yarn" else ()
    why = f"the {kind} rotary embedding needs a number"
    for key in ("rope_theta", "partial_rotary_factor", *ROPE_NUMBERS[kind], *optional):
        value = settings.get(key)
        if not isinstance(value, (int, float)) or value <= 0:
            yield Refusal(key if key in config else f"rope_scaling.{key}", value, why, "a number > 0")
    if kind == "linear" and isinstance(settings.get("factor"), int):
        factor = settings["factor"]
        yield Refusal("rope_scaling.factor", factor, "vLLM takes no integer for it", f"{float(factor)}")
