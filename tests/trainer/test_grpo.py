"""The objective against a hand-written reference and finite differences, and the supervised warm start."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from libra_hpc.trainer.grpo import Terms, grpo_terms
from libra_hpc.trainer.losses import LossTokens, ppo
from libra_hpc.trainer.sft import Demonstration, warm_start

from .batches import VOCAB
from .settings import algorithm
from .support import make_model

PPO = algorithm(is_truncation=2.0, kl_coef=0.1).algorithm


def objective(tokens: LossTokens, reference: torch.Tensor | None = None, **changes: Any) -> Terms:
    return grpo_terms(tokens, ppo, msgspec.structs.replace(PPO, **changes), reference)


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
    return -weight * min(ratio * advantage, clipped * advantage) + 0.1 * _k3(lp, behaviour, behaviour)


def _k3(lp: float, other: float, behaviour: float) -> float:
    return min(math.exp(lp - behaviour), 2.0) * (math.exp(other - lp) - 1 - (other - lp))


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
    by_hand = sum(map(_k3, arguments[0].tolist(), reference.tolist(), arguments[2].tolist()))
    assert float(found.reference_kl) == pytest.approx(by_hand, rel=1e-5)
    assert float(found.loss) == pytest.approx(float(without.loss) + 0.05 * by_hand, rel=1e-5)
    assert float(without.reference_kl) == 0.0


def test_gradient_equals_finite_differences() -> None:
    logprobs, *rest = _inputs(dtype=torch.float64)
    # Without a KL term, whose weight has no gradient either.
    assert torch.autograd.gradcheck(lambda x: objective(_tokens(x, *rest), kl_coef=0.0).loss, logprobs.requires_grad_())


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


LOGITS, OTHER, SAMPLED = (torch.tensor(x, dtype=torch.float64) for x in ([1.0, 0.2, -1.0], [0.0, 0.9, 0.1], [0.5] * 3))


def _expected(**changes: Any) -> tuple[torch.Tensor, Terms]:
    """The gradient of the mean objective over a vocabulary of three, whose tokens another policy samples."""
    logits = LOGITS.clone().requires_grad_()
    lp, behaviour = logits.log_softmax(0), SAMPLED.log_softmax(0)
    changes = {"kl_coef": 0.0, "reference_kl_coef": 1.0, "is_truncation": 99.0, **changes}
    gradient = torch.zeros_like(logits)
    for i in range(3):
        own = [x[i : i + 1] for x in (lp, lp.detach(), behaviour, torch.zeros(3))]
        terms = objective(_tokens(*own), OTHER.log_softmax(0)[i : i + 1], **changes)
        gradient += behaviour[i].exp() * torch.autograd.grad(terms.loss, logits, retain_graph=True)[0]
    every = objective(_tokens(lp, lp.detach(), behaviour, torch.zeros(3)), OTHER.log_softmax(0), **changes)
    return gradient, every


def _divergence(reverse: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """KL(pi || q), or KL(q || pi), and its gradient."""
    logits = LOGITS.clone().requires_grad_()
    p, q = logits.log_softmax(0), OTHER.log_softmax(0)
    value = (p.exp() * (p - q)).sum() if reverse else (q.exp() * (q - p)).sum()
    return value.detach(), torch.autograd.grad(value, logits)[0]


@pytest.mark.parametrize(
    ("kl", "kl_in", "reverse"), [("k1", "reward", True), ("k2", "loss", True), ("k3", "loss", False)]
)
def test_a_kl_term_descends_exactly_what_the_page_has(kl: str, kl_in: str, reverse: bool) -> None:
    gradient, _ = _expected(kl=kl, kl_in=kl_in)
    assert torch.allclose(gradient, _divergence(reverse)[1], atol=1e-12)
    assert not torch.allclose(gradient, _divergence(not reverse)[1], atol=0.01)


@pytest.mark.parametrize(("kl", "kl_in"), [("k1", "loss"), ("k2", "reward"), ("k3", "reward")])
def test_the_other_kl_terms_descend_neither(kl: str, kl_in: str) -> None:
    gradient, _ = _expected(kl=kl, kl_in=kl_in)
    assert not any(torch.allclose(gradient, _divergence(reverse)[1], atol=0.01) for reverse in (True, False))
    assert bool((gradient.abs() < 1e-12).all()) == (kl == "k1"), "refused: it has no gradient"


def test_the_columns_of_a_kl_term_have_its_value_whoever_sampled() -> None:
    # A third of the tokens each: the mean over three is that over the tokens of who sampled.
    assert float(_expected()[1].reference_kl) / 3 == pytest.approx(float(_divergence(True)[0]), rel=1e-12)


def test_one_token_far_off_counts_as_cut_and_spoils_no_other() -> None:
    lp = torch.tensor([-101.0, -1.0], requires_grad=True)
    other = torch.tensor([-1.0, -1.2])
    for sampled in (other, lp.detach()):
        for kl in ("k2", "k3"):
            found = objective(_tokens(lp, sampled, sampled, torch.ones(2)), other, kl=kl, reference_kl_coef=0.1)
            alone = objective(
                _tokens(*(x[1:] for x in (lp, sampled, sampled, torch.ones(2)))),
                other[1:],
                kl=kl,
                reference_kl_coef=0.1,
            )
            (gradient,), (rest,) = (torch.autograd.grad(terms.loss, lp) for terms in (found, alone))
            assert all(bool(torch.isfinite(value)) for value in (*found, *gradient))
            assert gradient[1] == rest[1]
            assert (int(found.clamped), int(alone.clamped)) == (1, 0)
    near = torch.tensor([-1.0, -101.0])
    assert all(torch.isfinite(value) for value in objective(_tokens(other, other, near, torch.ones(2)), near))


def test_masked_tokens_and_sequences_have_no_gradient() -> None:
    lp = torch.full((5,), -1.0, requires_grad=True)
    proximal, behaviour = lp.detach(), torch.tensor([-1.1, -3.0, -0.1, -1.5, -1.6])  # ratios 1.1 7.4 0.4 1.6 1.8
    counts = torch.tensor([3.0, 2.0])
    tokens = LossTokens(lp, proximal, behaviour, torch.ones(5), torch.tensor([0, 0, 0, 1, 1]), counts, counts)
    for changes, kept in (
        ({"mask_tokens": (0.5, 5.0)}, [1, 0, 0, 1, 1]),
        ({"mask_sequences": (0.0, 3.1)}, [0, 0, 0, 1, 1]),  # 3.3 and 3.0
        ({"mask_tokens": (0.5, 5.0), "mask_sequences": (3.1, 9.0)}, [1, 0, 0, 0, 0]),
    ):
        terms = objective(tokens, is_truncation=9.0, **changes)
        (gradient,) = torch.autograd.grad(terms.loss, lp)
        assert [int(value != 0.0) for value in gradient] == kept
        assert int(terms.masked) == 5 - sum(kept)


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


def test_demonstrations_that_run_out_leave_no_policy(tmp_path: Path) -> None:
    make_model("qwen2", tmp_path)
    with pytest.raises(RuntimeError, match="ran out after 2 of 5"):
        warm_start(tmp_path, tmp_path / "out", _counting(2), steps=5)
    assert not (tmp_path / "out").exists()
