"""Weights from the node's image: staged beside decoding in real engines, switched in one pause; what is refused."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from libra_hpc.protocol.engine import Generated, UpdateWeights, WeightsApplied
from libra_hpc.weights.image import IMAGE_FILE
from tests.trainer.support import make_model as make_family

from .engine_harness import (
    PROMPTS,
    EngineUnderTest,
    Model,
    alive,
    both,
    bring,
    descendants,
    engine_config,
    logprobs_of,
    make_model,
    not_spinning,
    tokens_of,
    turn,
    versions,
    wait_until,
)

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]


def dense(folder: Path, seed: int) -> Model:
    return make_model(folder, seed)


def tied(folder: Path, seed: int) -> Model:
    return make_model(folder, seed, tied=True)


def experts(folder: Path, seed: int) -> Model:
    sizes = {"hidden_size": 128, "num_attention_heads": 2, "head_dim": 64, "moe_intermediate_size": 64}
    sizes["max_position_embeddings"] = 1024
    reference = make_family("qwen3_moe", folder, bos_token_id=1, eos_token_id=2, vocab_size=128, **sizes)
    with torch.no_grad():
        generator = torch.Generator().manual_seed(seed)
        for parameter in reference.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    reference.save_pretrained(folder)
    return Model(folder, reference)


def assert_bit_for_bit(engine: EngineUnderTest, old: Model, new: Model, tmp_path: Path) -> None:
    """The weights of the folder's files were loaded by vLLM; they come back after others were staged in their place."""
    image, version = old.image(tmp_path), next(versions)
    applied = engine.apply(bring(image, version, load_file(new.weights)))
    assert (applied.version, applied.stage_s > 0) == (version, True)
    requests = [turn(f"n{i}", prompt, 8) for i, prompt in enumerate(PROMPTS)]
    for request, done in zip(requests, engine.generate(*requests), strict=True):
        context = list(memoryview(request.prompt).cast("i"))
        expected = new.logprobs(context + tokens_of(done), len(context))
        assert logprobs_of(done) == pytest.approx(expected, abs=1e-3)
    engine.apply(bring(image, next(versions), load_file(old.weights), base=version))
    assert engine.greedy() == engine.loaded


@both
def test_staged_weights_are_bit_for_bit_those_of_the_load_at_the_start(
    engine: EngineUnderTest, old: Model, new: Model, tmp_path: Path
) -> None:
    assert_bit_for_bit(engine, old, new, tmp_path)


@pytest.mark.parametrize(
    ("family", "tp"),
    [
        pytest.param(tied, 1, marks=pytest.mark.chaos),
        pytest.param(dense, 2, marks=pytest.mark.chaos),
        pytest.param(experts, 1, marks=pytest.mark.chaos),
        (experts, 2),
    ],
    ids=["tied, tp 1", "untied, tp 2", "experts, tp 1", "experts, tp 2"],
)
def test_staged_weights_of_a_family_are_bit_for_bit_those_of_the_load_and_a_killed_engine_leaves_no_worker(
    family: Callable[[Path, int], Model], tp: int, folder: Path, tmp_path: Path
) -> None:
    old, new = family(tmp_path / "old", 1), family(tmp_path / "new", 2)
    engine = EngineUnderTest(folder, engine_config(old, tp=tp, version=1))
    try:
        assert engine.ready().capacity.tp == tp
        engine.loaded = engine.greedy()
        assert_bit_for_bit(engine, old, new, tmp_path)
        engine.idle()
        below = descendants(engine.process.pid)
        assert len(below) >= (tp if tp > 1 else 0)
        wait_until(lambda: not_spinning([engine.process.pid, *below]), "the idle engine stops using processor time")
        engine.process.kill()
        engine.process.wait()
        wait_until(lambda: not any(map(alive, below)), "the workers of a killed engine end")
    finally:
        engine.close()


@both
def test_decoding_goes_on_while_it_stages_and_every_token_names_its_version(
    engine: EngineUnderTest, old: Model, new: Model, tmp_path: Path
) -> None:
    image = old.image(tmp_path)
    before, after = next(versions), next(versions)
    engine.apply(old.update(before))
    requests = [turn(f"f{i}", [7 + i] * (20 + i), 300) for i in range(4)]
    engine.start(*requests)
    engine.send(bring(image, after, load_file(new.weights)))
    messages = [engine.receive() for _ in range(5)]
    (applied,) = [message for message in messages if isinstance(message, WeightsApplied)]
    assert applied.recomputed > 0
    mixed = 0
    for request, done in itertools.product(requests, messages):
        if isinstance(done, Generated) and done.rid == request.rid:
            tokens, context = tokens_of(done), list(memoryview(request.prompt).cast("i"))
            split = sum(count for version, count in done.versions if version == before)
            assert sum(count for _, count in done.versions) == 300
            first, second = (model.logprobs(context + tokens, len(context)) for model in (old, new))
            assert logprobs_of(done) == pytest.approx(first[:split] + second[split:], abs=1e-3)
            mixed += 0 < split < 300
    assert mixed


def test_what_cannot_be_staged_leaves_the_old_weights_serving(
    engine: EngineUnderTest, old: Model, new: Model, tmp_path: Path
) -> None:
    engine.apply(old.update(next(versions)))
    served, version = engine.greedy(), next(versions)
    absent = UpdateWeights(str(tmp_path / "absent" / IMAGE_FILE), version)
    assert "No such file" in engine.refuse(absent)
    image = old.image(tmp_path)
    assert "no whole version" in engine.refuse(UpdateWeights(str(image.path), version))
    (tmp_path / "wide").mkdir()
    wide = make_model(tmp_path / "wide", seed=5, hidden=128)
    other = wide.image(tmp_path / "wide")
    assert "expected [128, 64]" in engine.refuse(bring(other, version, load_file(wide.weights)))
    assert engine.greedy() == served
    # Refused updates hold no lease, and do not stop the next one.
    update = bring(image, version, load_file(new.weights))
    assert engine.apply(update).version == version
    assert engine.greedy() != served


def test_kept_kv_serves_the_groups_of_its_weights_and_no_later_one(
    old: Model, new: Model, folder: Path, tmp_path: Path
) -> None:
    image = old.image(tmp_path)
    engine = EngineUnderTest(folder, engine_config(old, version=1, kv_after_update="keep"))
    context = [11 + i % 90 for i in range(100)]

    def cached(rid: str, admitted: int) -> Generated:
        (done,) = engine.generate(turn(rid, context, 8, admitted=admitted))
        return done

    try:
        engine.ready()
        assert [cached(f"a{i}", 1).cached_tokens for i in range(2)] == [0, 96]
        running = turn("long", context[:40], 700, admitted=1)
        engine.start(running)
        engine.send(bring(image, 2, load_file(new.weights)))
        messages = [engine.receive() for _ in range(2)]
        (applied,) = [message for message in messages if isinstance(message, WeightsApplied)]
        (done,) = [message for message in messages if isinstance(message, Generated)]
        assert applied.recomputed == 0
        assert [version for version, _ in done.versions] == [1, 2]
        # A group goes on with what it has; a later one begins anew, and then has the new weights alone.
        assert cached("b", 1).cached_tokens == 96
        for rid, found in (("c", 0), ("d", 96)):
            later = cached(rid, 2)
            assert later.cached_tokens == found
            assert logprobs_of(later) == pytest.approx(new.logprobs(context + tokens_of(later), 100), abs=1e-3)
        # An engine that lacks the version of the group does not pass its KV for one of that version.
        assert cached("early", 3).cached_tokens == 96
        engine.apply(bring(image, 3, load_file(old.weights), base=2))
        assert cached("late", 3).cached_tokens == 0
        # Evaluations and warm-ups belong to no group.
        assert [cached(f"e{i}", -1).cached_tokens for i in range(2)] == [96, 96]
    finally:
        engine.close()
