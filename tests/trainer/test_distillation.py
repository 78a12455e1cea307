"""On-policy distillation with the trainer: a teacher of the student's shape, and advantages that are 0."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from libra_hpc.policies.learning.advantages import advantage_named
from libra_hpc.protocol.codec import pack_f32, pack_i32
from libra_hpc.protocol.trainer import Sample, TrainStep
from libra_hpc.trainer.saved import checkpoint
from libra_hpc.weights.names import ReplicaPlace

from .batches import VOCAB
from .settings import algorithm, optimizer
from .support import build, make_model

pytestmark = [pytest.mark.engine, pytest.mark.nightly]
LENGTH, PROMPTS, GROUP = 12, 8, 8


def counting(folder: Path, steps: int) -> Any:
    """A model that has learned for so many steps to count."""
    model = make_model("qwen2", folder)
    adam = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for _ in range(steps):
        tokens = (torch.randint(0, VOCAB, (32, 1)) + torch.arange(LENGTH + 1)) % VOCAB
        adam.zero_grad()
        model(tokens, labels=tokens).loss.backward()
        adam.step()
    model.save_pretrained(folder)
    return model


@torch.no_grad()
def sampled(model: Any, dice: torch.Generator) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, their log-probabilities, and rewards: 1 where all of them are right."""
    tokens, logprobs = torch.randint(0, VOCAB, (PROMPTS, 1), generator=dice).repeat_interleave(GROUP, 0), []
    for _ in range(LENGTH):
        found = torch.log_softmax(model(tokens).logits[:, -1], -1)
        new = torch.multinomial(found.exp(), 1, generator=dice)
        logprobs.append(found.gather(1, new))
        tokens = torch.cat([tokens, new], 1)
    right = (tokens[:, 1:] == (tokens[:, :-1] + 1) % VOCAB).all(1)
    return tokens, torch.cat(logprobs, 1), right.float()


@pytest.mark.parametrize("seed", range(4))
def test_a_student_reaches_its_teacher_without_a_reward(tmp_path: Path, world: ReplicaPlace, seed: int) -> None:
    torch.manual_seed(seed)
    teacher, student = counting(tmp_path / "teacher", 300), counting(tmp_path / "student", 30)
    settings = algorithm(kl="k1", kl_in="reward", reference=str(tmp_path / "teacher"), reference_kl_coef=1.0)
    engine, trainer = build(tmp_path / "student", world, optimizer=optimizer(lr=1e-2), settings=settings)
    dice, rewards = torch.Generator().manual_seed(seed), list[float]()
    for step in range(1, 61):
        tokens, logprobs, right = sampled(student, dice)
        rewards.append(float(right.mean()))
        values = advantage_named("none")(right.tolist(), [[0.0]] * len(right))
        mask, samples = bytes([0] + [1] * LENGTH), []
        for own, value in enumerate(values):
            behaviour = pack_f32([0.0, *logprobs[own].tolist()])
            samples.append(Sample(f"0.{own}.0", pack_i32(tokens[own].tolist()), mask, behaviour, value))
        trainer.step(TrainStep(step, 0, (tuple(samples),), (logprobs.numel(),)))
        checkpoint.write_policy(engine, tmp_path / "student", tmp_path / "now")
        student.load_state_dict(load_file(tmp_path / "now" / "model.safetensors"), strict=False)
    goal = float(torch.cat([sampled(teacher, dice)[2] for _ in range(9)]).mean())
    assert rewards[0] < 0.2 < 0.8 < goal
    assert sum(rewards[-10:]) >= 10 * 0.7 * goal
