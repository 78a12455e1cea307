"""Losses by name: what a token contributes, before the truncated weight w and the KL term of `grpo` are applied.

A loss is ``f(tokens, low, high) -> (per_token float32[m], clipped bool[m])``; ``low`` and ``high`` are the clip range
below and above a ratio of 1. Where it is clipped a token has no gradient. A run file may name ``file.py:f``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist

from libra_hpc.config.learn import LOSSES
from libra_hpc.errors import UserError, invalid
from libra_hpc.user_file import load_function


class LossTokens(NamedTuple):
    """The ``m`` loss tokens of one pack, of ``s`` sequences; context ranks share a pack's tokens."""

    logprobs: torch.Tensor
    """float32[m] of the policy; gradients flow through these alone."""
    proximal: torch.Tensor
    """float32[m] of the weights at the start of the step."""
    behaviour: torch.Tensor
    """float32[m] of the weights that sampled."""
    advantages: torch.Tensor
    """float32[m]"""
    sequences: torch.Tensor
    """int64[m], place of a token's sequence in the pack."""
    lengths: torch.Tensor
    """float32[s], loss tokens of each sequence on all context ranks; 0 for one without."""
    trajectories: torch.Tensor
    """float32[s], loss tokens of each sequence's trajectory, which may have several."""
    context: dist.ProcessGroup | None = None
    """The context ranks; None: this process has all tokens."""

    def sequence_mean(self, values: torch.Tensor) -> torch.Tensor:
        """For each token the mean of ``values``, float32[m], over its sequence; without gradient, collective."""
        sums = torch.zeros_like(self.lengths).index_add_(0, self.sequences, values.detach())
        if self.context is not None:
            dist.all_reduce(sums, group=self.context)
        return (sums / self.lengths.clamp(min=1.0))[self.sequences]


Loss = Callable[[LossTokens, float, float], tuple[torch.Tensor, torch.Tensor]]


def ppo(tokens: LossTokens, low: float, high: float) -> tuple[torch.Tensor, torch.Tensor]:
    """A token's own ratio, clipped (arXiv 1707.06347; a larger ``high`` is DAPO's, arXiv 2503.14476)."""
    return _surrogate(torch.exp(tokens.logprobs - tokens.proximal), tokens.advantages, low, high)


def gspo(tokens: LossTokens, low: float, high: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The geometric mean of a sequence's ratios, clipped (arXiv 2507.18071, equation 14: its token form)."""
    mean = tokens.sequence_mean(tokens.logprobs - tokens.proximal)
    ratio = torch.exp(mean + tokens.logprobs - tokens.logprobs.detach())
    return _surrogate(ratio, tokens.advantages, low, high)


def cispo(tokens: LossTokens, low: float, high: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The ratio as a weight, bounded from above only: no token loses its gradient (arXiv 2506.13585, equation 4)."""
    ratio = torch.exp(tokens.logprobs.detach() - tokens.proximal)
    return -ratio.clamp(max=1.0 + high) * tokens.advantages * tokens.logprobs, ratio > 1.0 + high


def _surrogate(
    ratio: torch.Tensor, advantages: torch.Tensor, low: float, high: float
) -> tuple[torch.Tensor, torch.Tensor]:
    free, bounded = ratio * advantages, ratio.clamp(1.0 - low, 1.0 + high) * advantages
    return -torch.minimum(free, bounded), bounded < free


_NAMED = dict(zip(LOSSES, (ppo, gspo, cispo), strict=True))


def loss_named(name: str) -> Loss:
    """Raises `UserError` for a name that is neither of `LOSSES` nor a function of a file."""
    return _NAMED[name] if name in _NAMED else load_function("algorithm.loss", name, LOSSES)


def try_loss(name: str) -> None:
    """Call it once on two made-up sequences; raises `UserError` for what it raises or returns."""
    logprobs = torch.tensor([-1.0, -2.0, -0.5], requires_grad=True)
    fixed, counts = logprobs.detach() - 0.1, torch.tensor([2.0, 1.0])
    tokens = LossTokens(logprobs, fixed, fixed, torch.tensor([1.0, 1.0, -1.0]), torch.tensor([0, 0, 1]), counts, counts)
    try:
        values, clipped = loss_named(name)(tokens, 0.2, 0.2)
        shapes = (tuple(values.shape), tuple(clipped.shape), clipped.dtype)
        (gradient,) = torch.autograd.grad(values.sum(), logprobs)
    except UserError:
        raise
    except BaseException as error:
        raise invalid("algorithm.loss", name, f"it fails for three tokens ({type(error).__name__}: {error})") from error
    if shapes != ((3,), (3,), torch.bool) or not gradient.isfinite().all():
        why = f"for three tokens it made shapes {shapes[:2]} and a mask of {shapes[2]}, or no finite gradient"
        raise invalid("algorithm.loss", name, why, "(float32[m], bool[m]), as libra_hpc/trainer/losses.py has them")
