"""Common beginnings are computed once, and nothing of a step changes by it."""

from __future__ import annotations

import random
from pathlib import Path

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from libra_hpc.config.learn import Recompute
from libra_hpc.models.architecture import read_shape
from libra_hpc.protocol.codec import pack_f32, pack_i32, unpack_i32
from libra_hpc.protocol.trainer import Sample, StepDone, TrainStep
from libra_hpc.trainer.model.attention import Segments, rectangles
from libra_hpc.trainer.model.megatron_model import attend_with
from libra_hpc.trainer.model.packing import COLUMNS, Example, decode, example, pack
from libra_hpc.trainer.model.prefixes import SHORTEST
from libra_hpc.trainer.shards import SampleWork, spread, tokens_of
from libra_hpc.trainer.train_engine import TrainEngine
from libra_hpc.weights.names import ReplicaPlace

from .batches import loss_tokens, samples
from .support import ALGORITHM, OPTIMIZER, Replica, assert_same_step, build, join_all, make_model
from .test_attention import place_of, varlen

CPU = torch.device("cpu")
SHARED = SampleWork(shares=True)


def alike(seed: int, count: int = 9) -> list[Sample]:
    """Samples of which each third begins like the two before it, some of them by what is trained there."""
    found: list[Sample] = []
    for i, one in enumerate(samples(seed, count)):
        if i % 3:
            other = found[-1]
            keep = SHORTEST + (i % 3)
            one = msgspec.structs.replace(
                one,
                tokens=other.tokens[: 4 * keep] + one.tokens,
                loss_mask=bytes(keep) + one.loss_mask,
                logprobs=bytes(4 * keep) + one.logprobs,
            )
        else:
            chance = random.Random(seed + i)
            head = [chance.randrange(64) for _ in range(2 * SHORTEST)]
            mask = bytes([0, *(chance.randrange(2) for _ in head[1:])])
            logprobs = [-4.0 * loss for loss in mask]
            one = msgspec.structs.replace(
                one,
                tokens=pack_i32(head) + one.tokens,
                loss_mask=mask + one.loss_mask,
                logprobs=pack_f32(logprobs) + one.logprobs,
            )
        found.append(one)
    return found


@st.composite
def trees(draw: st.DrawFn) -> list[Example]:
    """Sequences that go on from others, at any of their tokens."""
    found: list[list[int]] = []
    for i in range(draw(st.integers(1, 12))):
        own = [1000 * i + k for k in range(draw(st.integers(2, 90)))]
        parent = found[draw(st.integers(0, i - 1))] if i and draw(st.booleans()) else []
        found.append(parent[: draw(st.integers(0, len(parent)))] + own)
    examples = []
    for i, tokens in enumerate(found):
        mask = torch.tensor([k > 0 and draw(st.booleans()) for k in range(len(tokens))])
        mask[-1] = True
        examples.append(example(str(i), torch.tensor(tokens), mask, torch.zeros(len(tokens)), float(i)))
    return examples


@settings(max_examples=80, deadline=None)
@given(trees(), st.integers(60, 400), st.sampled_from([(1, 1), (1, 4), (2, 1), (3, 2)]))
def test_rows_see_their_own_sequence_alone(examples: list[Example], micro_tokens: int, shape: tuple[int, int]) -> None:
    cp, tp = shape
    ranks = [pack(examples, micro_tokens, CPU, place_of(cp, rank, tp), shares=True) for rank in range(cp)]
    rows = shared = 0
    whole_sequences: list[list[int]] = []
    loss: list[tuple[float, int]] = []
    for parts in zip(*ranks, strict=True):
        tokens = torch.full((cp * parts[0].tokens.shape[1],), -1)
        for part in parts:
            for piece in part.layout.pieces:
                tokens[piece.begin : piece.begin + len(piece.rows)] = part.tokens[0, piece.rows.start : piece.rows.stop]
        seen: set[tuple[int, ...]] = set()
        for part in parts:
            rows, shared = rows + part.filled, shared + part.shared
            assert part.filled <= micro_tokens or len(part.lengths) == 1
            for piece in part.layout.pieces:
                columns = piece.columns if isinstance(piece.columns, torch.Tensor) else torch.tensor(piece.columns)
                sequences = columns.split(piece.column_bounds.diff().tolist())
                for own, ids in zip(piece.row_bounds.diff().tolist(), sequences, strict=True):
                    # The last columns of a segment are its own rows.
                    assert ids[-own:].tolist() == list(range(int(ids[-1]) - own + 1, int(ids[-1]) + 1))
                    seen.add(tuple(tokens[ids].tolist()))
            for tail in part.layout.tails:
                at = tail.columns if isinstance(tail.columns, torch.Tensor) else torch.tensor(tail.columns)
                assert tuple(tokens[at].tolist()) in seen
            for where, target, advantage in zip(
                part.where.tolist(), part.targets.tolist(), part.advantages.tolist(), strict=True
            ):
                mine = examples[int(advantage)].tokens.tolist()
                assert mine[int(part.positions[0, where]) + 1] == target
                assert mine[int(part.positions[0, where])] == int(part.tokens[0, where])
                loss.append((advantage, target))
        whole_sequences += [list(one) for one in seen]
        members = {i for part in parts for i in part.advantages.tolist()}
        assert len(members) == 1 or sum(len(examples[int(i)].tokens) for i in members) <= COLUMNS * micro_tokens
    assert all(one.tokens.tolist() in whole_sequences for one in examples)
    assert rows + shared == sum(len(one.tokens) for one in examples)
    assert sorted(loss) == sorted((i, int(t)) for i, one in enumerate(examples) for t in one.tokens[one.mask])


def drawn(kind: str, folder: Path, world: ReplicaPlace, recompute: Recompute) -> TrainEngine:
    """An engine of a tiny model whose random weights give gradients that are far from zero."""
    make_model(kind, folder)
    engine = TrainEngine(read_shape(folder), CPU, torch.float32, world, OPTIMIZER, recompute=recompute)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in engine.ddp.parameters():
            parameter.normal_(std=0.1)
    return engine


@pytest.mark.parametrize(
    ("kind", "recompute"), [("qwen3", "none"), ("qwen3", "full"), ("olmo3", "selective"), ("gpt_oss", "none")]
)
def test_a_model_has_the_same_gradients(tmp_path: Path, world: ReplicaPlace, kind: str, recompute: Recompute) -> None:
    engine = drawn(kind, tmp_path, world, recompute)
    examples = [decode(sample) for sample in alike(2)]
    kernels = [rectangles] if kind == "gpt_oss" else [rectangles, Segments(varlen)]
    found = []
    for kernel, shares in [(rectangles, False), *((kernel, True) for kernel in kernels)]:
        packs = pack(examples, 700, CPU, shares=shares)
        assert (sum(one.shared for one in packs) > 6 * SHORTEST) == shares
        attend_with(engine.ddp, kernel)
        engine.forward_backward(
            packs, lambda head, one: -(one.advantages * head.likelihood(one.targets, 1.0).logprobs).sum()
        )
        found.append([buffer.grad_data.clone() for buffer in engine.ddp.buffers])
    for others in found[1:]:
        for mine, theirs in zip(found[0], others, strict=True):
            assert mine.abs().max() > 0.1
            assert torch.allclose(mine, theirs, rtol=1e-4, atol=2e-5)


@pytest.mark.engine
@pytest.mark.parametrize(
    "layout",
    [{"tp": 2, "pp": 2}, *(pytest.param(one, marks=pytest.mark.nightly) for one in ({"cp": 2}, {"dp": 2}))],
    ids=str,
)
def test_a_world_that_shares_takes_the_step_of_one_that_does_not(
    tmp_path: Path, world: ReplicaPlace, layout: dict[str, int]
) -> None:
    make_model("qwen3", tmp_path / "model")
    _, alone = build(tmp_path / "model", world)
    whole = ALGORITHM.changed(train={"micro_tokens": 1000})
    replica = Replica(tmp_path, "split", tmp_path / "model", run=whole, **layout)
    replica.ready()
    join_all([replica], 0, tmp_path / "meet")
    batches = [alike(1), alike(2)]
    message = TrainStep(1, 0, tuple(map(tuple, batches)), tuple(map(loss_tokens, batches)))
    want = alone.step(message)
    replica.send(message)
    done = replica.receive(StepDone)
    assert_same_step(done, want, 2e-6)
    assert (want.numbers["shared_tokens"], done.numbers["trained_tokens"]) == (0, want.numbers["trained_tokens"])
    assert done.numbers["shared_tokens"] > 6 * SHORTEST
    assert set(replica.close()) == {0}


@given(st.lists(st.integers(0, 5), min_size=1, max_size=40), st.integers(1, 4))
def test_samples_that_begin_alike_go_together_and_work_stays_even(kinds: list[int], ranks: int) -> None:
    batch = [
        Sample(f"{i:02}", pack_i32([kind] * (kind * SHORTEST) + [100 + i] * 50), b"", b"", 1.0)
        for i, kind in enumerate(kinds)
    ]
    own = spread(batch, ranks, SHARED)
    assert sorted(one.uid for part in own for one in part) == sorted(one.uid for one in batch)
    work = [computed(part) for part in own]
    longest = max(tokens_of(one) for one in batch)
    assert computed(batch) <= sum(work)
    assert max(work) <= sum(tokens_of(one) for one in batch) / ranks + longest


def test_siblings_of_a_long_prompt_stay_together() -> None:
    batch = [Sample(f"{i:02}", pack_i32([i // 8] * 1400 + [100 + i] * 50), b"", b"", 1.0) for i in range(64)]
    for ranks in (1, 2, 4, 8):
        assert [computed_of_eights(part) for part in spread(batch, ranks, SHARED)] == [8 * 1800 // ranks] * ranks
    assert max(computed_of_eights(part) for part in spread(batch, 16, SHARED)) == 1800, "not 4 * 1450"


def computed_of_eights(part: tuple[Sample, ...]) -> int:
    return 50 * len(part) + 1400 * len({unpack_i32(one.tokens)[0] for one in part})


def computed(part: list[Sample] | tuple[Sample, ...]) -> int:
    """Tokens without the beginnings that another sample has."""
    heads = {unpack_i32(one.tokens)[0]: tokens_of(one) - 50 for one in part}
    return 50 * len(part) + sum(heads.values())
