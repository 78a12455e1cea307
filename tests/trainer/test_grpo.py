"""The objective against a hand-written reference and finite differences, and the supervised warm start."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

from libra_hpc.trainer.grpo import grpo_terms
from libra_hpc.trainer.losses import LossTokens, ppo
from libra_hpc.trainer.sft import Demonstration, warm_start

from .batches import VOCAB
from .support import make_model

objective = partial(grpo_terms, named=ppo, clip=(0.2, 0.2), is_truncation=2.0, kl_coef=0.1)


def _tokens(*values: torch.Tensor) -> LossTokens:
    """Of one sequence."""
    count = len(values[0])
    return LossTokens(*values, torch.zeros(count, dtype=torch.int64), *[torch.tensor([float(count)])] * 2)


def _inputs(n: int = 40, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(3)
    proximal = -3 * torch.rand(n, generator=generator, dtype=dtype)
    logprobs = proximal + 0.4 * torch.randn(n, generator=generator, dtype=dtype)
    behaviour = proximal + 0.7 * torch.randn(n, generator=generator, dtype=dtype)
    return logprobs, proximal, behaviour, torch.randn(n, generator=generator, dtype=dtype)


def _by_hand(lp: float, prox: float, behaviour: float, advantage: float) -> float:
    ratio = math.exp(lp - prox)
    weight = min(math.exp(prox - behaviour), 2.0)
    clipped = min(max(ratio, 0.8), 1.2)
    k3 = math.exp(behaviour - lp) - 1 - (behaviour - lp)
    return -weight * min(ratio * advantage, clipped * advantage) + 0.1 * k3


def test_loss_and_metrics_equal_a_scalar_reference() -> None:
    arguments = _inputs()
    terms = objective(_tokens(*arguments))
    rows = list(zip(*(a.tolist() for a in arguments), strict=True))
    assert float(terms.loss) == pytest.approx(sum(_by_hand(*row) for row in rows), rel=1e-5)
    assert float(terms.ratio) == pytest.approx(sum(math.exp(lp - b) for lp, _, b, _ in rows), rel=1e-5)
    assert int(terms.truncated) == sum(p - b > math.log(2.0) for _, p, b, _ in rows) > 0
    assert float(terms.gap) == pytest.approx(sum(abs(p - b) for _, p, b, _ in rows), rel=1e-5)


def test_the_reference_adds_its_own_kl_estimate() -> None:
    arguments = _inputs()
    reference = arguments[1] - 0.3
    found = objective(_tokens(*arguments), reference=reference, reference_kl_coef=0.05)
    without = objective(_tokens(*arguments))
    pairs = zip(arguments[0].tolist(), reference.tolist(), strict=True)
    by_hand = sum(math.exp(ref - lp) - 1 - (ref - lp) for lp, ref in pairs)
    assert float(found.reference_kl) == pytest.approx(by_hand, rel=1e-5)
    assert float(found.loss) == pytest.approx(float(without.loss) + 0.05 * by_hand, rel=1e-5)
    assert float(without.reference_kl) == 0.0


def test_gradient_equals_finite_differences() -> None:
    logprobs, *rest = _inputs(dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x: objective(_tokens(x, *rest)).loss, logprobs.requires_grad_())


def test_no_gradient_where_the_advantage_is_zero_or_the_ratio_is_clipped() -> None:
    lp = torch.tensor([-1.0, -1.0, -1.0, -1.0], requires_grad=True)
    proximal = torch.tensor([-1.1, -2.0, -0.2, -2.0])  # ratios 1.1, 2.7, 0.45, 2.7
    advantages = torch.tensor([0.0, 1.0, -1.0, -1.0])
    objective(_tokens(lp, proximal, proximal.clone(), advantages), kl_coef=0.0).loss.backward()  # type: ignore[no-untyped-call]
    assert lp.grad is not None
    assert lp.grad[:3].tolist() == [0.0, 0.0, 0.0]
    assert lp.grad[3] > 0  # an unlikely-making advantage is never clipped from above


def test_the_importance_weight_is_truncated_and_carries_no_gradient() -> None:
    lp = torch.tensor([-1.0, -1.0], requires_grad=True)
    behaviour = torch.tensor([-1.5, -6.0])  # weights 1.65 and 148
    terms = objective(_tokens(lp, lp.detach(), behaviour, torch.ones(2)), kl_coef=0.0)
    terms.loss.backward()  # type: ignore[no-untyped-call]
    assert lp.grad is not None
    assert lp.grad.tolist() == pytest.approx([-math.exp(0.5), -2.0])
    assert int(terms.truncated) == 1


def _counting(batches: int) -> Iterator[list[Demonstration]]:
    dice = random.Random(0)
    for _ in range(batches):
        starts = [dice.randrange(VOCAB) for _ in range(8)]
        yield [([(start + i) % VOCAB for i in range(6 + start % 5)], [0] + [1] * (5 + start % 5)) for start in starts]


def test_a_policy_learns_to_count_and_replaces_its_own_folder(tmp_path: Path) -> None:
    untrained = make_model("qwen2", tmp_path)
    report = warm_start(tmp_path, tmp_path, _counting(120), steps=120, lr=1e-2)
    assert report["steps"] == 120
    trained = type(untrained).from_pretrained(tmp_path)
    prompt = torch.arange(10, 20)[None]
    with torch.no_grad():
        right = (trained(prompt).logits[0].argmax(-1) == prompt[0] + 1).float().mean()
    assert right > 0.8
    assert report["last_loss"] < report["first_loss"]
    # The same call gives the same policy.
    make_model("qwen2", tmp_path / "again")
    warm_start(tmp_path / "again", tmp_path / "out", _counting(120), steps=120, lr=1e-2)
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (tmp_path / "model.safetensors").read_bytes()


def test_demonstrations_that_run_out_leave_no_policy(tmp_path: Path) -> None:
    make_model("qwen2", tmp_path)
    with pytest.raises(RuntimeError, match="ran out after 2 of 5"):
        warm_start(tmp_path, tmp_path / "out", _counting(2), steps=5)
    assert not (tmp_path / "out").exists()
