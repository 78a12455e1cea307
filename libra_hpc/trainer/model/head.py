"""The output layer over a pack's loss tokens: log-probabilities of the targets, and the entropy, without the logits.

The logits are computed in slices of the vocabulary, in the forward pass and again in the backward pass. Only their
log-sum-exp, one float32 per token, is stored. Against slices of tokens, a slice of the vocabulary:

- finishes its rows of the weight gradient, so no float32 sum of the weight's size exists
- reads its rows of the weight once per pass
- needs two collectives over tensor ranks per pack, not two per slice

On CUDA, Triton's kernels (`triton_kernels`) read 16-bit logits once forward, and read and write them once backward;
`plain_reduce` and `plain_slope` take their place where they fail.

The sums over a row (log-sum-exp, entropy) are carried from slice to slice relative to the largest logit so far (arXiv
1805.02867).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from libra_hpc.models import memory

from .kernels import choose, difference
from .mcore import GPTModel, copy_to_tensor_model_parallel_region, gather_from_sequence_parallel_region

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


class VocabSlice(NamedTuple):
    """A slice of the vocabulary: its rows of the weight, and each token's target as a column of it, or outside."""

    hidden: torch.Tensor
    weight: torch.Tensor
    column: torch.Tensor
    temperature: float


class Passes(NamedTuple):
    """What is done to the logits of one slice."""

    reduce: Callable[[VocabSlice, torch.Tensor], None]
    """`plain_reduce`, or what computes the same."""
    slope: Callable[[VocabSlice, torch.Tensor, torch.Tensor], torch.Tensor]
    """`plain_slope`, or what computes the same."""


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
        # No kernel runs without tokens.
        passes = choose_passes(hidden.device, hidden.dtype) if len(hidden) else PLAIN
        column = targets if group is None else targets - dist.get_rank(group) * len(weight)
        sums = empty_sums(hidden)
        for begin, end in _slices(len(hidden), len(weight)):
            passes.reduce(VocabSlice(hidden, weight[begin:end], column - begin, temperature), sums)
        own, total, spread, chosen = sums
        here, peak = (column >= 0) & (column < len(weight)), own
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
        ctx.passes, ctx.temperature = passes, temperature
        ctx.save_for_backward(hidden, weight, column, peak + log_total)
        ctx.mark_non_differentiable(entropy)
        return chosen - log_total, entropy

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, _entropy: Any) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, column, logsumexp = ctx.saved_tensors
        scale = -gradient / ctx.temperature
        hidden_gradient = torch.zeros_like(hidden, dtype=torch.float32)
        weight_gradient = torch.empty_like(weight) if ctx.needs_input_grad[1] else None
        for begin, end in _slices(len(hidden), len(weight)):
            part = weight[begin:end]
            slope = ctx.passes.slope(VocabSlice(hidden, part, column - begin, ctx.temperature), logsumexp, scale)
            if weight_gradient is not None:
                torch.mm(slope.t(), hidden, out=weight_gradient[begin:end])
            hidden_gradient += slope @ part
            # Freed before the next slice is computed.
            del slope
        return hidden_gradient.to(hidden.dtype), weight_gradient, None, None, None


def empty_sums(hidden: torch.Tensor) -> torch.Tensor:
    """Four sums of each token: the largest x so far, the sum of exp(y), that of y exp(y), and the target's x.

    x = logit / temperature, y = x - the largest.
    """
    sums = hidden.new_zeros((4, len(hidden)), dtype=torch.float32)
    sums[0] = torch.finfo(torch.float32).min
    return sums


def plain_reduce(one: VocabSlice, sums: torch.Tensor) -> None:
    """Add a slice to `empty_sums`."""
    peak, total, spread, chosen = sums
    logits, (at, inside) = _logits(one), _within(one)
    above = torch.maximum(peak, logits.amax(-1))
    # The target's logit stays unshifted until the peak is final.
    chosen = torch.where(inside, logits.gather(1, at[:, None])[:, 0], chosen)
    logits -= above[:, None]
    exponential = logits.exp()
    total, spread = _rebased(total, spread, peak - above)
    total = total + exponential.sum(-1)
    spread = spread + exponential.mul_(logits).sum(-1)
    sums.copy_(torch.stack([above, total, spread, chosen]))


def plain_slope(one: VocabSlice, logsumexp: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """(p - one-hot) * ``scale``, in the type of the weight: d log p / d logit = (one-hot - p) / temperature."""
    at, inside = _within(one)
    slope = _logits(one).sub_(logsumexp[:, None]).exp_()
    slope.scatter_add_(1, at[:, None], -inside.float()[:, None])
    return slope.mul_(scale[:, None]).to(one.weight.dtype)


PLAIN = Passes(plain_reduce, plain_slope)


@cache
def choose_passes(device: torch.device, dtype: torch.dtype) -> Passes:
    """Triton's kernels on CUDA, where they pass a comparison with plain torch."""
    if device.type != "cuda":
        return PLAIN
    return choose("the head runs in plain torch; its kernels", kernels, PLAIN, partial(passes_fault, device, dtype))


def kernels() -> Passes:
    """Triton's; raises `ImportError` without the package."""
    from .triton_kernels import reduce, slope

    return Passes(
        lambda one, sums: reduce(one.hidden @ one.weight.t(), one.column, one.temperature, sums),
        lambda one, *sums: slope(one.hidden @ one.weight.t(), one.column, one.temperature, *sums),
    )


def passes_fault(device: torch.device, dtype: torch.dtype, passes: Passes) -> str:
    """What passes do wrong on a few tokens and two slices, in words; empty: nothing."""
    source, hidden = torch.Generator().manual_seed(0), 64
    rows, weight = (torch.randn(count, hidden, generator=source).to(device, dtype) for count in (5, 1736))
    column, scale = torch.tensor([0, 1535, 1536, 1735, 1736]), torch.randn(5, generator=source).to(device)
    slices = [VocabSlice(rows, weight[a:b], column.to(device) - a, 0.8) for a, b in ((0, 1536), (1536, 1736))]
    found = []
    for reduce, slope in (passes, PLAIN):
        sums = empty_sums(rows)
        for one in slices:
            reduce(one, sums)
        found.append([*sums, *(slope(one, sums[0] + sums[1].log(), scale) for one in slices)])
    got, want = found
    names = "the largest logit", "the sum", "the spread", "the target's logit", "a gradient", "a later gradient"
    return difference(got, want, names)


def _slices(tokens: int, vocab: int) -> Iterator[tuple[int, int]]:
    width = max(memory.SLICE_LOGITS // max(1, tokens) // ALIGNED, 1) * ALIGNED
    return ((begin, min(begin + width, vocab)) for begin in range(0, vocab, width))


def _logits(one: VocabSlice) -> torch.Tensor:
    logits = (one.hidden @ one.weight.t()).float()
    return logits if one.temperature == 1.0 else logits.div_(one.temperature)


def _within(one: VocabSlice) -> tuple[torch.Tensor, torch.Tensor]:
    """Each token's target as a column of the slice, clamped, and whether it is one."""
    last = len(one.weight) - 1
    return one.column.clamp(0, last), (one.column >= 0) & (one.column <= last)


def _rebased(total: torch.Tensor, spread: torch.Tensor, by: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The sums of exp(x) and x exp(x), for x + ``by``."""
    factor = by.exp()
    return total * factor, (spread + total * by) * factor
