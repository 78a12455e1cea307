"""One GRPO step of a world: pack, compute the proximal policy, accumulate, sum over replicas, agree, update.

- Portions of a batch come ahead of its step -> their gradients stay; sums and update are those of the step.
- The sum over replicas fails -> no process of the replica has changed anything.
- A later minibatch of a step loses a replica -> the state returns to a copy from the start of the step.
- The summed gradient or loss of a minibatch is not finite -> every replica skips its update; the step commits.
- All are skipped, or another sum is not finite -> the report lacks it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist

from libra_hpc.config.run import RunConfig
from libra_hpc.protocol.trainer import ENGINES, PortionDone, Sample, StepDone, TrainPortion, TrainStep
from libra_hpc.trainer.model.head import Head
from libra_hpc.trainer.model.mcore import parallel_state
from libra_hpc.trainer.model.moe import take_counts
from libra_hpc.trainer.model.packing import Pack, decode, pack

from .elastic import ElasticReplicas
from .grpo import grpo_terms
from .link import BatchRejected, PeerLost
from .losses import LossTokens, loss_named
from .packed_model import PackedModel
from .saved.checkpoint import ReferencePolicy
from .shards import PLAIN, SampleWork, spread
from .train_engine import LARGEST_NORM, TrainEngine


class Ahead(NamedTuple):
    """Portions whose gradients and sums are here."""

    generation: int
    step: int
    portions: int
    seconds: float = 0.0


NOTHING = Ahead(-1, -1, 0)
MEANS = (
    *("loss", "ratio_mean", "ratio_truncated", "clipped", "masked", "kl_clamped"),
    *("logprob_gap", "behaviour_kl", "reference_kl", "entropy"),
)
"""Numbers of the report by their place in the vector of sums that is reduced with the gradients: those of `Terms`, and
the entropy."""
LOSS, GAP, TOKENS, NORM = MEANS.index("loss"), MEANS.index("logprob_gap"), len(MEANS), len(MEANS) + 1
"""Places in that vector, in which the number of tokens follows.

Then, by number of the engine, the sums behind GAP, and their tokens; in a list the norm follows."""
COUNTED = 6
"""Counts of a step."""
GAPS, COUNTS = slice(NORM, NORM + ENGINES), slice(NORM + ENGINES, NORM + 2 * ENGINES)


class GrpoTrainer:
    """Runs `TrainStep` messages."""

    def __init__(
        self,
        engine: TrainEngine,
        replicas: ElasticReplicas,
        run: RunConfig,
        work: SampleWork = PLAIN,
        reference: ReferencePolicy | None = None,
    ) -> None:
        self._work, self._reference = work, reference
        self._engine, self._replicas, self._settings = engine, replicas, run.algorithm
        self._micro_tokens, self._temperature = run.train.micro_tokens, run.rollout.temperature
        self._sums = torch.zeros(COUNTS.stop, dtype=torch.float32, device=engine.device)
        self._of_step = [0] * COUNTED
        """`_counts` of the step, and agreed and replayed choices of experts, all ranks of this world together."""
        self._ahead = NOTHING
        self._counts = [0, 0, 0, 0]
        """Tokens of the packs of the present minibatch, with loss, in shared beginnings, and without the experts of the
        rollout, this rank alone."""
        self._routed = engine.shape if run.algorithm.routing == "rollout" else None
        self._loss = loss_named(run.algorithm.loss)
        self._context = parallel_state.get_context_parallel_group() if engine.split.cp > 1 else None
        engine.reduce = replicas.reduce

    def portion(self, message: TrainPortion) -> PortionDone:
        """Add the gradient of a portion of the next batch, before the others are there.

        Raises `BatchRejected` as `step`.
        """
        begin, number = time.monotonic(), message.portion
        (packs,), ahead = self._packed(message, number, (message.samples,), (None,))
        (reference,) = self._reference_logprobs([packs])
        self._add(packs, None, reference, first=number == 0, last=False)
        # Reading them waits for the device.
        self._sums.tolist()
        seconds = ahead.seconds + time.monotonic() - begin
        self._ahead = Ahead(message.generation, message.step, number + 1, seconds)
        return PortionDone(message.step, message.generation, number)

    def step(self, message: TrainStep) -> StepDone:
        """Train on one global batch and commit it.

        Raises `BatchRejected` or `PeerLost`, with the state of before and outside the generation, so that peers
        notice.
        """
        begin = time.monotonic()
        state, replicas = self._engine.state, self._replicas
        batches, ahead = self._packed(message, message.portions, message.minibatches, message.divisors)
        divisors = _totals(message)
        saved = self._copy_of_state(batches)
        replicas.waited_s = 0.0
        sums: list[tuple[list[float], int]] = []
        skipped, self._of_step = 0, [0] * COUNTED
        proximal, reference = self._proximal(batches), self._reference_logprobs(batches)
        first = ahead == NOTHING
        last = max((i for i, total in enumerate(divisors) if total), default=0)
        try:
            for i, (packs, total) in enumerate(zip(batches, divisors, strict=True)):
                if total == 0:
                    continue
                found, gradient_norm = self._accumulate(packs, proximal[i], reference[i], first=first)
                first = True
                # The sums are equal in all replicas with an optimizer, and so is this decision.
                if self._engine.elastic:
                    pass
                elif not (gradient_norm <= LARGEST_NORM and math.isfinite(found[LOSS])):
                    skipped += 1
                else:
                    norm = self._engine.update(1.0 / total, gradient_norm)
                    sums.append(([*found, norm], total))
                self._spread_weights(last=i == last)
        except PeerLost:
            # A replica without optimizer gets its weights again when it joins.
            if saved is not None and not self._engine.elastic:
                state.restore(saved)
            raise
        state.step = message.step
        tokens, loss_tokens, shared, unrouted, agreed, replayed = self._of_step
        mixture = self._routed is not None and self._routed.experts
        return StepDone(
            message.step,
            message.generation,
            numbers={
                **self._of_updates(sums, skipped),
                "skipped": skipped,
                "trained_tokens": tokens,
                "loss_tokens": loss_tokens,
                "shared_tokens": shared,
                **({"unrouted_tokens": unrouted} if mixture else {}),
                **({"router_agreement": agreed / replayed} if replayed else {}),
                "train_s": ahead.seconds + time.monotonic() - begin - replicas.waited_s,
                "reduce_s": replicas.waited_s,
            },
            engine_gaps=_engine_gaps(sums[0][0]) if sums else {},
        )

    def _of_updates(self, sums: list[tuple[list[float], int]], skipped: int) -> dict[str, float]:
        """Numbers of the updates, as far as they are finite."""
        means = _means(sums) if sums else {} if skipped else {"loss": 0.0, "grad_norm": 0.0}
        if self._reference is None:
            means.pop("reference_kl", None)
        return {name: mean for name, mean in means.items() if math.isfinite(mean)}

    def _packed(
        self,
        message: TrainPortion | TrainStep,
        portions: int,
        parts: tuple[tuple[Sample, ...], ...],
        divisors: tuple[int | None, ...],
    ) -> tuple[list[list[Pack]], Ahead]:
        """The packs of each minibatch, or of a portion, and what they add to: ``portions`` others, or nothing.

        Raises `BatchRejected` where that is not here, or outside the generation.
        """
        state, replicas = self._engine.state, self._replicas
        ahead, self._ahead = self._ahead if portions else NOTHING, NOTHING
        try:
            if replicas.generation != message.generation:
                raise BatchRejected(
                    f"this replica is in generation {replicas.generation}, the step is for {message.generation}"
                )
            if message.step != state.step + 1:
                raise BatchRejected(f"this replica is at step {state.step}, it cannot run step {message.step}")
            if portions and ahead[:3] != (message.generation, message.step, portions):
                raise BatchRejected(f"this replica does not have the {portions} portions before of step {message.step}")
            found: list[list[Pack]] = []
            begun = False
            for samples, total in zip(parts, divisors, strict=True):
                packs = self._pack(samples)
                found = [*found[:-1], [*found[-1], *packs]] if begun else [*found, packs]
                begun = total is None
            return found, ahead
        except (BatchRejected, ValueError) as error:
            replicas.leave()
            raise BatchRejected(str(error)) from error

    def _copy_of_state(self, batches: list[list[Pack]]) -> tuple[int, int, list[torch.Tensor]] | None:
        """The state before several updates; None where no replica outside this world can be lost among them."""
        return self._engine.state.capture() if len(batches) > 1 and self._replicas.shared else None

    def _spread_weights(self, last: bool) -> None:
        try:
            self._replicas.spread_weights()
        except PeerLost:
            # After the last update the step is done, without those that did not get its weights.
            if self._engine.elastic or not last:
                raise

    def _pack(self, samples: tuple[Sample, ...]) -> list[Pack]:
        place = self._engine.split
        own = spread(samples, place.dp, self._work)[place.dp_rank]
        examples = [decode(s, self._routed) for s in own]
        return pack(examples, self._micro_tokens, self._engine.device, place, shares=self._work.shares)

    def _proximal(self, batches: list[list[Pack]]) -> list[list[torch.Tensor] | None]:
        """Return log-probabilities under the weights before the step; none where the first update is the only one."""
        return self._logprobs(self._engine, batches) if len(batches) > 1 else [None]

    def _reference_logprobs(self, batches: list[list[Pack]]) -> list[list[torch.Tensor] | None]:
        if self._reference is None:
            return [None] * len(batches)
        with self._reference.model() as model:
            return self._logprobs(model, batches)

    def _logprobs(self, model: PackedModel, batches: list[list[Pack]]) -> list[list[torch.Tensor] | None]:
        """Return every pack's log-probabilities by ``model``; none before the last stage."""
        out: list[list[torch.Tensor] | None] = []
        for packs in batches:
            found: list[torch.Tensor] = []

            def keep(head: Head, batch: Pack, found: list[torch.Tensor] = found) -> torch.Tensor:
                found.append(head.likelihood(batch.targets, self._temperature).logprobs)
                return found[-1].sum()

            model.forward(packs, keep)
            out.append(found)
        return out

    def _add(
        self,
        packs: list[Pack],
        proximal: list[torch.Tensor] | None,
        reference: list[torch.Tensor] | None,
        *,
        first: bool,
        last: bool = True,
    ) -> None:
        """Add gradients and sums of a minibatch or a part of it; raises `PeerLost` with the last part."""
        if first:
            self._sums.zero_()
            self._counts = [0] * len(self._counts)
        for one in packs:
            counts = one.filled + one.shared, len(one.targets), one.shared, one.unrouted
            self._counts = [before + count for before, count in zip(self._counts, counts, strict=True)]
        old: Iterator[torch.Tensor] | None = None if proximal is None else iter(proximal)
        frozen: Iterator[torch.Tensor] | None = None if reference is None else iter(reference)
        settings = self._settings

        def loss(head: Head, batch: Pack) -> torch.Tensor:
            logprobs, entropy = head.likelihood(batch.targets, self._temperature)
            tokens = LossTokens(
                logprobs,
                logprobs.detach() if old is None else next(old).detach(),
                batch.behaviour,
                batch.advantages,
                batch.sequences,
                batch.lengths,
                batch.trajectories,
                self._context,
            )
            terms = grpo_terms(tokens, self._loss, settings, None if frozen is None else next(frozen))
            # Unlike a copy from the host, this does not wait for the device.
            count = logprobs.new_full((), len(logprobs))
            self._sums[:NORM] += torch.stack([*(term.detach().float() for term in terms), entropy, count])
            gaps = (tokens.proximal - tokens.behaviour).abs().float()
            self._sums[GAPS].index_add_(0, batch.engines, gaps)
            self._sums[COUNTS].index_add_(0, batch.engines, torch.ones_like(gaps))
            return terms.loss

        self._engine.forward_backward(packs, loss, first=first, last=last)

    def _accumulate(
        self,
        packs: list[Pack],
        proximal: list[torch.Tensor] | None,
        reference: list[torch.Tensor] | None,
        *,
        first: bool,
    ) -> tuple[list[float], float]:
        """Gradients of a minibatch, the first one with its portions; returns its sums and the norm of the gradient."""
        failure: PeerLost | None = None
        try:
            self._add(packs, proximal, reference, first=first)
            self._replicas.add(self._sums)
        except PeerLost as lost:
            failure = lost
        place = self._engine.split
        # One collective: the sums that the last stage has, choices, shares of the squared norm, processes that failed.
        total = torch.zeros(len(self._sums) + COUNTED + 2, dtype=torch.float64, device=self._engine.device)
        if place.tp_rank == 0 and place.pp_rank == place.pp - 1:
            total[: len(self._sums)] = self._sums
            total[-COUNTED - 2 : -4] = torch.tensor(self._counts)
        total[-4:-2] = take_counts(self._engine.module)
        if failure is None:
            total[-2] = self._engine.squared_norm()
        total[-1] = float(failure is not None)
        if dist.get_world_size() > 1:
            # A process that waits here for one whose exchange with a replica hangs is not to blame.
            with self._replicas.waiting():
                dist.all_reduce(total)
        *sums, squared, failed = total.tolist()
        sums, counts = sums[:-COUNTED], sums[-COUNTED:]
        self._of_step = [before + int(count) for before, count in zip(self._of_step, counts, strict=True)]
        if failed:
            self._replicas.leave()
            raise failure or PeerLost("another process of this replica lost its peers")
        return sums, math.sqrt(squared)


def _totals(message: TrainStep) -> list[int]:
    """The divisor of each minibatch."""
    return [total for total in message.divisors if total is not None]


def _engine_gaps(sums: list[float]) -> dict[int, tuple[float, int]]:
    """`StepDone.engine_gaps` of a minibatch."""
    found = enumerate(zip(sums[GAPS], sums[COUNTS], strict=True))
    return {number: (gap, int(count)) for number, (gap, count) in found if count}


def _means(sums: list[tuple[list[float], int]]) -> dict[str, float]:
    """Numbers from the sums and the divisor of each update, at least one; without a token no mean over tokens."""
    count, first, last = sum(s[TOKENS] for s, _ in sums), sums[0][0], sums[-1][0]
    means = {name: sum(s[place] for s, _ in sums) / count for place, name in enumerate(MEANS)} if count else {}
    if means:
        means["logprob_gap"] = first[GAP] / max(1.0, first[TOKENS])
    return means | {"loss": sum(s[LOSS] / total for s, total in sums) / len(sums), "grad_norm": last[-1]}
