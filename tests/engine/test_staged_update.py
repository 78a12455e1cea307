"""Weights from the node's image: staged beside decoding in real engines, switched in one pause; what is refused."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from safetensors.torch import load_file

from libra_hpc.protocol.engine import Generated, UpdateWeights, WeightsApplied
from libra_hpc.weights.image import IMAGE_FILE

from .engine_harness import (
    EngineUnderTest,
    Model,
    assert_bit_for_bit,
    bring,
    logprobs_of,
    make_model,
    tokens_of,
    turn,
    versions,
)

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]


def test_staged_weights_are_bit_for_bit_those_of_the_load_at_the_start(
    engine: EngineUnderTest, old: Model, new: Model, tmp_path: Path
) -> None:
    assert_bit_for_bit(engine, old, new, tmp_path)


def test_decoding_goes_on_while_it_stages_and_every_token_names_its_version(
    engine: EngineUnderTest, old: Model, new: Model, tmp_path: Path
) -> None:
    before, after = next(versions) - 1, next(versions)
    requests = [turn(f"f{i}", [7 + i] * (20 + i), 300) for i in range(4)]
    engine.send(*requests, bring(old.image(tmp_path), after, load_file(new.weights)))
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
    assert mixed == 4


def test_what_cannot_be_staged_leaves_the_old_weights_serving(
    engine: EngineUnderTest, old: Model, new: Model, tmp_path: Path
) -> None:
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
