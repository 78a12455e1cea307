"""Engines of several families: weights agree bit for bit with those loaded, log-probabilities with Megatron's.

The importance ratio between rollout and training depends on this.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import save_file

from libra_hpc.engine.settings import CPU_STEP_TOKENS
from libra_hpc.engine.warm_up import DECODES, PROMPT
from libra_hpc.models.architecture import read_shape
from libra_hpc.models.devices import MIB
from libra_hpc.models.published import WRAPPERS
from libra_hpc.models.shapes import model_shape
from libra_hpc.protocol.codec import pack_f32, pack_i32
from libra_hpc.protocol.engine import Generated
from libra_hpc.protocol.engine_state import EngineReady
from libra_hpc.protocol.trainer import Sample
from libra_hpc.trainer.model.head import Head
from libra_hpc.trainer.model.packing import Pack, decode, pack
from libra_hpc.trainer.saved import checkpoint
from libra_hpc.trainer.train_engine import TrainEngine
from libra_hpc.weights.names import ReplicaPlace
from tests.stage.waiting import alive, wait_until
from tests.trainer.conftest import world
from tests.trainer.settings import optimizer
from tests.trainer.support import OF_FAMILY
from tests.trainer.support import make_model as make_family

from .engine_harness import (
    IMAGELESS,
    VOCAB,
    EngineUnderTest,
    Model,
    assert_bit_for_bit,
    bring,
    descendants,
    engine_config,
    logprobs_of,
    make_model,
    not_spinning,
    text_tensors,
    tokens_of,
    turn,
    versions,
)
from .engine_harness import PROMPTS as ENGINE_PROMPTS

__all__ = ["world"]
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

LONGEST = 1024
"""Context of `engine_config`."""
TEMPERATURE = 0.7
TOLERANCE = 1e-3
PROMPTS = [[1 + (7 * i + 3 * k) % 60 for k in range(3 + 5 * i)] for i in range(8)]


def as_samples(done: list[Generated]) -> list[Sample]:
    samples = []
    for i, (prompt, answer) in enumerate(zip(PROMPTS, done, strict=True)):
        tokens = [*prompt, *tokens_of(answer)]
        mask = bytes([0] * len(prompt) + [1] * len(tokens_of(answer)))
        logprobs = pack_f32([0.0] * len(prompt) + logprobs_of(answer))
        samples.append(Sample(str(i), pack_i32(tokens), mask, logprobs, 1.0 if i % 2 else -1.0))
    return samples


def gaps(engine: TrainEngine, samples: list[Sample]) -> torch.Tensor:
    """|log p Megatron - log p vLLM| of every sampled token."""
    found: list[torch.Tensor] = []

    def compare(head: Head, batch: Pack) -> torch.Tensor:
        found.append((head.likelihood(batch.targets, TEMPERATURE).logprobs - batch.behaviour).abs())
        return found[-1].sum()

    engine.forward(pack([decode(s) for s in samples], 256, engine.device), compare)
    return torch.cat(found)


def model_of(kind: str, folder: Path, seed: int, **keys: Any) -> Model:
    """A tiny model of a family, with heads that vLLM has a kernel for."""
    if kind in ("qwen2", "qwen2, tied"):
        return make_model(folder, seed, tied=kind == "qwen2, tied")
    sizes: dict[str, Any] = {"hidden_size": 128, "num_attention_heads": 2, "max_position_embeddings": 1024}
    family = OF_FAMILY.get(WRAPPERS.get(kind, kind), {})
    sizes |= {"head_dim": 64} if "head_dim" in family else {}
    sizes |= {"intermediate_size": 64} if kind == "gpt_oss" else {}
    if "linear_key_head_dim" in family:
        sizes |= {"num_key_value_heads": 1, "linear_key_head_dim": 128, "linear_value_head_dim": 128}
        sizes |= {"shared_expert_intermediate_size": 64}
    sizes |= {"moe_intermediate_size": 64} if "moe_intermediate_size" in family else {}
    sizes |= {"bos_token_id": 1, "eos_token_id": 2, "vocab_size": VOCAB, **keys}
    reference = make_family(kind, folder, **sizes)
    with torch.no_grad():
        generator = torch.Generator().manual_seed(seed)
        for parameter in reference.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    reference.save_pretrained(folder)
    if kind == "qwen3_5_moe":
        # As it is published, with all experts of a layer in one tensor.
        save_file(reference.state_dict(), folder / "model.safetensors")
    return Model(folder, reference)


class Served(NamedTuple):
    """An engine, the model that it started with, and another of the same family."""

    engine: EngineUnderTest
    model: Model
    other: Model
    tp: int


@pytest.fixture(
    scope="module",
    params=[
        ("qwen2, tied", 1, True),
        *(
            pytest.param(row, marks=pytest.mark.nightly)
            for row in (
                ("qwen2, tied", 1, False),
                ("qwen2", 2, False),
                ("qwen3_moe", 1, False),
                ("qwen3_moe", 2, False),
                ("glm4", 1, False),
            )
        ),
        *(
            pytest.param((kind, tp, False), marks=pytest.mark.nightly)
            for kind, tp in (
                ("ernie4_5", 1),
                ("gemma3_text", 1),
                ("gemma3", 1),
                ("mistral3", 2),
                ("glm4_moe", 2),
                ("gpt_oss", 2),
                ("glm", 1),
                ("olmoe", 1),
                ("smollm3", 1),
                ("granite", 1),
                ("ministral3", 1),
                ("olmo2", 2),
                ("qwen2_moe", 2),
                ("seed_oss", 1),
                ("olmo3", 1),
            )
        ),
        pytest.param(("phi3", 1, False), marks=pytest.mark.nightly),
    ],
    ids=lambda row: f"{row[0]}, tp {row[1]}{', from an image' if row[2] else ''}",
)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One engine of a family at version 7, from its folder's files or from an image of weights that no file has."""
    kind, tp, from_image = request.param
    folder = tmp_path_factory.mktemp("f")
    model, other = (model_of(kind, folder / name, seed) for name, seed in (("model", 3), ("other", 4)))
    config = engine_config(model, tp=tp, version=7)
    if from_image:
        image = model.image(folder)
        bring(image, 7, text_tensors(model.weights))
        config = engine_config(other, tp=tp, version=7, weights=str(image.path))
    engine = EngineUnderTest(folder / "e", config)
    try:
        ready: EngineReady = engine.ready()
        assert (ready.version, ready.capacity.tp) == (7, tp)
        counted = model_shape(model.folder).with_kv("auto", LONGEST).kv_bytes_per_device(tp, CPU_STEP_TOKENS)
        assert ready.capacity.kv_tokens == pytest.approx(16 * MIB // counted, rel=0.01)
        warm, decoded, read = ready.capacity.warm_up
        assert decoded.steps - warm.steps == decoded.generated_tokens - warm.generated_tokens == DECODES
        assert (read.steps - decoded.steps, read.prefill_tokens - decoded.prefill_tokens) == (1, PROMPT)
        assert warm.busy_s < decoded.busy_s < read.busy_s
        # The counters start from 0 afterwards, and the cache is empty.
        begun = engine.idle()
        assert (begun.steps, begun.generated_tokens, begun.cached_tokens) == (1, 1, 0)
        engine.loaded = engine.greedy()
        yield Served(engine, model, other, tp)
    finally:
        engine.close()


def test_staged_weights_are_bit_for_bit_those_of_the_start_and_its_time_is_counted(
    served: Served, tmp_path: Path
) -> None:
    engine, model, other, _ = served
    assert_bit_for_bit(engine, model, other, tmp_path)
    before = engine.idle()
    applied = engine.apply(other.update(next(versions)))
    assert engine.idle().update_s - before.update_s == pytest.approx(applied.seconds)


def test_sampled_logprobs_equal_megatrons_before_and_after_a_swap(
    served: Served, tmp_path: Path, world: ReplicaPlace
) -> None:
    engine, model = served.engine, served.model
    trainer = TrainEngine(read_shape(model.folder), torch.device("cpu"), torch.float32, world, optimizer(lr=1e-2))
    checkpoint.load_policy(trainer, model.folder)
    engine.apply(model.update(next(versions)))
    requests = [turn(f"a{i}", prompt, 24, temperature=TEMPERATURE) for i, prompt in enumerate(PROMPTS)]
    first = as_samples(engine.generate(*requests))
    assert gaps(trainer, first).max() < TOLERANCE

    def loss(head: Head, batch: Pack) -> torch.Tensor:
        return -(head.likelihood(batch.targets, TEMPERATURE).logprobs * batch.advantages).sum()

    packs = pack([decode(s) for s in first], 256, trainer.device)
    trainer.forward_backward(packs, loss)
    trainer.update(1.0 / sum(len(p.targets) for p in packs), trainer.norm())
    assert gaps(trainer, first).max() > 10 * TOLERANCE, "the step must change the policy, or the swap proves nothing"

    checkpoint.write_policy(trainer, model.folder, tmp_path / "out")
    version, path = next(versions), tmp_path / "out" / "model.safetensors"
    assert engine.apply(bring(model.image(tmp_path), version, text_tensors(path))).version == version
    second = engine.generate(*(turn(f"b{i}", prompt, 24, temperature=TEMPERATURE) for i, prompt in enumerate(PROMPTS)))
    assert all(answer.versions == ((version, len(tokens_of(answer))),) for answer in second)
    assert gaps(trainer, as_samples(second)).max() < TOLERANCE


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["qwen3_next", "qwen3_5", "qwen3_5_moe"])
def test_gated_delta_nets_are_swapped_bit_for_bit(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's CPU build computes them in bfloat16 alone, from convolutions that it packs."""
    monkeypatch.setenv("PYTHONPATH", str(IMAGELESS))
    model, other = (model_of(kind, tmp_path / name, seed) for name, seed in (("model", 3), ("other", 4)))
    config = engine_config(model, dtype="bfloat16", kv_cache_mb=64)
    with closing(EngineUnderTest(tmp_path / "e", config)) as engine:
        # vLLM's kernels for processors that multiply bfloat16 keep states in float32.
        wide, shape = 4 if torch.cpu._is_avx512_bf16_supported() else 2, model_shape(model.folder)
        shape = replace(shape, dtype_bytes=2, delta_net=replace(shape.delta_net, state_element_bytes=wide))
        assert engine.ready().capacity.kv_tokens == pytest.approx(
            64 * MIB // shape.with_kv("auto", LONGEST).kv_bytes_per_device(1, CPU_STEP_TOKENS), rel=0.01
        )
        first = engine.greedy()
        engine.apply(other.update(next(versions)))
        for prompt, (tokens, logprobs) in zip(ENGINE_PROMPTS, engine.greedy(), strict=True):
            got = torch.frombuffer(bytearray(logprobs), dtype=torch.float32)
            right, wrong = (torch.tensor(x.logprobs([*prompt, *tokens], len(prompt))) for x in (other, model))
            assert 10 * (got - right).abs().mean() < (got - wrong).abs().mean()
        engine.apply(model.update(next(versions)))
        assert engine.greedy() == first


def test_it_ends_when_asked_and_a_killed_one_leaves_no_worker(served: Served) -> None:
    """The last test of this engine."""
    engine, tp = served.engine, served.tp
    engine.idle()
    below = descendants(engine.process.pid)
    assert len(below) >= (tp if tp > 1 else 0)
    wait_until(lambda: not_spinning([engine.process.pid, *below]))
    if tp == 1:
        engine._connection.close()
        assert engine.process.wait(60) == 0
    else:
        engine.process.kill()
        engine.process.wait()
    wait_until(lambda: not any(map(alive, below)))
