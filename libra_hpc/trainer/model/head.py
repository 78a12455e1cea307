"""The output layer over a pack's loss tokens: log-probabilities of the targets, and the entropy, without the logits.

The logits are computed in slices of the vocabulary, in the forward pass and again in the backward pass. Only their
log-sum-exp, one float32 per token, is stored. Against slices of tokens, a slice of the vocabulary:

- finishes its rows of the weight gradient, so no float32 sum of the weight's size exists
- reads its rows of the weight once per pass
- needs two collectives over tensor ranks per pack, not two per slice

The sums over a row (log-sum-exp, entropy) are carried from slice to slice relative to the largest logit so far (arXiv
1805.02867).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from .mcore import GPTModel, copy_to_tensor_model_parallel_region, gather_from_sequence_parallel_region

SLICE_LOGITS = 32 << 20
"""Logits that exist at a time: 128 MiB in float32, at most twice that with their exponentials. At 32k tokens a slice
has 1,024 columns. Half: thinner matrix products. Double: 256 MiB more at the peak."""
ALIGNED = 128
"""Columns of a slice are a multiple of this, as matrix units want."""


class Likelihood(NamedTuple):
    """Log-probabilities of ``m`` loss tokens under ``softmax(logits / temperature)``."""

    logprobs: torch.Tensor
    """float32[m], of the targets; differentiable."""
    entropy: torch.Tensor
    """Sum over the tokens, nats; without gradient."""


class Head:
    """The output layer of the last pipeline stage, applied to the loss tokens of one pack."""

    def __init__(self, model: GPTModel, hidden: torch.Tensor, where: torch.Tensor) -> None:
        """``hidden`` [t, h] as the model returns it; ``where`` int64[m]: the tokens that predict a loss token."""
        group = model.pg_collection.tp
        self._group = group if dist.get_world_size(group) > 1 else None
        self.rows = loss_rows(hidden, where, self._group, sequence_parallel=model.config.sequence_parallel)
        self.weight = output_weight(model)
        self.scale: float = model.logits_scale
        """Logits are divided by it."""

    def likelihood(self, targets: torch.Tensor, temperature: float) -> Likelihood:
        """``targets`` int64[m]: the loss tokens."""
        return likelihood(self.rows, self.weight, targets, temperature=temperature * self.scale, group=self._group)


def return_hidden_states(model: GPTModel, scale: float) -> None:
    """Let a last stage return final hidden states [1, t, h] instead of logits; `Head` applies the output layer.

    ``scale``: logits are divided by it.
    """
    model.logits_scale = scale
    # The module stays and is called: it has the weight, and Megatron-Core's hooks wait for that weight at the call.
    model.output_layer.forward = lambda hidden, **_: (hidden, None)


def output_weight(model: GPTModel) -> torch.Tensor:
    """The weight [vocab / tp, h] of a last stage; one that is also the first has no copy of a tied embedding."""
    own = model.output_layer.weight
    return model.embedding.word_embeddings.weight if own is None else own


def loss_rows(
    hidden: torch.Tensor, where: torch.Tensor, group: dist.ProcessGroup | None, *, sequence_parallel: bool
) -> torch.Tensor:
    """Rows ``where`` of the final hidden states, [m, h] on every tensor rank.

    Each rank has the gradient through its part of the vocabulary alone, so the backward pass sums it over ``group``.
    """
    if group is None:
        return hidden.index_select(0, where)
    if sequence_parallel:
        # Every rank has a run of the tokens. Backward is a reduce-scatter.
        whole: torch.Tensor = gather_from_sequence_parallel_region(hidden, group=group)
        return whole.index_select(0, where)
    rows: torch.Tensor = copy_to_tensor_model_parallel_region(hidden.index_select(0, where), group=group)
    return rows


def likelihood(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    temperature: float,
    group: dist.ProcessGroup | None = None,
) -> Likelihood:
    """Apply the output layer to ``hidden`` [m, h]; ``weight`` [vocab / tp, h] is this rank's part over ``group``.

    The gradient of ``hidden`` is that of this rank's part of the vocabulary.
    """
    return Likelihood(*_Likelihood.apply(hidden, weight, targets, temperature, group))  # type: ignore[no-untyped-call]


class _Likelihood(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
        temperature: float,
        group: dist.ProcessGroup | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        column = targets if group is None else targets - dist.get_rank(group) * len(weight)
        peak = hidden.new_full((len(hidden),), torch.finfo(torch.float32).min, dtype=torch.float32)
        # Of each token: sum of exp(x), sum of x exp(x), and x of the target, where x = logit - peak.
        total, spread, chosen = torch.zeros_like(peak), torch.zeros_like(peak), torch.zeros_like(peak)
        for begin, end in _slices(len(hidden), len(weight)):
            logits = _logits(hidden, weight[begin:end], temperature)
            at, inside = _within(column, begin, end)
            above = torch.maximum(peak, logits.amax(-1))
            total, spread = _rebased(total, spread, peak - above)
            peak = above
            # The target's logit stays unshifted until the peak is final.
            chosen = torch.where(inside, logits.gather(1, at[:, None])[:, 0], chosen)
            logits -= peak[:, None]
            exponential = logits.exp()
            total = total + exponential.sum(-1)
            spread = spread + exponential.mul_(logits).sum(-1)
            # Freed before the next slice is computed.
            del logits, exponential
        here = (column >= 0) & (column < len(weight))
        own = peak
        if group is not None:
            peak = own.clone()
            dist.all_reduce(peak, op=dist.ReduceOp.MAX, group=group)
        total, spread = _rebased(total, spread, own - peak)
        sums = torch.stack([total, spread, torch.where(here, chosen - peak, 0.0)])
        if group is not None:
            dist.all_reduce(sums, group=group)
        total, spread, chosen = sums
        log_total = total.log()
        entropy = (log_total - spread / total).sum()
        ctx.temperature = temperature
        ctx.save_for_backward(hidden, weight, column, peak + log_total)
        ctx.mark_non_differentiable(entropy)
        return chosen - log_total, entropy

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, _entropy: Any) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, column, logsumexp = ctx.saved_tensors
        scale = -gradient[:, None] / ctx.temperature
        hidden_gradient = torch.zeros_like(hidden, dtype=torch.float32)
        weight_gradient = torch.empty_like(weight)
        for begin, end in _slices(len(hidden), len(weight)):
            at, inside = _within(column, begin, end)
            # d logp / d logit = (one-hot - p) / temperature
            slope = _logits(hidden, weight[begin:end], ctx.temperature).sub_(logsumexp[:, None]).exp_()
            slope.scatter_add_(1, at[:, None], -inside.float()[:, None])
            cast = slope.mul_(scale).to(weight.dtype)
            del slope
            torch.mm(cast.t(), hidden, out=weight_gradient[begin:end])
            hidden_gradient += cast @ weight[begin:end]
            del cast
        return hidden_gradient.to(hidden.dtype), weight_gradient, None, None, None


def _slices(tokens: int, vocab: int) -> Iterator[tuple[int, int]]:
    width = max(SLICE_LOGITS // max(1, tokens) // ALIGNED, 1) * ALIGNED
    return ((begin, min(begin + width, vocab)) for begin in range(0, vocab, width))


def _logits(hidden: torch.Tensor, weight: torch.Tensor, temperature: float) -> torch.Tensor:
    logits = (hidden @ weight.t()).float()
    return logits if temperature == 1.0 else logits.div_(temperature)


def _within(column: torch.Tensor, begin: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Each token's target as a column of the slice, clamped, and whether it is one."""
    return (column - begin).clamp(0, end - begin - 1), (column >= begin) & (column < end)


def _rebased(total: torch.Tensor, spread: torch.Tensor, by: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The sums of exp(x) and x exp(x), for x + ``by``."""
    factor = by.exp()
    return total * factor, (spread + total * by) * factor
