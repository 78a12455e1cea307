"""A training step as its members see it: each world gets its share of the batch, and all answer or the step failed."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from pathlib import Path

from libra_hpc.config.run import RunConfig
from libra_hpc.config.train_world import core_world, elastic_world, replicas
from libra_hpc.protocol.agents import Batch, MeshMessage, ToReplica
from libra_hpc.protocol.trainer import StepDone, TrainStep
from libra_hpc.trainer.settings import attention_work
from libra_hpc.trainer.shards import shard

from .generations import Generations

SKIPPED_STEPS = 3
"""Steps in a row without any finite gradient that end the run: one is an accident of a batch, three are the policy.

Half: two bad batches end a run. Double: more batches are wasted.
"""


class StepRequests(Generations):
    """Base of the train leader: one step at a time on the present members."""

    def __init__(
        self,
        config: RunConfig,
        core: tuple[int, ...],
        send: Callable[[int, MeshMessage], None],
        clock: Callable[[], float],
        *,
        rendezvous: Path,
    ) -> None:
        super().__init__(rendezvous, core, config.components.hybrid.nodes_per_replica, send, clock)
        self._config, self._algorithm = config, config.algorithm
        self._core_dp, self._elastic_dp = core_world(config).dp, elastic_world(config).dp
        self._attention = attention_work(config)
        self._skipped_in_row = 0
        self._minibatches = 0
        """Of the last step, those with loss tokens."""

    @property
    def replicas(self) -> int:
        """Data-parallel replicas of the generation, in all its worlds."""
        return replicas(self._config, len(self.members))

    @property
    def hopeless(self) -> str:
        """Why more steps are of no use; empty: they are."""
        few = self._skipped_in_row < SKIPPED_STEPS
        return "" if few else f"gradients were not finite in {self._skipped_in_row} steps in a row"

    async def _ask(self, batch: Batch) -> bool:
        """Run one step on every member; False on failure, the membership is then due."""
        algorithm = self._algorithm
        # With a KL term, samples without advantage have a gradient too.
        skip = algorithm.skip_zero_advantage and algorithm.kl_coef == algorithm.reference_kl_coef == 0.0
        shards, divisors = shard(
            batch.groups,
            self.replicas,
            algorithm.minibatches,
            skip,
            self._attention,
            algorithm.aggregate,
            self._config.rollout.max_model_len,
        )
        self._minibatches = sum(map(bool, divisors))
        self._clear_replies()
        members = self.members
        # Each world spreads its samples over its data-parallel ranks itself.
        first, last = 0, self._core_dp
        for world in self._worlds(members):
            own = tuple(tuple(chain.from_iterable(parts)) for parts in zip(*shards[first:last], strict=True))
            for rank in world:
                self._send(rank, ToReplica(TrainStep(batch.step, self.generation, own, divisors)))
            first, last = last, last + self._elastic_dp
        await self._until(
            lambda: bool(self._failed) or all(isinstance(self._replies.get(rank), StepDone) for rank in members)
        )
        self._broken = bool(self._failed)
        if not self._failed:
            self._failing_since = None
        return not self._failed

    def _note_skipped(self, step: int, done: StepDone) -> None:
        minibatches = self._minibatches
        self._skipped_in_row = self._skipped_in_row + 1 if done.skipped and done.skipped == minibatches else 0
        if done.skipped:
            reason = f"the gradient or the loss of {done.skipped} of {minibatches} minibatches was not finite"
            self._log("update_skipped", step=step, reason=reason)
