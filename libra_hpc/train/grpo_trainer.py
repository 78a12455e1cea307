"""One GRPO step of a replica: pack, compute the proximal policy, accumulate, sum over replicas, agree, update.

- The sum over replicas fails -> no process of the replica has changed anything.
- A later minibatch of a step fails -> the state returns to a copy from the start of the step.
- The summed gradient or loss of a minibatch is not finite -> every replica skips its update; the step commits.
- Another sum is not finite -> it is reported as 0.0; the update does not depend on it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist

from libra_hpc.protocol.trainer import Sample, StepDone, TrainStep

from .grpo import grpo_terms
from .head import Head
from .packing import Pack, decode, pack
from .replicas import PeerLost, Replicas
from .settings import AlgorithmSettings
from .train_engine import TrainEngine

LOSS, RATIO, TRUNCATED, GAP, ENTROPY, TOKENS = range(6)
"""Places in the vector of sums that is reduced with the gradients."""


class BatchRejected(Exception):
    """The samples of a step cannot be trained on; the state is unchanged."""


class GrpoTrainer:
    """Runs `TrainStep` messages."""

    def __init__(self, engine: TrainEngine, replicas: Replicas, settings: AlgorithmSettings, micro_tokens: int) -> None:
        self._engine, self._replicas, self._settings, self._micro_tokens = engine, replicas, settings, micro_tokens
        self._sums = torch.zeros(6, dtype=torch.float32, device=engine.device)
        engine.reduce = self._reduce

    def step(self, message: TrainStep) -> StepDone:
        """Train on one global batch and commit it.

        Raises `BatchRejected` or `PeerLost`, with the state of before and outside the generation, so that peers
        notice.
        """
        begin = time.monotonic()
        state, replicas = self._engine.state, self._replicas
        try:
            if replicas.generation != message.generation:
                raise BatchRejected(
                    f"this replica is in generation {replicas.generation}, the step is for {message.generation}"
                )
            if message.step != state.step + 1:
                raise BatchRejected(f"this replica is at step {state.step}, it cannot run step {message.step}")
            batches = [self._pack(samples) for samples in message.minibatches]
        except (BatchRejected, ValueError) as error:
            replicas.leave()
            raise BatchRejected(str(error)) from error
        saved = state.capture() if len(batches) > 1 else None
        replicas.waited_s = 0.0
        optimizer_s = norm = 0.0
        sums: list[tuple[list[float], int]] = []
        skipped = 0
        proximal = self._proximal(batches) if len(batches) > 1 else None
        try:
            for i, (packs, total) in enumerate(zip(batches, message.total_tokens, strict=True)):
                if total == 0:
                    continue
                found = self._accumulate(packs, None if proximal is None else proximal[i])
                # The sums are equal in all replicas, and so is this decision.
                if not self._engine.agree(self._engine.finite() and math.isfinite(found[LOSS])):
                    skipped += 1
                    continue
                sums.append(([value if math.isfinite(value) else 0.0 for value in found], total))
                update_begin = time.monotonic()
                norm = self._engine.update(1.0 / total)
                optimizer_s += time.monotonic() - update_begin
        except PeerLost:
            if saved is not None:
                state.restore(saved)
            raise
        state.step = message.step
        packs = [p for batch in batches for p in batch]
        means = _means(sums)
        return StepDone(
            step=message.step,
            generation=message.generation,
            loss=means[LOSS],
            grad_norm=norm,
            ratio_mean=means[RATIO],
            ratio_truncated=means[TRUNCATED],
            logprob_gap=means[GAP],
            entropy=means[ENTROPY],
            tokens=sum(p.tokens.shape[1] for p in packs),
            loss_tokens=sum(len(p.targets) for p in packs),
            compute_s=time.monotonic() - begin - replicas.waited_s - optimizer_s,
            reduce_s=replicas.waited_s,
            optimizer_s=optimizer_s,
            skipped=skipped,
        )

    def _pack(self, samples: tuple[Sample, ...]) -> list[Pack]:
        return pack([decode(s) for s in samples], self._micro_tokens, self._engine.device)

    def _proximal(self, batches: list[list[Pack]]) -> list[list[torch.Tensor]]:
        out: list[list[torch.Tensor]] = []
        for packs in batches:
            found: list[torch.Tensor] = []

            def keep(head: Head, batch: Pack, found: list[torch.Tensor] = found) -> torch.Tensor:
                found.append(head.likelihood(batch.targets, self._settings.temperature).logprobs)
                return found[-1].sum()

            self._engine.forward(packs, keep)
            out.append(found)
        return out

    def _accumulate(self, packs: list[Pack], proximal: list[torch.Tensor] | None) -> list[float]:
        self._sums.zero_()
        old: Iterator[torch.Tensor] | None = None if proximal is None else iter(proximal)
        settings = self._settings

        def loss(head: Head, batch: Pack) -> torch.Tensor:
            logprobs, entropy = head.likelihood(batch.targets, settings.temperature)
            terms = grpo_terms(
                logprobs,
                logprobs if old is None else next(old),
                batch.behaviour,
                batch.advantages,
                clip=settings.clip,
                is_truncation=settings.is_truncation,
                kl_coef=settings.kl_coef,
            )
            count = torch.tensor(float(len(logprobs)), device=logprobs.device)
            self._sums += torch.stack(
                [terms.loss.detach(), terms.ratio, terms.truncated.float(), terms.gap, entropy, count]
            )
            return terms.loss

        failure: PeerLost | None = None
        try:
            self._engine.forward_backward(packs, loss)
        except PeerLost as lost:
            failure = lost
        if not self._engine.agree(failure is None):
            self._replicas.leave()
            raise failure or PeerLost("another process of this replica lost its peers")
        if self._engine.split.pp > 1:
            dist.broadcast(self._sums, dist.get_world_size() - 1)  # only the last stage has a loss
        return [float(x) for x in self._sums.tolist()]

    def _reduce(self, buffers: list[torch.Tensor]) -> None:
        self._replicas.sum([*buffers, self._sums])


def _means(sums: list[tuple[list[float], int]]) -> dict[int, float]:
    """Metrics by place, from the sums and global loss tokens of each update; zeros without an update."""
    count = max(1.0, sum(s[TOKENS] for s, _ in sums))
    means = {place: sum(s[place] for s, _ in sums) / count for place in (RATIO, TRUNCATED, ENTROPY)}
    means[LOSS] = sum(s[LOSS] / total for s, total in sums) / max(1, len(sums))
    first = sums[0][0] if sums else [0.0] * 6
    means[GAP] = first[GAP] / max(1.0, first[TOKENS])
    return means
