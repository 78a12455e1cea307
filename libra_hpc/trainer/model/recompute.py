"""Selective recomputation of a transformer layer: what is large and cheap to compute again is not stored.

A layer then stores, instead of

- a norm's output: nothing; the norm is repeated on its input
- the MLP's gated product: nothing; gate and up projections, stored anyway, are multiplied again
- attention's padded output: nothing; the unpadded one is stored anyway

No matrix product and no collective is repeated. Autograd asks for each stored tensor through a hook (arXiv 2205.05198
chooses attention instead, whose share of the work grows with the length).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

Recipe = Callable[[], torch.Tensor]


class _Stored:
    """A tensor that autograd stored, or how to compute it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor: torch.Tensor | None = tensor
        self.recipe: Recipe | None = None
        self._shape = tensor.shape

    def replace(self, recipe: Recipe) -> None:
        self.tensor, self.recipe = None, recipe

    @torch.no_grad()
    def value(self) -> torch.Tensor:
        if self.tensor is not None:
            return self.tensor
        assert self.recipe is not None
        return self.recipe().view(self._shape)


class _LayerPass:
    """One forward pass of one layer: what autograd stored, and the recipes for some of it."""

    def __init__(self) -> None:
        self._stored: list[_Stored] = []
        self.recipes: list[tuple[torch.Tensor, Recipe]] = []

    def store(self, tensor: torch.Tensor) -> _Stored:
        self._stored.append(_Stored(tensor))
        return self._stored[-1]

    def finish(self) -> None:
        """Apply the recipes; until here their tensors exist, so an address belongs to one of them."""
        recipes = {_address(tensor): (tensor.numel(), recipe) for tensor, recipe in self.recipes}
        for stored in self._stored:
            assert stored.tensor is not None
            numel, recipe = recipes.get(_address(stored.tensor), (0, None))
            if recipe is not None and stored.tensor.numel() == numel:
                stored.replace(recipe)
        # Autograd keeps the hooks, and they this object.
        self._stored.clear()
        self.recipes.clear()


_running: _LayerPass | None = None


def can_recompute(tensor: torch.Tensor, recipe: Recipe) -> None:
    """``recipe`` computes ``tensor`` from others, detached, that are stored anyway; without effect elsewhere."""
    if _running is not None:
        _running.recipes.append((tensor.detach(), recipe))


def recompute_selected(layer: Any) -> None:
    """Let a transformer layer store less, as above."""
    for norm in (layer.input_layernorm, layer.pre_mlp_layernorm):
        if isinstance(norm, torch.nn.RMSNorm):
            norm.register_forward_hook(_norm_done)
    if hasattr(layer.mlp, "linear_fc2"):
        layer.mlp.linear_fc1.register_forward_hook(partial(_gate_done, layer.mlp))
    layer.forward = partial(_selective, layer.forward)


def recompute_all(layer: Any) -> None:
    """Let a transformer layer store its input alone (arXiv 1604.06174)."""
    # Megatron-Core's own recomputation needs a CUDA generator; without dropout nothing is random.
    layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)


def _selective(forward: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    global _running
    if not torch.is_grad_enabled():
        return forward(*arguments, **named)
    _running = now = _LayerPass()
    try:
        with torch.autograd.graph.saved_tensors_hooks(now.store, _Stored.value):
            out = forward(*arguments, **named)
    finally:
        _running = None
    now.finish()
    return out


def _norm_done(norm: Any, arguments: tuple[torch.Tensor, ...], out: torch.Tensor) -> None:
    can_recompute(out, partial(norm.forward, arguments[0].detach()))


def _gate_done(mlp: Any, _module: Any, _arguments: Any, out: tuple[torch.Tensor, Any]) -> None:
    both = out[0].detach()

    def product_ready(_down: Any, arguments: tuple[torch.Tensor, ...]) -> None:
        handle.remove()
        can_recompute(arguments[0], partial(_gated, both, mlp.activation_func))

    handle = mlp.linear_fc2.register_forward_pre_hook(product_ready)


def _gated(both: torch.Tensor, activation: Callable[..., torch.Tensor]) -> torch.Tensor:
    gate, up = both.chunk(2, -1)
    return (F.gelu(gate, approximate="tanh") if activation is F.gelu else activation(gate)) * up


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
