"""The output layer in slices of the vocabulary against log_softmax over whole logits: values, gradients, memory."""

from __future__ import annotations

import datetime
import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch
import torch.distributed as dist

from libra_hpc.models import memory
from libra_hpc.models.shapes import model_shape
from libra_hpc.trainer.device import file_store
from libra_hpc.trainer.model import compat, head
from libra_hpc.trainer.model.head import PLAIN, Likelihood, Passes, likelihood, loss_rows, passes_fault, plain_slope

from .support import WAIT_S
from .worker_process import FORKS

TOKENS, HIDDEN, VOCAB, TEMPERATURE = 37, 24, 1000, 0.7
ROOT = Path(__file__).parents[2]
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


def _with_kernels(file: Path) -> None:
    """Triton's kernels on this CPU, over several slices and several blocks of each, in both types."""
    torch.set_num_threads(1)
    from libra_hpc.trainer.model import triton_kernels

    triton_kernels.BLOCK = 64
    memory.SLICE_LOGITS = 2 * SEVERAL
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        assert passes_fault(torch.device("cpu"), dtype, head.kernels()) == ""
        *both, targets, arriving = inputs()
        for name, passes in {"kernels": head.kernels(), "plain": PLAIN}.items():
            head.choose_passes = lambda *_, passes=passes: passes  # type: ignore[assignment, misc]
            own = [one.to(dtype).requires_grad_() for one in both]
            got = likelihood(*own, targets, temperature=TEMPERATURE)
            found[dtype, name] = got.logprobs.detach(), got.entropy, *gradients(got.logprobs, arriving, *own)
    torch.save(found, file)


@pytest.mark.engine
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs `pip install --no-deps triton==3.6.0`")
def test_the_kernels_equal_plain_torch(tmp_path: Path) -> None:
    # Triton reads the variable when it is imported, and torch may have done that in this process.
    line = (
        f"from tests.trainer.test_head import Path, _with_kernels; _with_kernels(Path({str(tmp_path / 'found.pt')!r}))"
    )
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, "-c", line], env=environment, cwd=ROOT, timeout=WAIT_S, check=True)
    found = torch.load(tmp_path / "found.pt")
    # The interpreter cuts bfloat16 off, where a GPU rounds to the nearest.
    for dtype, most in {torch.float32: 1e-6, torch.bfloat16: 2**-7}.items():
        got, want = found[dtype, "kernels"], found[dtype, "plain"]
        assert_near(got[0], want[0], 1e-6)
        assert float(got[1]) == pytest.approx(float(want[1]), rel=1e-5)
        for mine, other in zip(got[2:], want[2:], strict=True):
            assert_near(mine, other, most)


def test_a_wrong_kernel_of_the_head_is_named() -> None:
    cpu = torch.device("cpu")
    assert passes_fault(cpu, torch.bfloat16, PLAIN) == ""
    twice = Passes(PLAIN.reduce, lambda *given: 2 * plain_slope(*given))
    assert passes_fault(cpu, torch.bfloat16, twice).startswith("a gradient differs by")
    nothing = Passes(lambda *_: None, plain_slope)
    assert passes_fault(cpu, torch.float32, nothing).startswith("the largest logit differs by")


def _tensor_rank(rank: int, folder: Path, sequence_parallel: bool) -> None:
    """One of two ranks: half of the vocabulary; with sequence parallelism, half of the tokens."""
    torch.set_num_threads(1)
    compat.install()
    store = file_store(str(folder / "meet"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=datetime.timedelta(seconds=WAIT_S))
    memory.SLICE_LOGITS = SEVERAL
    hidden, weight, targets, arriving = inputs(tokens=TOKENS + 1)
    part = weight.chunk(2)[rank].clone().requires_grad_()
    mine = (hidden.chunk(2)[rank] if sequence_parallel else hidden).clone().requires_grad_()
    group = dist.group.WORLD
    rows = loss_rows(mine, torch.arange(1, TOKENS + 1), group, sequence_parallel=sequence_parallel)
    got = likelihood(rows, part, targets[1:], temperature=TEMPERATURE, group=group)
    found = (got.logprobs.detach(), got.entropy, *gradients(got.logprobs, arriving[1:], mine, part))
    torch.save(found, folder / f"{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.engine
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_two_tensor_ranks_equal_one(sequence_parallel: bool, tmp_path: Path) -> None:
    ranks = [FORKS.Process(target=_tensor_rank, args=(rank, tmp_path, sequence_parallel)) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(WAIT_S)
        assert process.exitcode == 0
    hidden, weight, targets, arriving = inputs(tokens=TOKENS + 1)
    hidden.requires_grad_()
    weight.requires_grad_()
    want = plain(hidden[1:], weight, targets[1:], TEMPERATURE)
    of_hidden, of_weight = gradients(want.logprobs, arriving[1:], hidden, weight)
    for rank in range(2):
        logprobs, entropy, mine, part = torch.load(tmp_path / f"{rank}.pt")
        assert_near(logprobs, want.logprobs, 1e-6)
        assert float(entropy) == pytest.approx(float(want.entropy), rel=1e-5)
        assert_near(mine, of_hidden.chunk(2)[rank] if sequence_parallel else of_hidden, 1e-6)
        assert_near(part, of_weight.chunk(2)[rank], 1e-6)
