"""The GRPO objective as pure functions of log-probabilities.

Policies: pi; proximal, the weights at the start of the step; behaviour, from which the rollout engine sampled. Per
loss token, with group-normalised advantage A::

    r    = pi / proximal                               1 at a step's first update, but carries the gradient
    w    = min(proximal / behaviour, is_truncation)    no gradient
    loss = -w * min(r * A, clamp(r, 1 - clip, 1 + clip) * A) + kl_coef * k3
    k3   = behaviour / pi - 1 - log(behaviour / pi)    unbiased, non-negative estimate of KL(pi || behaviour)

Functions return sums; the caller divides by the loss tokens of the global minibatch, so all tokens weigh the same.

Sources: ratio arXiv 1707.06347; advantages arXiv 2402.03300; decoupled proximal policy arXiv 2110.00641; truncated
weights arXiv 1802.01561; k3 Schulman 2020, "Approximating KL divergence".
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class Terms(NamedTuple):
    """Sums over the loss tokens of one pack."""

    loss: torch.Tensor
    """Differentiable sum."""
    ratio: torch.Tensor
    """Of pi / behaviour."""
    truncated: torch.Tensor
    """Number of tokens with a truncated weight w."""
    gap: torch.Tensor
    """Of |log proximal - log behaviour|."""


def grpo_terms(
    logprobs: torch.Tensor,
    proximal: torch.Tensor,
    behaviour: torch.Tensor,
    advantages: torch.Tensor,
    *,
    clip: float,
    is_truncation: float,
    kl_coef: float,
) -> Terms:
    """The objective over ``m`` loss tokens; tensors are float32[m], gradients flow through ``logprobs`` alone."""
    proximal = proximal.detach()
    ratio = torch.exp(logprobs - proximal)
    importance = torch.exp(proximal - behaviour)
    weight = importance.clamp(max=is_truncation)
    surrogate = torch.minimum(ratio * advantages, ratio.clamp(1.0 - clip, 1.0 + clip) * advantages)
    loss = -(weight * surrogate)
    if kl_coef > 0:
        log_inverse = behaviour - logprobs
        loss = loss + kl_coef * (torch.exp(log_inverse) - 1.0 - log_inverse)
    return Terms(
        loss=loss.sum(),
        ratio=torch.exp(logprobs.detach() - behaviour).sum(),
        truncated=(importance > is_truncation).sum(),
        gap=(proximal - behaviour).abs().sum(),
    )
