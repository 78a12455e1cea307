"""Streamed training: the parts of a batch that can be trained before the others are complete. Pure.

A *portion* is the groups of a batch whose prompts are in one range of the data order, all ranges of one length.

- All prompts of a range have ended or were trained before -> its groups are a portion.
- The step begins -> the batch before decides the length (`range_length`); the step keeps it, also when it is redone.
- Portions have other completion times -> each is packed and spread alone, whichever comes first. Only the order of
  their sum follows the first completion; a redone step has the same order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from libra_hpc.protocol.agents import Batch, Group
from libra_hpc.protocol.trainer import Sample
from libra_hpc.trainer.shards import tokens_of

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
