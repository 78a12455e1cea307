"""The GRPO objective as pure functions of log-probabilities.

Policies: pi; proximal, the weights at the start of the step; behaviour, from which the rollout engine sampled;
reference, which never changes. Per loss token, with the advantage A of its trajectory::

    w     = min(proximal / behaviour, is_truncation)    no gradient
    loss  = v * (w * named(pi / proximal, A) + kl_coef * k3(behaviour) + reference_kl_coef * k3(reference))
    k3(q) = q / pi - 1 - log(q / pi)    unbiased, non-negative estimate of KL(pi || q)

``named`` is one of `losses`. v is 1, or where trajectories weigh the same 1 / (loss tokens of the trajectory, in all
its samples). Functions return sums; the caller divides by `libra_hpc.trainer.shards.divisor`.

Sources: decoupled proximal policy arXiv 2110.00641; truncated weights arXiv 1802.01561; k3 Schulman 2020,
"Approximating KL divergence"; as a term of the loss, with a reference, arXiv 2402.03300, equation 4.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from .losses import Loss, LossTokens


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
    gap: torch.Tensor
    """Absolute value of log proximal - log behaviour."""
    kl: torch.Tensor
    """k3 estimate to the behaviour policy."""
    reference_kl: torch.Tensor
    """k3 estimate to the reference policy; 0 without one."""


def grpo_terms(
    tokens: LossTokens,
    named: Loss,
    *,
    clip: tuple[float, float],
    is_truncation: float,
    kl_coef: float,
    reference: torch.Tensor | None = None,
    reference_kl_coef: float = 0.0,
    by_sequence: bool = False,
) -> Terms:
    """The objective over ``m`` loss tokens; ``clip``: below and above a ratio of 1.

    ``reference``: float32[m], log-probabilities of the reference policy.
    """
    logprobs, behaviour = tokens.logprobs, tokens.behaviour
    importance = torch.exp(tokens.proximal - behaviour)
    per_token, clipped = named(tokens, *clip)
    loss = importance.clamp(max=is_truncation) * per_token
    kl = k3(logprobs, behaviour)
    if kl_coef > 0:
        loss = loss + kl_coef * kl
    reference_kl = torch.zeros_like(logprobs) if reference is None else k3(logprobs, reference)
    if reference is not None:
        loss = loss + reference_kl_coef * reference_kl
    if by_sequence:
        loss = loss / tokens.trajectories[tokens.sequences]
    return Terms(
        loss=loss.sum(),
        ratio=torch.exp(logprobs.detach() - behaviour).sum(),
        truncated=(importance > is_truncation).sum(),
        clipped=clipped.sum(),
        gap=(tokens.proximal - behaviour).abs().sum(),
        kl=kl.detach().sum(),
        reference_kl=reference_kl.detach().sum(),
    )


def k3(logprobs: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Per token, float32[m]: the estimate of KL(pi || q), where ``other`` are q's log-probabilities."""
    log_inverse = other - logprobs
    return torch.exp(log_inverse) - 1.0 - log_inverse
