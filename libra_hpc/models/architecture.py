"""Shapes of the models that the trainer supports, and the parallel degrees that divide them."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from libra_hpc.errors import invalid

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
