"""Prompts in, global batches out: the data order under the staleness gate.

It decides which prompt may start, and which finished groups form the next batch.
"""

from __future__ import annotations

from collections import ChainMap, deque
from collections.abc import Callable, Mapping, Sequence

from libra_hpc.policies.learning.advantages import LengthRules, Refill
from libra_hpc.policies.scheduling.staleness import StalenessGate

from .group_state import ANY_LENGTH, NO_REFILL, GroupState
from .trajectory import Trajectory


class PromptOrder:
    """The data order of a run from (step, low, extra) on.

    Indices below ``low`` and those in ``extra`` are trained or given up. ``steps``: length of the whole run.
    ``recovered``: trajectories of earlier starts, by prompt. Times: seconds of any monotonic clock.

    - Prompt whose samples all fail -> give it up; the next one takes its place, so that every step has its batch.
    - Group whose rewards are all equal -> with ``refill`` likewise; a recovered one goes again by the same rule.
    - Recovered trajectories -> admit them in their prompt's place, and run only the rest of the group.
    """

    def __init__(
        self,
        gate: StalenessGate,
        step: int,
        low: int,
        extra: tuple[int, ...],
        steps: int,
        group_size: int,
        recovered: Mapping[int, Sequence[Trajectory]],
        log: Callable[..., None],
        refill: Refill = NO_REFILL,
        rules: LengthRules = ANY_LENGTH,
        retain: int = 0,
    ) -> None:
        """``refill``: which groups others replace; ``rules``: which trajectories count for that; ``retain``: how many
        batches may be trained again."""
        self._retained: deque[dict[int, GroupState]] = deque(maxlen=retain)
        self._refill, self._rules = refill, rules
        self.gate = gate
        self._recovered, self._log = dict(recovered), log
        self._next_index, self._trained, self._group_size = low, set(extra), group_size
        self._total = steps * gate.size
        self._left = (steps - step) * gate.size
        """Groups still to admit."""
        self._given_up: list[int] = []
        self._replaced = 0
        """Groups of equal rewards that gave their places to others since the last batch."""
        self._ended: list[int] = []
        """Prompts that have ended since the last call of `take_ended`."""
        self._next_step = step + 1
        self.groups: dict[int, GroupState] = {}
        """Admitted and not yet reported as trained, by prompt index."""

    def admit(self, most: int | None = None) -> list[GroupState]:
        """Groups that start now, at most ``most``; a group recovered whole is finished at once."""
        started: list[GroupState] = []
        while self.gate.capacity > 0 and self._left > 0 and (most is None or len(started) < most):
            index = self._next_index
            self._next_index += 1
            if index not in self._trained:
                self._left -= 1
                started.append(self._start(index))
        return started

    def _start(self, index: int) -> GroupState:
        recovered = self._recovered.pop(index, ())
        version = min((trajectory.oldest for trajectory in recovered), default=self.gate.version)
        if recovered and not self.gate.fits(version):
            # It waited too long for ``max_open``, or the staleness bound has changed.
            self._log("experience_refused", index=index, trajectories=len(recovered))
            recovered, version = (), self.gate.version
        self.gate.admit(str(index), version)
        group = self.groups[index] = GroupState(index, self._group_size, recovered, version)
        if not group.missing:
            self._complete(group)
        return group

    def progress(self, index: int) -> float:
        """Position of a prompt in the run, 0..1; the same for all its samples."""
        return min(1.0, index / max(1, self._total))

    def close(self, index: int, failed: bool = False) -> bool:
        """End one trajectory of a group, finished or given up (``failed``); False when that gives up the prompt."""
        group = self.groups[index]
        group.open -= 1
        group.failed += failed
        if group.open == 0 and not group.done:
            self._give_up(index)
            return False
        if group.open == 0:
            self._complete(group)
        return True

    def _complete(self, group: GroupState) -> None:
        if self._refill.replaces(group.rewards(self._rules), self._replaced):
            self._replaced += 1
            self._give_up(group.index)
        else:
            self.gate.finish(str(group.index))
            self._ended.append(group.index)

    def _give_up(self, index: int) -> None:
        self.gate.withdraw(str(index))
        del self.groups[index]
        self._left += 1
        self._given_up.append(index)
        self._ended.append(index)

    def take_replaced(self) -> int:
        """Groups replaced since the last call, for the batch that is composed now."""
        replaced, self._replaced = self._replaced, 0
        return replaced

    def take_given_up(self) -> tuple[int, ...]:
        """Prompts given up or replaced since the last call, in their order."""
        given_up, self._given_up = tuple(sorted(self._given_up)), []
        return given_up

    def take_ended(self) -> tuple[int, list[tuple[int, GroupState | None]]]:
        """The step of the next batch, and prompts that have ended since the last call; without a group if given up."""
        ended, self._ended = self._ended, []
        return self._next_step, [(index, self.groups.get(index)) for index in ended]

    def next_batch(self) -> tuple[int, list[GroupState]] | None:
        """The step and groups of the next batch when the gate allows it, once; every group has a trajectory."""
        names = self.gate.batch()
        if not names:
            return None
        self.gate.consume(names)
        step = self._next_step
        self._next_step += 1
        return step, [self.groups[int(name)] for name in names]

    @property
    def composed(self) -> int:
        """Newest step whose batch was taken."""
        return self._next_step - 1

    def trained(self, indices: tuple[int, ...]) -> None:
        gone = (self.groups.pop(index, None) for index in indices)
        self._retained.append({group.index: group for group in gone if group is not None})

    def group(self, index: int) -> GroupState | None:
        """A group that is trained now, or perhaps again after the loss of the core."""
        return ChainMap(self.groups, *self._retained).get(index)

    def applied(self, version: int) -> None:
        """Give credit for ``version``, under which every engine samples: the staleness bound is of the first token."""
        while self.gate.version < version:
            self.gate.publish(self.gate.version + 1)
