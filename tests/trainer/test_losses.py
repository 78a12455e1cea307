"""The named losses against scalars by hand; a split over packs and context ranks is in `test_parallel`."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from libra_hpc.config.learn import LOSSES
from libra_hpc.errors import UserError
from libra_hpc.trainer.grpo import grpo_terms
from libra_hpc.trainer.losses import LossTokens, loss_named

from .settings import algorithm

LOW, HIGH = 0.2, 0.3
LENGTHS = (3, 1, 4)
ADVANTAGES = (1.0, -0.5, -2.0)


def _tokens() -> LossTokens:
    generator = torch.Generator().manual_seed(5)
    count = sum(LENGTHS)
    proximal = -3 * torch.rand(count, generator=generator)
    logprobs = (proximal + 0.5 * torch.randn(count, generator=generator)).requires_grad_()
    behaviour = proximal + 0.2 * torch.randn(count, generator=generator)
    sequences = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))
    advantages = torch.tensor(ADVANTAGES)[sequences]
    return LossTokens(logprobs, proximal, behaviour, advantages, sequences, *[torch.tensor(LENGTHS).float()] * 2)


def _by_hand(name: str) -> tuple[list[float], list[float], int]:
    """Losses, their derivatives by the own log-probability, and how many tokens are clipped."""
    tokens = _tokens()
    rows = list(zip(tokens.logprobs.tolist(), tokens.proximal.tolist(), tokens.sequences.tolist(), strict=True))
    losses, slopes, clipped = [], [], 0
    for lp, proximal, sequence in rows:
        own = [a - b for a, b, other in rows if other == sequence]
        ratio, a = math.exp(lp - proximal), ADVANTAGES[sequence]
        if name == "gspo":
            ratio = math.exp(sum(own) / len(own))
        if name == "cispo":
            losses.append(-min(ratio, 1 + HIGH) * a * lp)
            slopes.append(-min(ratio, 1 + HIGH) * a)
            clipped += ratio > 1 + HIGH
            continue
        bounded = min(max(ratio, 1 - LOW), 1 + HIGH)
        out = bounded * a < ratio * a
        losses.append(-min(ratio * a, bounded * a))
        slopes.append(0.0 if out else -ratio * a)
        clipped += out
    return losses, slopes, clipped


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_and_its_gradient_equal_scalars(name: str) -> None:
    tokens = _tokens()
    losses, slopes, clipped = _by_hand(name)
    found, where = loss_named(name)(tokens, LOW, HIGH)
    found.sum().backward()  # type: ignore[no-untyped-call]
    assert found.tolist() == pytest.approx(losses, rel=1e-5)
    assert tokens.logprobs.grad is not None
    assert tokens.logprobs.grad.tolist() == pytest.approx(slopes, rel=1e-5)
    assert int(where.sum()) == clipped > 0


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("trajectories", [(3, 1, 4), (10, 6, 10)])
def test_by_sequence_each_trajectory_weighs_the_same(name: str, trajectories: tuple[int, ...]) -> None:
    """The second: the first and the last are samples of one trajectory, others of which are in other packs."""
    settings = algorithm(clip=[LOW, HIGH], is_truncation=9.0, aggregate="sequence")
    tokens = _tokens()._replace(trajectories=torch.tensor(trajectories).float())
    terms = grpo_terms(tokens, loss_named(name), settings.algorithm)
    losses, _, _ = _by_hand(name)
    weights = torch.exp(tokens.proximal - tokens.behaviour).tolist()
    means, at = 0.0, 0
    for length, count in zip(LENGTHS, trajectories, strict=True):
        means += sum(w * x for w, x in zip(weights[at : at + length], losses[at : at + length], strict=True)) / count
        at += length
    assert terms.loss.item() == pytest.approx(means, rel=1e-5)


def test_a_loss_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "my.py"
    file.write_text("def plain(t, low, high):\n    return -t.advantages * t.logprobs, t.logprobs > 9\n")
    tokens = _tokens()
    found, _ = loss_named(f"{file}:plain")(tokens, LOW, HIGH)
    assert torch.equal(found, -tokens.advantages * tokens.logprobs)
    for name, sentence in ((f"{file}:plane", "has no such function.*plain"), ("pp", "ppo, gspo, cispo")):
        with pytest.raises(UserError, match=sentence):
            loss_named(name)
