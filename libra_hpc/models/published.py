"""Models that are published inside of a wrapper, with parts for images or sound: what in its folder is the text model.

- `text_config`: the text model's own ``config.json``; of other folders, theirs.
- `text_parts`: the text model's names of what one tensor of the files holds.

A run trains the text model. Its checkpoints are the wrapper again, with the other parts as they came.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Shapes = Mapping[str, tuple[int, ...]]
WRAPPERS = {
    "gemma3": "gemma3_text",
    "glm4v": "glm4",
    "got_ocr2": "qwen2",
    "internvl": "qwen2",
    "llava": "llama",
    "llava_next": "llama",
    "llava_next_video": "llama",
    "llava_onevision": "qwen2",
    "lighton_ocr": "qwen3",
    "mistral3": "mistral",
    "qwen2_5_vl": "qwen2",
    "qwen2_vl": "qwen2",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
    "qwen3_vl": "qwen3",
    "vipllava": "llama",
}
"""``model_type`` of a wrapper, and of its text model unless ``text_config`` names another family."""
_SIZES = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "gemma3_text": {
        "vocab_size": 262208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "max_position_embeddings": 131072,
    },
    "llama": {**_SIZES, "vocab_size": 32000, "intermediate_size": 11008, "max_position_embeddings": 2048},
    "mistral": {**_SIZES, "vocab_size": 32000, "intermediate_size": 14336, "max_position_embeddings": 131072},
    "qwen2": {**_SIZES, "vocab_size": 151936, "intermediate_size": 22016, "max_position_embeddings": 32768},
    "qwen3": {**_SIZES, "vocab_size": 151936, "intermediate_size": 22016, "max_position_embeddings": 32768},
}
"""Sizes that a ``text_config`` may omit, by its family, as transformers has them."""
_OUTER = ("tie_word_embeddings", "dtype", "torch_dtype", "quantization_config")
"""Keys of the wrapper that are also about its text model."""
_IMAGES = ("mrope_section", "mrope_interleaved")
"""How positions of images turn; those of text are the same in all three directions."""
_PREFIXES = {"model.language_model.": "model.", "language_model.": ""}
_TEXT = ("model.layers.", "model.embed_tokens.", "model.norm.", "lm_head.")
_FUSED = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
"""Tensors with all experts of a layer, and what they have of each."""


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """The text model's of a wrapper, whose ``model_type`` is then its ``wrapper``; another config as it is."""
    wrapper = str(config.get("model_type"))
    if wrapper not in WRAPPERS:
        return config
    # Qwen2-VL has no section.
    own = config.get("text_config") or {key: value for key, value in config.items() if key != "vision_config"}
    named = own.get("model_type")
    kind = WRAPPERS[wrapper] if named in (None, wrapper, f"{wrapper}_text") else named
    outer = {key: config[key] for key in _OUTER if key in config}
    given = {key: value for key, value in own.items() if value is not None or key not in outer}
    turns = {key: _turns(own[key]) for key in ("rope_scaling", "rope_parameters") if own.get(key)}
    return {**_DEFAULTS.get(kind, {}), **outer, **given, **turns, "model_type": kind, "wrapper": wrapper}


def _turns(settings: Any) -> Any:
    if not isinstance(settings, Mapping):
        return settings
    return {key: "default" if one == "mrope" else one for key, one in settings.items() if key not in _IMAGES}


def text_parts(name: str, size: tuple[int, ...]) -> tuple[str, ...]:
    """Names of the text model's tensors in a tensor of a wrapper's files, one after the other; of other parts none."""
    for stored, ours in _PREFIXES.items():
        if name.startswith(stored):
            name = ours + name.removeprefix(stored)
            break
    if not name.startswith(_TEXT):
        return ()
    layer, _, kind = name.rpartition(".")
    if not layer.endswith(".mlp.experts"):
        return (name,)
    return tuple(f"{layer}.{expert}.{part}.weight" for expert in range(size[0]) for part in _FUSED[kind])


def text_shapes(found: Shapes) -> dict[str, tuple[int, ...]]:
    """The text model's tensors in the files of a wrapper."""
    out: dict[str, tuple[int, ...]] = {}
    for name, size in found.items():
        parts = text_parts(name, size)
        out |= dict.fromkeys(parts, size if len(parts) < 2 else (size[0] * size[1] // len(parts), *size[2:]))
    return out


def stored_shapes(found: Shapes, model: Shapes) -> dict[str, tuple[int, ...]]:
    """Tensors of a wrapper's files that hold those of the text model, in the order of these."""
    first = {parts[0]: name for name, size in found.items() if (parts := text_parts(name, size))}
    return {first[name]: found[first[name]] for name in model if name in first}
