"""Tensor- and pipeline-parallel degrees of training that a model allows: the rule of search, checks and trainer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from libra_hpc.errors import UserError, invalid

from .models import ModelShape

LISTED = 32
"""Largest degree that an error lists."""


def misfits(widths: Mapping[str, int], *, layers: int, tp: int, pp: int) -> Iterator[UserError]:
    """Why ``tp`` and ``pp`` cannot train a model; ``widths`` are what tensor ranks divide, by key of config.json.

    Pipeline stages may differ by a layer (`libra_hpc.hardware.architecture.stage_layers`), but none is empty.
    """
    for what, size in widths.items():
        if size % tp:
            divisors = ", ".join(str(n) for n in range(1, min(size, LISTED) + 1) if size % n == 0)
            yield invalid("train.tp", tp, f"does not divide the model's {what} = {size}", divisors)
    if layers < pp:
        yield invalid("train.pp", pp, f"the model has only {layers} layers", f"1 to {layers}")


def widths(shape: ModelShape) -> dict[str, int]:
    """What tensor ranks divide evenly in training."""
    sizes = {
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "intermediate_size": shape.intermediate,
        "moe_intermediate_size": shape.moe_intermediate,
        "vocab_size": shape.vocab,
    }
    return {key: size for key, size in sizes.items() if size}


def trains(shape: ModelShape, tp: int, pp: int = 1) -> bool:
    """Whether the trainer can divide the model so."""
    return not any(misfits(widths(shape), layers=shape.layers, tp=tp, pp=pp))
