"""Families whose layers a GPU computes by other kernels than a CPU, against transformers: windows, sinks, delta nets,
experts; and beginnings that samples share."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from libra_hpc.models.architecture import hf_shapes, read_shape
from libra_hpc.trainer.device import choose_device, local_store
from libra_hpc.trainer.model.delta_net import choose_rule, rule_fault
from libra_hpc.trainer.model.head import Head
from libra_hpc.trainer.model.packing import Pack, decode, pack
from libra_hpc.trainer.saved import checkpoint
from libra_hpc.trainer.train_engine import TrainEngine, close_world, init_world
from libra_hpc.weights.blocks import to_hf
from libra_hpc.weights.names import ReplicaPlace, own_entries
from tests.trainer.batches import samples
from tests.trainer.support import OPTIMIZER, make_model
from tests.trainer.test_prefixes import alike

MICRO_TOKENS = 160
KINDS = ["qwen3", "gemma3_text", "gpt_oss", "glm4_moe", "qwen3_next", "qwen3_5_text"]
HEADS: dict[str, Any] = {"head_dim": 64}
"""A size that the kernels for 16-bit types have."""
DELTA_NET = {"linear_key_head_dim": 32, "linear_value_head_dim": 32}
CLOSE = {torch.float32: (1.0, 2e-5, 0.99999), torch.bfloat16: (0.9, 0.03, 0.95)}
"""Quantile of the differences of log-probabilities, its largest value, and least cosine of a parameter's gradient: in
bfloat16 some tokens go to other experts."""


@pytest.fixture(scope="module")
def gpu_world() -> Iterator[ReplicaPlace]:
    """A world of this process alone."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    yield init_world(choose_device(device, 0, 1), 1, 1, 0, local_store(), 60.0)
    close_world()


@pytest.mark.parametrize("shares", [False, True], ids=["each alone", "beginnings shared"])
@pytest.mark.parametrize("dtype", CLOSE, ids=["float32", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_gpu_trains_as_transformers_on_a_cpu(
    tmp_path: Path, gpu_world: ReplicaPlace, kind: str, dtype: torch.dtype, shares: bool
) -> None:
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    nets = DELTA_NET if kind.startswith(("qwen3_next", "qwen3_5")) else {}
    if nets and (shares or importlib.util.find_spec("fla")):
        pytest.skip("delta nets share nothing; with flash-linear-attention transformers needs a GPU for them, too")
    reference = make_model(kind, tmp_path / "model", **HEADS, **nets)
    engine = TrainEngine(read_shape(tmp_path / "model"), device, dtype, gpu_world, OPTIMIZER)
    checkpoint.load_policy(engine, tmp_path / "model")
    if dtype != torch.float32:
        # What rounding of the weights alone changes is not the kernels'.
        with torch.no_grad():
            for tensor in (*reference.parameters(), *reference.buffers()):
                tensor.copy_(tensor.to(dtype).float())
    batch = sorted((decode(s) for s in (alike(1) if shares else samples(1))), key=lambda e: -len(e.tokens))
    count = sum(int(e.mask.sum()) for e in batch)
    got: dict[int, torch.Tensor] = {}

    def loss(head: Head, one: Pack) -> torch.Tensor:
        found = head.likelihood(one.targets, 1.0).logprobs
        got.update(zip(one.advantages.long().tolist(), found.detach().float().cpu(), strict=True))
        return -found.sum() / count

    # The pack has a number beside each target, by which it is found again.
    batch = [one._replace(advantages=torch.arange(len(one.tokens)) + 1000.0 * i) for i, one in enumerate(batch)]
    packs = pack(batch, MICRO_TOKENS, engine.device, shares=shares)
    assert len(packs) > 1
    assert shares == any(one.shared for one in packs)
    engine.forward_backward(packs, loss)
    quantile, near, cosine = CLOSE[dtype]
    differences = []
    for number, example in enumerate(batch):
        where = example.mask.nonzero()[:, 0]
        want = reference(example.tokens[None]).logits[0].log_softmax(-1)[where - 1, example.tokens[where]]
        (-want.sum() / count).backward()
        mine = torch.stack([got[1000 * number + at] for at in where.tolist()])
        differences.append((mine - want.detach()).abs())
    assert torch.cat(differences).quantile(quantile) < near
    theirs = {name: p.grad for name, p in reference.named_parameters() if p.grad is not None}
    parameters, sizes, compared = engine.named_parameters(), hf_shapes(engine.shape), 0
    for ours, entry in own_entries(engine.shape, gpu_world).items():
        gradient = parameters[ours].main_grad.float().cpu()  # type: ignore[attr-defined]
        for name, part in zip(entry.hf, to_hf(entry, [gradient], engine.shape, sizes), strict=True):
            if name in theirs and theirs[name].shape == part.shape and theirs[name].abs().max() > 1e-6:
                compared += 1
                assert torch.cosine_similarity(part.flatten(), theirs[name].flatten(), 0) > cosine, name
    assert compared > 8


@pytest.mark.parametrize("dtype", CLOSE, ids=["float32", "bfloat16"])
def test_delta_nets_have_a_rule_that_is_right(dtype: torch.dtype) -> None:
    on = 64, 64, torch.device("cuda"), dtype
    assert rule_fault(choose_rule(*on), *on) == ""
