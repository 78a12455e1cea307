"""Models that this version can plan for, and those that it can train and roll out; needs no torch.

- `FAMILIES`: every ``model_type`` with a shape, and why it cannot be trained (empty: it can).
- `refusals`: keys of a Hugging Face ``config.json`` that the trainer does not support.

`check`, `submit`, the planner and the trainer (`libra_hpc.hardware.architecture`) use these.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec

from libra_hpc.errors import UserError, invalid

MIXTURE = "a mixture of experts of another kind than Qwen3's"
FAMILIES = {"llama": "", "mixtral": MIXTURE, "qwen2": "", "qwen3": "", "qwen3_moe": ""}
"""Trained ones have pre-norm RMSNorm, rotary embedding, SwiGLU and grouped-query attention."""
TRAINED = tuple(name for name, why in FAMILIES.items() if not why)
"""``model_type`` of the models that can be trained."""
ROPE_TYPES = ("default", "llama3")
LLAMA3_KEYS = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
"""Parameters of Llama 3's frequency scaling (`libra_hpc.train.rotary`)."""


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


def refusals(config: Mapping[str, Any]) -> Iterator[Refusal]:
    """All keys that prevent training by this version; none: the model can be trained."""
    kind = config.get("model_type")
    if kind not in TRAINED:
        yield Refusal(
            "model_type", kind, FAMILIES.get(str(kind)) or "this version cannot train this architecture", TRAINED
        )
        return
    yield from _variants(config)
    yield from _rope(config)


def check_trained(config: Mapping[str, Any], field: str = "model.path") -> None:
    """Raise `UserError` for the first of `refusals`."""
    for refusal in refusals(config):
        raise refusal.error(field)


def rope_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of the rotary embedding.

    transformers 5 writes ``rope_parameters``, earlier versions ``rope_scaling`` and ``rope_theta``.
    """
    found = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    return {
        "rope_theta": config.get("rope_theta") or 10000.0,
        **found,
        "rope_type": found.get("rope_type") or found.get("type") or "default",
    }


def _variants(config: Mapping[str, Any]) -> Iterator[Refusal]:
    act = config.get("hidden_act") or "silu"
    if act != "silu":
        yield Refusal("hidden_act", act, "the trainer has no such activation", ("silu",))
    # Llama's config has a window only; Qwen's has a window and a switch, usually off.
    window = config.get(
        "use_sliding_window", config.get("model_type") == "llama" and config.get("sliding_window") is not None
    )
    layers = {str(layer) for layer in config.get("layer_types") or ()} - {"full_attention"}
    if window:
        yield Refusal(
            "sliding_window",
            config.get("sliding_window"),
            "the trainer has no sliding-window attention",
            "null (full attention)",
        )
    elif layers:
        yield Refusal("layer_types", sorted(layers)[0], "the trainer has full attention only", ("full_attention",))
    for key in ("attention_bias", "mlp_bias"):
        if config.get(key):
            yield Refusal(key, config[key], "the trainer has no such bias", "false")
    # Qwen3-MoE: the trainer builds all layers alike.
    if config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1:
        key = "mlp_only_layers" if config.get("mlp_only_layers") else "decoder_sparse_step"
        yield Refusal(key, config[key], "the trainer has no dense layers among layers of experts", "no such layers")
    if config.get("quantization_config"):
        yield Refusal(
            "quantization_config",
            config["quantization_config"],
            "the trainer reads weights of bfloat16, float16 or float32",
            "no such key",
        )


def _rope(config: Mapping[str, Any]) -> Iterator[Refusal]:
    """Unsupported rotary embeddings, in either spelling."""
    for section in ("rope_scaling", "rope_parameters"):
        settings = config.get(section)
        if not settings:
            continue
        if not isinstance(settings, Mapping) or any(isinstance(value, Mapping) for value in settings.values()):
            yield Refusal(
                section, settings, "not one set of rotary settings for all layers", "one table for all layers"
            )
            return
        for key in ("rope_type", "type"):
            kind = settings.get(key) or "default"
            if kind not in ROPE_TYPES:
                yield Refusal(key, kind, "the trainer has no such rotary embedding", ROPE_TYPES)
                return
    settings = rope_settings(config)
    share = settings.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if share not in (None, 1):
        yield Refusal("partial_rotary_factor", share, "the trainer turns whole heads", "1")
    if settings["rope_type"] == "llama3":
        for key in LLAMA3_KEYS:
            if not isinstance(settings.get(key), (int, float)):
                yield Refusal(
                    f"rope_scaling.{key}", settings.get(key), "the llama3 rotary embedding needs it", "a number"
                )
