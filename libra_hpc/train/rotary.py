"""Rotary position embedding of packed sequences: angles once per pack, one multiplication per layer.

Megatron-Core's own embedding processes the sequences of a pack one by one in every layer and synchronises with the
device for their lengths. Here all layers share one table of cosines and sines.

Sources: arXiv 2104.09864 with the half-split layout of Llama's and Qwen's weights; long contexts as Llama 3.1's
``rope_scaling``.
"""

from __future__ import annotations

import math

import torch

from libra_hpc.hardware.architecture import Architecture

Table = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines, each [t, 1, head_dim]."""


class Rotary:
    def __init__(self, shape: Architecture, device: torch.device, dtype: torch.dtype) -> None:
        steps = torch.arange(0, shape.head_dim, 2, dtype=torch.float32)
        frequencies = 1.0 / shape.rope_theta ** (steps / shape.head_dim)
        if shape.rope_scaling is not None:
            frequencies = _stretched(frequencies, shape.rope_scaling)
        self._frequencies = frequencies.to(device)
        self._dtype = dtype

    def table(self, positions: torch.Tensor) -> Table:
        """The table for ``positions``, int64[t]; angles in float32, result in the model's type."""
        angles = positions.float()[:, None, None] * self._frequencies
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos().to(self._dtype), angles.sin().to(self._dtype)


def rotated(x: torch.Tensor, table: Table) -> torch.Tensor:
    """Rotate ``x`` [t, heads, head_dim] by the angles of its tokens."""
    cos, sin = table
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), dim=-1) * sin


def _stretched(frequencies: torch.Tensor, scaling: dict[str, float]) -> torch.Tensor:
    """Llama 3.1: long wavelengths are stretched by ``factor``, short ones unchanged, those between interpolated."""
    factor, low, high = scaling["factor"], scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = scaling["original_max_position_embeddings"] * frequencies / (2 * math.pi)

    unchanged = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return frequencies * (unchanged + (1.0 - unchanged) / factor)
