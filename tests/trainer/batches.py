"""Random samples, and the minibatches of the fixed run that tests of trainers share."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import torch

from libra_hpc.protocol.codec import pack_f32, pack_i32, unpack_i32
from libra_hpc.protocol.trainer import Sample, TrainPortion, TrainStep
from libra_hpc.trainer.shards import divisor

VOCAB = 64


def samples(seed: int, count: int = 10) -> list[Sample]:
    """Random samples of 4 to 60 tokens; one in five has no advantage."""
    generator = torch.Generator().manual_seed(seed)
    out = []
    for i in range(count):
        n = int(torch.randint(4, 61, (1,), generator=generator))
        tokens = torch.randint(0, VOCAB, (n,), generator=generator).tolist()
        mask = [0, 0, *(torch.rand(n - 2, generator=generator) < 0.7).int().tolist()]
        mask[2] = 1
        logprobs = (-4.2 + torch.randn(n, generator=generator)) * torch.tensor(mask)
        advantage = 0.0 if i % 5 == 4 else float(torch.randn((), generator=generator))
        out.append(Sample(f"{seed}-{i}", pack_i32(tokens), bytes(mask), pack_f32(logprobs.tolist()), advantage))
    return out


def with_experts(step: TrainStep, known: float = 0.9) -> TrainStep:
    """The step with random experts, two of eight in two layers, for so many of a sample's tokens but the last."""

    def chosen(sample: Sample) -> Sample:
        count = len(sample.loss_mask)
        generator = torch.Generator().manual_seed(count)
        rows = torch.rand(count, 2, 8, generator=generator).topk(2, dim=-1).indices.to(torch.uint8)
        routed = torch.rand(count, generator=generator) < known
        routed[-1] = False
        experts = (rows * routed[:, None, None]).numpy().tobytes()
        return msgspec.structs.replace(sample, experts=experts, routed=bytes(routed.tolist()))

    return msgspec.structs.replace(step, minibatches=tuple(tuple(map(chosen, batch)) for batch in step.minibatches))


def in_threes(step: TrainStep) -> TrainStep:
    """The step with three samples of a minibatch in each trajectory, each of which weighs the same."""

    def joined(batch: tuple[Sample, ...]) -> tuple[Sample, ...]:
        counts = [loss_tokens([*batch[at - at % 3 :][:3]]) for at in range(len(batch))]
        return tuple(
            msgspec.structs.replace(
                sample, uid=f"0.{at // 3}.{at % 3}", advantage=batch[at - at % 3].advantage, trajectory_tokens=count
            )
            for at, (sample, count) in enumerate(zip(batch, counts, strict=True))
        )

    batches = tuple(map(joined, step.minibatches))
    divisors = tuple(divisor(batch, "sequence", 1) for batch in batches)
    return msgspec.structs.replace(step, minibatches=batches, divisors=divisors)


def loss_tokens(batch: list[Sample]) -> int:
    return sum(sum(s.loss_mask) for s in batch)


def loss_logprobs(model: Any, sample: Sample, temperature: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities of a sample's loss tokens: what transformers says of them, and what the sample has."""
    tokens, where = torch.tensor(unpack_i32(sample.tokens)), torch.tensor(list(sample.loss_mask)).nonzero()[:, 0]
    found = torch.log_softmax(model(tokens[None]).logits[0] / temperature, -1)[where - 1, tokens[where]]
    return found, torch.frombuffer(bytearray(sample.logprobs), dtype=torch.float32)[where]


def train_step(step: int, generation: int, *, replica: int = 0, replicas: int = 1, minibatches: int = 1) -> TrainStep:
    """Step ``step`` of the fixed run for one of ``replicas``: sample ``i`` goes to replica ``i mod replicas``."""
    batches = [samples(100 * step + i) for i in range(minibatches)]
    return TrainStep(
        step, generation, tuple(tuple(b[replica::replicas]) for b in batches), tuple(loss_tokens(b) for b in batches)
    )


def in_portions(step: TrainStep, count: int) -> tuple[list[TrainPortion], TrainStep]:
    """A step of one minibatch in ``count`` parts: messages ahead of the step, and the step with the last part."""
    (batch,) = step.minibatches
    cuts = [len(batch) * part // count for part in range(count + 1)]
    parts = [batch[begin:end] for begin, end in itertools.pairwise(cuts)]
    ahead = [TrainPortion(step.step, step.generation, number, own) for number, own in enumerate(parts[:-1])]
    return ahead, msgspec.structs.replace(step, minibatches=(parts[-1],), portions=count - 1)


def joined(ahead: list[TrainPortion], step: TrainStep) -> TrainStep:
    """The same parts in one message, as a step is done again."""
    parts = (*(portion.samples for portion in ahead), *step.minibatches)
    return TrainStep(step.step, step.generation, parts, (*[None] * len(ahead), *step.divisors))
