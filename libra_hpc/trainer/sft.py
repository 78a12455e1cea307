"""Supervised warm start: train a policy on demonstrations, in one CPU process, with the model and optimizer of RL.

- Loss: mean negative log-likelihood of a batch's masked tokens.
- Learning rate: rises linearly over `WARMUP_STEPS`, stays until half of the steps, falls linearly to 0.
- The run is bounded by steps, not seconds, so that it can be repeated exactly.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from libra_hpc.config.learn import OptimizerSection
from libra_hpc.models.architecture import read_shape
from libra_hpc.trainer.model.head import Head
from libra_hpc.trainer.model.packing import Example, Pack, example, pack
from libra_hpc.trainer.saved.checkpoint import load_policy, write_policy

from .device import choose_device, local_store
from .train_engine import LARGEST_NORM, TrainEngine, close_world, init_world

WARMUP_STEPS = 50
"""Steps of rising learning rate; of a short warm start a quarter of the steps."""
REPORT_EVERY = 100
"""Steps between two lines of progress on stderr, averaged in each."""
MICRO_TOKENS = 8192
"""Most tokens of a packed micro-batch."""
WORLD_TIMEOUT_S = 600.0
"""Required by torch, unused by a world of one process."""

Demonstration = tuple[list[int], list[int]]
"""Token ids and loss mask (1: learn this token), equally long; the first token cannot be learnt."""


def warm_start(
    model_dir: str | Path, out_dir: str | Path, batches: Iterator[Sequence[Demonstration]], steps: int, lr: float = 3e-3
) -> dict[str, float]:
    """Train the model in ``model_dir`` for ``steps`` batches; write it and its tokenizer to ``out_dir`` (may be the
    same).

    ``batches`` yields at least ``steps`` lists of demonstrations. Must be the process's only user of
    torch.distributed.

    Returns ``first_loss`` and ``last_loss`` (means over up to 100 steps, nats per token), ``steps`` and ``tokens``.
    Raises `UserError` for a model that cannot be trained; `ValueError` for a malformed demonstration, or a gradient
    that is not finite; `RuntimeError` when the batches run out.
    """
    device = choose_device("cpu", 0, threads=1)
    model_dir, out_dir = Path(model_dir), Path(out_dir)
    shape = read_shape(model_dir)
    settings = OptimizerSection(
        lr=lr,
        beta2=0.98,
        weight_decay=0.01,
        warmup_steps=min(WARMUP_STEPS, steps // 4),
        decay="linear",
        decay_steps=max(1, steps // 2 - 1),
    )
    split = init_world(device, tp=1, pp=1, rank=0, store=local_store(), timeout_s=WORLD_TIMEOUT_S)
    try:
        engine = TrainEngine(shape, device, torch.float32, split, settings=settings, updates=steps - 1)
        load_policy(engine, model_dir)
        result = _train(engine, batches, steps)
        write_policy(engine, model_dir, out_dir)
    finally:
        close_world()
    return result


def _train(engine: TrainEngine, batches: Iterator[Sequence[Demonstration]], steps: int) -> dict[str, float]:
    total = torch.zeros((), device=engine.device)

    def loss(head: Head, batch: Pack) -> torch.Tensor:
        out = -head.likelihood(batch.targets, 1.0).logprobs.sum()
        total.add_(out.detach())
        return out

    losses: list[float] = []
    tokens = 0
    for step in range(1, steps + 1):
        batch = next(batches, None)
        if batch is None:
            raise RuntimeError(f"the demonstrations ran out after {step - 1} of {steps} batches")
        packs = pack([_example(*demonstration) for demonstration in batch], MICRO_TOKENS, engine.device)
        count = sum(len(p.targets) for p in packs)
        if count == 0:
            raise ValueError(f"batch {step} has no token to learn")
        total.zero_()
        engine.forward_backward(packs, loss)
        norm = engine.norm()
        if not norm <= LARGEST_NORM:
            raise ValueError(f"batch {step} gave a gradient that is not finite")
        engine.update(1.0 / count, norm)
        losses.append(float(total) / count)
        tokens += sum(p.tokens.shape[1] for p in packs)
        if step % REPORT_EVERY == 0:
            recent = losses[-REPORT_EVERY:]
            print(f"warm start: step {step} of {steps}, loss {sum(recent) / len(recent):.3f}", file=sys.stderr)
    window = min(REPORT_EVERY, steps)
    return {
        "first_loss": sum(losses[:window]) / window,
        "last_loss": sum(losses[-window:]) / window,
        "steps": float(steps),
        "tokens": float(tokens),
    }


def _example(tokens: list[int], mask: list[int]) -> Example:
    return example(
        "demonstration",
        tokens=torch.tensor(tokens),
        mask=torch.tensor(mask, dtype=torch.bool),
        logprobs=torch.zeros(len(tokens)),
        advantage=0.0,
    )
