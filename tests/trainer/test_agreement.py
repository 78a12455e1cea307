"""The two engines agree: vLLM's sampled log-probabilities equal Megatron's, before and after a weight update.

The importance ratio between rollout and training depends on this.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from libra_hpc.models.architecture import read_shape
from libra_hpc.protocol.codec import pack_f32, pack_i32
from libra_hpc.protocol.engine import Generated
from libra_hpc.protocol.trainer import Sample
from libra_hpc.trainer.model.head import Head
from libra_hpc.trainer.model.packing import Pack, decode, pack
from libra_hpc.trainer.saved import checkpoint
from libra_hpc.trainer.train_engine import TrainEngine
from libra_hpc.weights.names import ReplicaPlace
from tests.engine.engine_harness import (
    EngineUnderTest,
    Model,
    bring,
    engine_config,
    logprobs_of,
    make_model,
    tokens_of,
    turn,
)

from .settings import optimizer
from .support import make_model as make_family

pytestmark = pytest.mark.vllm

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


def model_of(kind: str, folder: Path) -> Model:
    """A tiny model of a family, with heads that vLLM has a kernel for."""
    sizes = {"hidden_size": 128, "num_attention_heads": 2, "max_position_embeddings": 1024}
    width = {"head_dim": 64} if kind in ("glm4", "qwen3_moe") else {}
    if kind == "qwen3_moe":
        width["moe_intermediate_size"] = 64
    return Model(folder, make_family(kind, folder, bos_token_id=1, eos_token_id=2, **sizes, **width))


MODELS: dict[str, Callable[[Path], Model]] = {
    "qwen2, tied": lambda folder: make_model(folder, seed=3, tied=True),
    "glm4": lambda folder: model_of("glm4", folder),
    "phi3": lambda folder: model_of("phi3", folder),
    "qwen3_moe": lambda folder: model_of("qwen3_moe", folder),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.nightly) if name in ("glm4", "phi3") else name for name in MODELS]
)
def test_sampled_logprobs_equal_megatrons_before_and_after_a_swap(
    name: str, tmp_path: Path, world: ReplicaPlace
) -> None:
    model = MODELS[name](tmp_path / "model")
    trainer = TrainEngine(read_shape(model.folder), torch.device("cpu"), torch.float32, world, optimizer(lr=1e-2))
    checkpoint.load_policy(trainer, model.folder)
    engine = EngineUnderTest(tmp_path, engine_config(model))
    try:
        engine.ready()
        requests = [turn(f"a{i}", prompt, 24, temperature=TEMPERATURE) for i, prompt in enumerate(PROMPTS)]
        first = as_samples(engine.generate(*requests))
        assert gaps(trainer, first).max() < TOLERANCE

        def loss(head: Head, batch: Pack) -> torch.Tensor:
            return -(head.likelihood(batch.targets, TEMPERATURE).logprobs * batch.advantages).sum()

        packs = pack([decode(s) for s in first], 256, trainer.device)
        trainer.forward_backward(packs, loss)
        trainer.update(1.0 / sum(len(p.targets) for p in packs), trainer.norm())
        assert gaps(trainer, first).max() > 10 * TOLERANCE, (
            "the step must change the policy, or the swap proves nothing"
        )

        checkpoint.write_policy(trainer, model.folder, tmp_path / "out")
        path = tmp_path / "out" / "model.safetensors"
        assert engine.apply(bring(model.image(tmp_path), 1, load_file(path))).version == 1
        second = engine.generate(
            *(turn(f"b{i}", prompt, 24, temperature=TEMPERATURE) for i, prompt in enumerate(PROMPTS))
        )
        assert all(answer.versions == ((1, len(tokens_of(answer))),) for answer in second)
        assert gaps(trainer, as_samples(second)).max() < TOLERANCE
    finally:
        engine.close()
