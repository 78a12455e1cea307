"""A training step as its members see it: each world gets its share of the batch, and all answer or the step failed.

Where a step can be streamed (`RunConfig.streamed`), a *portion* goes to the members as soon as it is complete, one at a
time; the step has the others. It is the groups of a batch whose prompts are in one range of the data order, all ranges
of one length. Members that join have none of them, and get all in the same order.

- All prompts of a range have ended or were trained before -> its groups are a portion.
- The step begins -> the batch before decides the length (`range_length`); the step keeps it, also when it is redone.
- Portions have other completion times -> each is packed and spread alone, whichever comes first. Only the order of
  their sum follows the first completion; a redone step has the same order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path

from libra_hpc.config.node_groups import core_world, elastic_world, replicas
from libra_hpc.config.run import RunConfig
from libra_hpc.protocol.agents import Batch, Group, GroupDone, MeshMessage, ToReplica
from libra_hpc.protocol.trainer import PortionDone, Sample, StepDone, TrainPortion, TrainStep
from libra_hpc.state.state_folders import DataOrder
from libra_hpc.trainer.settings import sample_work
from libra_hpc.trainer.shards import Shards, shard, tokens_of

from .generations import Generations

PACKS = 2
"""Full packs of a data-parallel rank in a portion, for each of its pipeline stages, which idle with few.

Half: ranks differ by up to a whole pack. Double: rollout waits twice as long for the last portion.
"""


def range_length(before: Batch | None, stages: int, micro_tokens: int, counts: Callable[[Sample], bool]) -> int:
    """Prompts of a range, for portions like those of the batch ``before``; 0: a step is not cut.

    ``stages``: of the pipelines of all ranks; ``counts``: whether a sample is trained.
    """
    if before is None:
        return 0
    sizes = [tokens_of(sample) for group in before.groups for sample in group.samples if counts(sample)]
    prompts = len(before.groups) + len(before.given_up)
    if not sizes:
        return 0
    needed = PACKS * stages * max(1.0, micro_tokens * len(sizes) / sum(sizes))
    length = math.ceil(needed * prompts / len(sizes))
    return length if 2 * length <= prompts else 0


class PortionRanges:
    """The ranges of one step."""

    def __init__(self, first: int, length: int) -> None:
        """``first``: the lowest prompt that is not trained; ``length`` as of `range_length`."""
        self._first, self._length = first, length
        self.order: list[int] = []
        """Ranges whose portions were trained ahead of the batch, in the order of their sum."""

    def next(self, trained: int, ended: Mapping[int, Group], before: Callable[[int], bool]) -> list[Group]:
        """The portion to train after ``trained`` others, empty: none is complete.

        ``ended``: groups of the step by prompt, without samples where it was given up; ``before``: whether a prompt was
        trained in an earlier step.
        """
        if trained < len(self.order):
            return self._groups(self.order[trained], ended)
        numbers = {self._number(index) for index in ended} if self._length else set()
        for number in sorted(numbers - {*self.order}):
            if groups := self._groups(number, ended):
                begin = self._first + number * self._length
                if all(index in ended or before(index) for index in range(begin, begin + self._length)):
                    self.order.append(number)
                    return groups
        return []

    def portions(self, groups: Sequence[Group]) -> list[list[Group]]:
        """Return the portions of a complete batch in the order of their sum; one where it is not cut."""
        if not self._length:
            return [list(groups)]
        found = {group.index: group for group in groups}
        numbers = dict.fromkeys([*self.order, *sorted(self._number(index) for index in found)])
        return [portion for number in numbers if (portion := self._groups(number, found))]

    def _number(self, index: int) -> int:
        return (index - self._first) // self._length

    def _groups(self, number: int, groups: Mapping[int, Group]) -> list[Group]:
        """Groups of a range that have samples, in data order."""
        return [groups[i] for i in sorted(groups) if self._number(i) == number and groups[i].samples]


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
        step: int,
        order: DataOrder,
        rendezvous: Path,
    ) -> None:
        super().__init__(rendezvous, core, config.components.hybrid.nodes_per_replica, send, clock)
        self._config, self._algorithm = config, config.algorithm
        self.step, self.order = step, order
        """Committed steps, and the prompts trained with them."""
        self._state_step = step
        self._batches: dict[int, Batch] = {}
        self._ended: dict[int, Group] = {}
        """Groups of the next step that came ahead of the batch, by prompt."""
        self._cuts: dict[int, PortionRanges] = {}
        self._ahead: list[list[int]] = []
        """Prompts of each portion that the members have or were sent."""
        self._unanswered: set[int] = set()
        """Members that have not answered the last portion."""
        kl = self._algorithm.kl_coef + self._algorithm.reference_kl_coef
        # With a KL term, samples without advantage have a gradient too.
        self._skip = self._algorithm.skip_zero_advantage and kl == 0.0
        self._core_dp, self._elastic_dp = core_world(config).dp, elastic_world(config).dp
        self._work = sample_work(config)
        self._skipped_in_row = 0
        self._minibatches = 0
        """Minibatches of the last step that had loss tokens."""

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
        ahead = len(self._ahead)
        portions = self._cut(batch.step).portions(batch.groups) if self._config.streamed else [batch.groups]
        if [[group.index for group in portion] for portion in portions[:ahead]] != self._ahead:
            ahead = 0
        found = [self._shard(portion) for portion in portions]
        shards = [sum((own[i] for own, _ in found[ahead:]), ()) or ((),) for i in range(self.replicas)]
        # Portions are of one minibatch, which is divided by what all of them have.
        total = tuple(map(sum, zip(*(divisors for _, divisors in found), strict=True)))
        divisors = (*[None] * (len(portions) - ahead - 1), *total)
        self._minibatches = sum(map(bool, divisors))
        self._clear_replies()
        members = self.members
        for world, own in self._of_worlds(shards):
            for rank in world:
                self._send(rank, ToReplica(TrainStep(batch.step, self.generation, own, divisors, ahead)))
        await self._until(
            lambda: bool(self._failed) or all(isinstance(self._replies.get(rank), StepDone) for rank in members)
        )
        self._broken = bool(self._failed)
        if not self._failed:
            self._failing_since = None
            self._ahead = []
        return not self._failed

    def _shard(self, groups: Sequence[Group]) -> tuple[Shards, tuple[int, ...]]:
        algorithm, longest = self._algorithm, self._config.rollout.max_model_len
        minibatches, aggregate = algorithm.minibatches, algorithm.aggregate
        return shard(groups, self.replicas, minibatches, self._skip, self._work, aggregate, longest)

    def _of_worlds(self, shards: Shards) -> Iterator[tuple[tuple[int, ...], tuple[tuple[Sample, ...], ...]]]:
        """The nodes of each world, and its minibatches; it spreads them over its data-parallel ranks itself."""
        first, last = 0, self._core_dp
        for world in self._worlds(self.members):
            yield world, tuple(tuple(chain.from_iterable(parts)) for parts in zip(*shards[first:last], strict=True))
            first, last = last, last + self._elastic_dp

    # --- portions

    def on_group(self, message: GroupDone) -> None:
        """A group is complete, or its prompt was given up."""
        if self._config.streamed and message.step == self.step + 1:
            self._ended[message.group.index] = message.group
            self._stream()

    def _stream(self) -> None:
        """Send the next portion that is complete, unless the members have something to do."""
        step = self.step + 1
        behind = self._broken or self._joining or self._unanswered or self._state_step != self.step
        if behind or step in self._batches or not self._ended:
            return
        portion = self._cut(step).next(len(self._ahead), self._ended, self.order.has)
        if not portion:
            return
        self._unanswered = set(self.members)
        number = len(self._ahead)
        self._ahead.append([group.index for group in portion])
        for world, (own,) in self._of_worlds(self._shard(portion)[0]):
            for rank in world:
                self._send(rank, ToReplica(TrainPortion(step, self.generation, number, own)))

    def _cut(self, step: int) -> PortionRanges:
        if step not in self._cuts:
            before, train = self._batches.get(step - 1), self._config.train
            length = range_length(
                before,
                self.replicas * train.pp,
                train.micro_tokens,
                lambda sample: sample.advantage != 0.0 or not self._skip,
            )
            self._cuts[step] = PortionRanges(self.order.low, length)
        return self._cuts[step]

    def _on_portion(self, rank: int, message: PortionDone) -> None:
        if message.generation != self.generation or self._joining:
            return
        self._unanswered.discard(rank)
        if message.error:
            self._failed = self._failed or f"replica {rank}: {message.error}"
            self._broken = True
        self._stream()

    def _note_skipped(self, step: int, done: StepDone) -> None:
        skipped, minibatches = int(done.numbers["skipped"]), self._minibatches
        self._skipped_in_row = self._skipped_in_row + 1 if skipped and skipped == minibatches else 0
        if skipped:
            reason = f"the gradient or the loss of {skipped} of {minibatches} minibatches was not finite"
            self._log("update_skipped", step=step, reason=reason)
