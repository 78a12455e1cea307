"""Rotary position embedding of packed sequences: angles once per pack, one multiplication per layer.

Megatron-Core's own embedding processes the sequences of a pack one by one in every layer and synchronises with the
device for their lengths. Here all layers share one table of cosines and sines.

Sources: arXiv 2104.09864; position interpolation as arXiv 2306.15595, YaRN as arXiv 2309.00071, Llama 3.1's scaling.
Frequencies equal those of transformers' ``modeling_rope_utils``, which are also vLLM's.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from libra_hpc.models.architecture import Architecture

from . import fusions


class RotaryTable(NamedTuple):
    cos: torch.Tensor
    """[t, 1, channels that turn]"""
    sin: torch.Tensor
    interleaved: bool
    """Channels 2i and 2i+1 of a head turn together (GLM); otherwise i and i + half of the channels."""


class Rotary:
    def __init__(self, shape: Architecture, device: torch.device, dtype: torch.dtype) -> None:
        frequencies, self._scale = _frequencies(shape.rope, shape.rotary_dim)
        self._frequencies = frequencies.to(device)
        self._interleaved = shape.kind.interleaved_rotary
        self._dtype = dtype

    def table(self, positions: torch.Tensor) -> RotaryTable:
        """The table for ``positions``, int64[t]; angles in float32, result in the model's type."""
        angles = positions.float()[:, None, None] * self._frequencies
        angles = angles.repeat_interleave(2, -1) if self._interleaved else torch.cat((angles, angles), dim=-1)
        cos, sin = (angles.cos() * self._scale).to(self._dtype), (angles.sin() * self._scale).to(self._dtype)
        return RotaryTable(cos, sin, self._interleaved)


def rotated(x: torch.Tensor, table: RotaryTable) -> torch.Tensor:
    """Rotate the first channels of ``x`` [t, heads, head_dim] by the angles of its tokens."""
    if x.is_cuda:
        turned: torch.Tensor = fusions.Rotate.apply(x, *table)  # type: ignore[no-untyped-call]
        return turned
    width = table.cos.shape[-1]
    if width < x.shape[-1]:
        front, rest = torch.split(x, [width, x.shape[-1] - width], dim=-1)
        return torch.cat((rotated(front, table), rest), dim=-1)
    if table.interleaved:
        across = torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)
    else:
        across = torch.cat((-x[..., width // 2 :], x[..., : width // 2]), dim=-1)
    return x * table.cos + across * table.sin


def _frequencies(rope: dict[str, Any], width: int) -> tuple[torch.Tensor, float]:
    """Radians per position of each pair of channels, and the factor of cosines and sines."""
    steps = torch.arange(0, width, 2, dtype=torch.float32)
    plain = 1.0 / rope["rope_theta"] ** (steps / width)
    if rope["rope_type"] == "linear":
        return plain / rope["factor"], 1.0
    if rope["rope_type"] == "llama3":
        return _llama3(plain, rope), 1.0
    if rope["rope_type"] == "yarn":
        return _yarn(plain, rope, width), _yarn_scale(rope)
    return plain, 1.0


def _llama3(plain: torch.Tensor, rope: dict[str, Any]) -> torch.Tensor:
    """Long wavelengths are stretched by ``factor``, short ones unchanged, those between interpolated."""
    factor, low, high = rope["factor"], rope["low_freq_factor"], rope["high_freq_factor"]
    turns = rope["original_max_position_embeddings"] * plain / (2 * math.pi)
    unchanged = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return plain * (unchanged + (1.0 - unchanged) / factor)


def _yarn(plain: torch.Tensor, rope: dict[str, Any], width: int) -> torch.Tensor:
    """Pairs that turn seldom within the original positions are stretched by ``factor``, with a linear ramp."""

    def pair(turns: float) -> float:
        """Index of the pair of channels that turns so often."""
        wavelength = rope["original_max_position_embeddings"] / (turns * 2 * math.pi)
        return width * math.log(wavelength) / (2 * math.log(rope["rope_theta"]))

    first, last = pair(rope.get("beta_fast", 32)), pair(rope.get("beta_slow", 1))
    if rope.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, width - 1)
    ramp = (torch.arange(width // 2, dtype=torch.float32) - first) / (last - first or 0.001)
    stretched = ramp.clamp(0.0, 1.0)
    return plain / rope["factor"] * stretched + plain * (1.0 - stretched)


def _yarn_scale(rope: dict[str, Any]) -> float:
    """Sharpens the attention of long contexts: ``attention_factor``, or from the two ``mscale``, or from ``factor``."""

    def scale(weight: float) -> float:
        return 0.1 * weight * math.log(rope["factor"]) + 1.0 if rope["factor"] > 1 else 1.0

    if "attention_factor" in rope:
        return float(rope["attention_factor"])
    one, all_dims = rope.get("mscale"), rope.get("mscale_all_dim")
    return scale(one) / scale(all_dims) if one and all_dims else scale(1.0)
