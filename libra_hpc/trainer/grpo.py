"""The GRPO objective as pure functions of log-probabilities.

Policies: pi; proximal, the weights at the start of the step; behaviour, from which the rollout engine sampled;
reference, which never changes. Per loss token, with the advantage A of its trajectory, and no gradient through w, u::

    w    = min(proximal / behaviour, is_truncation), 0 outside of the masks        u: the same of pi / behaviour
    loss = v * (w * named(pi / proximal, A) + u * penalty)    penalty = kl_coef * k(behaviour) + reference_kl_coef * ..
    or     v * w * named(pi / proximal, A - penalty)          where `kl_in` is the reward; k: `ESTIMATES`

``named`` is one of `losses`. v is 1, or where trajectories weigh the same 1 / (loss tokens of the trajectory, in all
its samples). Functions return sums; the caller divides by `libra_hpc.trainer.shards.divisor`.

Sources: decoupled proximal policy arXiv 2110.00641; truncated weights arXiv 1802.01561; a KL term arXiv 2402.03300,
equation 4; masks of tokens arXiv 2510.18855 (IcePop), of sequences Liu et al. 2025, "When speed kills stability" (MIS).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from libra_hpc.config.learn import AlgorithmSection

from .losses import Loss, LossTokens

KL_BOUND = 10.0
"""Nats that pi may be below q in a KL term, or above it in a ratio of the report; a token beyond has no KL gradient.

Half: tokens that the policy has nearly given up lose theirs. Double: one token of k3 weighs as much as half a billion.
"""


class Terms(NamedTuple):
    """Sums over the loss tokens of one pack."""

    loss: torch.Tensor
    """Differentiable sum."""
    ratio: torch.Tensor
    """Ratio pi / behaviour."""
    truncated: torch.Tensor
    """Number of tokens with a truncated weight w."""
    clipped: torch.Tensor
    """Number of tokens whose ratio pi / proximal is clipped."""
    masked: torch.Tensor
    """Number of tokens outside of the masks."""
    clamped: torch.Tensor
    """Number of tokens beyond `KL_BOUND` in a KL term."""
    gap: torch.Tensor
    """Absolute value of log proximal - log behaviour."""
    kl: torch.Tensor
    """u * k3 to the behaviour policy."""
    reference_kl: torch.Tensor
    """u * k3 to the reference policy; 0 without one."""


def k1(x: torch.Tensor) -> torch.Tensor:
    return x


def k2(x: torch.Tensor) -> torch.Tensor:
    return 0.5 * x * x


def k3(x: torch.Tensor) -> torch.Tensor:
    return torch.exp(-x) - 1.0 + x


ESTIMATES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"k1": k1, "k2": k2, "k3": k3}
"""KL estimates of x = log(pi / q). Means over pi's tokens at one context, which u makes of those of behaviour:

- k1: KL(pi || q). In the reward its gradient is that of KL(pi || q); as a loss it has none.
- k2: biased. As a loss its gradient is that of KL(pi || q).
- k3: KL(pi || q), never negative. As a loss its gradient is that of KL(q || pi).

Schulman 2020, "Approximating KL divergence"; gradients arXiv 2506.09477."""


def grpo_terms(
    tokens: LossTokens, named: Loss, settings: AlgorithmSection, reference: torch.Tensor | None = None
) -> Terms:
    """The objective over ``m`` loss tokens.

    ``reference``: float32[m], log-probabilities of the reference policy.
    """
    off = tokens.proximal - tokens.behaviour
    kept = _kept(tokens, off, settings)
    importance, ratio = torch.exp(off), _ratio(tokens)
    weight, now = (one.clamp(max=settings.is_truncation) * kept for one in (importance, ratio))
    others = [(tokens.behaviour, settings.kl_coef)]
    if reference is not None:
        others.append((reference, settings.reference_kl_coef))
    logs = [tokens.logprobs - other for other, _ in others]
    bounded = [x.clamp(min=-KL_BOUND) for x in logs]
    penalty = torch.zeros_like(off)
    for x, (_, coef) in zip(bounded, others, strict=True):
        if coef > 0:
            penalty = penalty + coef * ESTIMATES[settings.kl](x)
    if settings.kl_in == "reward":
        tokens = tokens._replace(advantages=tokens.advantages - penalty.detach())
    per_token, clipped = named(tokens, *settings.clip_range)
    loss = weight * per_token
    if settings.kl_in == "loss":
        loss = loss + now * penalty
    if settings.aggregate == "sequence":
        loss = loss / tokens.trajectories[tokens.sequences]
    divergences = [(now * k3(x.detach())).sum() for x in bounded]
    return Terms(
        loss=loss.sum(),
        ratio=ratio.sum(),
        truncated=(importance > settings.is_truncation).sum(),
        clipped=clipped.sum(),
        masked=(~kept).sum(),
        clamped=torch.stack([x < -KL_BOUND for x in logs]).any(0).sum(),
        gap=off.abs().sum(),
        kl=divergences[0],
        reference_kl=divergences[1] if reference is not None else torch.zeros_like(divergences[0]),
    )


def _ratio(tokens: LossTokens) -> torch.Tensor:
    """Pi / behaviour, without gradient."""
    return torch.exp((tokens.logprobs.detach() - tokens.behaviour).clamp(max=KL_BOUND))


def _kept(tokens: LossTokens, off: torch.Tensor, settings: AlgorithmSection) -> torch.Tensor:
    """Tokens inside of both masks, bool[m]; collective over context ranks with one of sequences."""
    kept = torch.ones_like(off, dtype=torch.bool)
    if settings.mask_tokens:
        kept &= _inside(off, *settings.mask_tokens)
    if settings.mask_sequences:
        whole = tokens.sequence_mean(off) * tokens.lengths[tokens.sequences]
        kept &= _inside(whole, *settings.mask_sequences)
    return kept


def _inside(log_ratio: torch.Tensor, low: float, high: float) -> torch.Tensor:
    ratio = torch.exp(log_ratio)
    return (ratio >= low) & (ratio <= high)
