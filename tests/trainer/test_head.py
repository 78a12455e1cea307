"""The output layer in slices of the vocabulary against log_softmax over whole logits: values, gradients, memory."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
import torch

from libra_hpc.models import memory
from libra_hpc.models.shapes import model_shape
from libra_hpc.trainer.model import head
from libra_hpc.trainer.model.head import PLAIN, Likelihood, Passes, likelihood, passes_fault, plain_slope

TOKENS, HIDDEN, VOCAB, TEMPERATURE = 37, 24, 1000, 0.7
SEVERAL = 150 * TOKENS
"""Logits of a slice that make slices of 128 columns, and a shorter last one."""


def inputs(tokens: int = TOKENS, hidden: int = HIDDEN, vocab: int = VOCAB) -> tuple[torch.Tensor, ...]:
    """Hidden states, weight, targets, and the gradient that arrives at each log-probability."""
    generator = torch.Generator().manual_seed(5)
    rows = torch.randn(tokens, hidden, generator=generator)
    weight = torch.randn(vocab, hidden, generator=generator)
    targets = torch.randint(0, vocab, (tokens,), generator=generator)
    return rows, weight, targets, torch.randn(tokens, generator=generator)


def plain(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, temperature: float) -> Likelihood:
    """Whole logits."""
    logprobs = torch.log_softmax((hidden @ weight.t()).float() / temperature, -1)
    entropy = -(logprobs.detach().exp() * logprobs.detach()).sum()
    return Likelihood(logprobs.gather(1, targets[:, None])[:, 0], entropy)


def gradients(found: torch.Tensor, arriving: torch.Tensor, *of: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return torch.autograd.grad((found * arriving).sum(), of)


def assert_near(got: torch.Tensor, want: torch.Tensor, relative: float) -> None:
    """To ``relative`` of the largest entry."""
    assert got.dtype is want.dtype
    got, want = got.detach(), want.detach()
    assert float((got - want).abs().max()) <= relative * float(want.abs().max())


@pytest.mark.parametrize("slice_logits", [memory.SLICE_LOGITS, SEVERAL])
@pytest.mark.parametrize("temperature", [1.0, TEMPERATURE])
def test_values_and_gradients_equal_those_of_whole_logits(
    slice_logits: int, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "SLICE_LOGITS", slice_logits)
    hidden, weight, targets, arriving = inputs()
    hidden.requires_grad_()
    weight.requires_grad_()
    got = likelihood(hidden, weight, targets, temperature=temperature)
    want = plain(hidden, weight, targets, temperature)
    assert not got.entropy.requires_grad
    assert_near(got.logprobs, want.logprobs, 1e-6)
    assert float(got.entropy) == pytest.approx(float(want.entropy), rel=1e-5)
    found, whole = (gradients(one.logprobs, arriving, hidden, weight) for one in (got, want))
    for mine, other in zip(found, whole, strict=True):
        assert_near(mine, other, 1e-6)


def test_slices_cover_the_vocabulary_and_bound_the_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "SLICE_LOGITS", SEVERAL)
    slices = list(head._slices(TOKENS, VOCAB))
    assert [begin for begin, _ in slices] == [0, *(end for _, end in slices[:-1])]
    assert (slices[-1][1], len(slices)) == (VOCAB, 8)
    assert list(head._slices(0, VOCAB)) == [(0, VOCAB)]
    assert next(head._slices(10 * SEVERAL, VOCAB)) == (0, head.ALIGNED), "narrower slices would be slow"


def test_logits_far_from_zero_neither_overflow_nor_lose_digits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "SLICE_LOGITS", SEVERAL)
    hidden, weight, targets, _ = inputs()
    got, want = likelihood(30 * hidden, weight, targets, temperature=1.0), plain(30 * hidden, weight, targets, 1.0)
    assert float(want.logprobs.min()) < -200
    assert_near(got.logprobs, want.logprobs, 1e-6)
    assert float(got.entropy) == pytest.approx(float(want.entropy), rel=1e-4)


def test_a_pack_without_loss_tokens_has_zero_gradients() -> None:
    hidden, weight, targets, arriving = inputs(tokens=0)
    hidden.requires_grad_()
    weight.requires_grad_()
    got = likelihood(hidden, weight, targets, temperature=1.0)
    assert (got.logprobs.shape, float(got.entropy)) == ((0,), 0.0)
    of_hidden, of_weight = gradients(got.logprobs, arriving, hidden, weight)
    assert of_hidden.shape == (0, HIDDEN)
    assert not of_weight.any()


def test_bfloat16_weights_get_gradients_as_exact_as_with_whole_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "SLICE_LOGITS", SEVERAL)
    *both, targets, arriving = inputs()
    half = [t.bfloat16().requires_grad_() for t in both]
    exact = [t.detach().float().requires_grad_() for t in half]
    got = likelihood(*half, targets, temperature=TEMPERATURE).logprobs
    assert (got.dtype, half[0].dtype) == (torch.float32, torch.bfloat16)

    def errors(found: torch.Tensor) -> list[float]:
        want = gradients(plain(*exact, targets, TEMPERATURE).logprobs, arriving, *exact)
        pairs = zip(gradients(found, arriving, *half), want, strict=True)
        return [float((mine.float() - other).norm() / other.norm()) for mine, other in pairs]

    for mine, whole in zip(errors(got), errors(plain(*half, targets, TEMPERATURE).logprobs), strict=True):
        assert mine < 1.2 * whole


def test_what_is_not_finite_reaches_the_loss() -> None:
    hidden, weight, targets, _ = inputs()
    hidden[3, 0] = float("nan")
    got = likelihood(hidden, weight, targets, temperature=1.0).logprobs
    assert got.isfinite().tolist() == [i != 3 for i in range(TOKENS)]


def _peak_bytes(work: Callable[[], object]) -> int:
    """Most bytes that torch has allocated at a time during ``work``, above those before."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        work()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]  # type: ignore[union-attr]
    now = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak


@pytest.mark.parametrize("width", [32, pytest.param(256, marks=pytest.mark.nightly)])
def test_the_peak_is_what_the_planner_counts_and_a_fraction_of_whole_logits(
    width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens, vocab, dtype = 1024, 16_384, torch.bfloat16
    monkeypatch.setattr(memory, "SLICE_LOGITS", 1 << 20)
    hidden, weight, targets, arriving = inputs(tokens=tokens, hidden=width, vocab=vocab)
    hidden, weight = hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_()

    def peak(function: Callable[..., Likelihood], *temperature: float, **named: float) -> int:
        def work() -> None:
            gradients(function(hidden, weight, targets, *temperature, **named).logprobs, arriving, hidden, weight)

        return _peak_bytes(work)

    shape = msgspec.structs.replace(model_shape("qwen3-4b"), hidden=width, vocab=vocab, dtype_bytes=dtype.itemsize)
    given = tokens * width * dtype.itemsize  # the hidden states
    sliced, whole = peak(likelihood, temperature=1.0) + given, peak(plain, 1.0)
    assert sliced == pytest.approx(memory.head_bytes(shape, tokens, 1), rel=0.05)
    assert sliced < 0.15 * whole


def test_a_wrong_kernel_of_the_head_is_named() -> None:
    cpu = torch.device("cpu")
    assert passes_fault(cpu, torch.bfloat16, PLAIN) == ""
    twice = Passes(PLAIN.reduce, lambda *given: 2 * plain_slope(*given))
    assert passes_fault(cpu, torch.bfloat16, twice).startswith("a gradient differs by")
    nothing = Passes(lambda *_: None, plain_slope)
    assert passes_fault(cpu, torch.float32, nothing).startswith("the largest logit differs by")
