"""Prompts in, global batches out: the data order under the staleness gate.

It decides which prompt may start and which finished groups form the next batch; running the trajectories in between is
the leader's business.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from libra_hpc.sched.staleness import StalenessGate

from .group_state import GroupState
from .trajectory import Trajectory


class PromptOrder:
    """The data order of a run from (step, low, extra) on: indices below ``low`` and those in ``extra`` are trained or
    given up already.

    ``steps`` is the length of the whole run.  A prompt whose samples all fail is given up and the next one takes its
    place, so that every step has its batch; the last prompt of the run is therefore not known before.  Times are
    seconds of any monotonic clock.  ``kept``: trajectories of untrained prompts from before this start
    (`libra_hpc.rollout.recovered`).  They are admitted in their prompt's place, so that the order of the data stays
    what it was, and only the rest of the group is run.
    """

    def __init__(
        self,
        gate: StalenessGate,
        step: int,
        low: int,
        extra: tuple[int, ...],
        steps: int,
        group_size: int,
        kept: Mapping[int, Sequence[Trajectory]],
        log: Callable[..., None],
    ) -> None:
        self.gate = gate
        self._kept, self._log = dict(kept), log
        self._next_index, self._trained, self._group_size = low, set(extra), group_size
        self._total = steps * gate.size
        self._left = (steps - step) * gate.size
        """Groups still to be admitted."""
        self._given_up: list[int] = []
        self._next_step = step + 1
        self.groups: dict[int, GroupState] = {}
        """Admitted and not yet reported as trained, by prompt index."""
        self._blocked_since: float | None = None
        self._blocked_s = 0.0
        self._looked_at: float | None = None

    def admit(self, now: float, most: int | None = None) -> list[GroupState]:
        """Groups that start now, at most ``most``; one of which everything is kept is finished with that."""
        started: list[GroupState] = []
        while self.gate.capacity > 0 and self._left > 0 and (most is None or len(started) < most):
            index = self._next_index
            self._next_index += 1
            if index not in self._trained:
                self._left -= 1
                started.append(self._start(index))
        blocked = self.gate.blocked and self._left > 0
        if blocked and self._blocked_since is None:
            self._blocked_since = now
        elif not blocked and self._blocked_since is not None:
            self._blocked_s += now - self._blocked_since
            self._blocked_since = None
        return started

    def _start(self, index: int) -> GroupState:
        kept = self._kept.pop(index, ())
        version = min((trajectory.first_version for trajectory in kept), default=self.gate.version)
        if kept and not self.gate.fits(version):
            # It had to wait for ``max_open``, or the bound is another one now.
            self._log("experience_refused", index=index, trajectories=len(kept))
            kept, version = (), self.gate.version
        self.gate.admit(str(index), version)
        group = self.groups[index] = GroupState(index, self._group_size, kept)
        if not group.missing:
            self.gate.finish(str(index))
        return group

    def progress(self, index: int) -> float:
        """Where a prompt stands in the run, 0..1; the same for all its samples."""
        return min(1.0, index / max(1, self._total))

    def close(self, index: int, failed: bool = False) -> bool:
        """One trajectory of a group ended, finished or ``failed`` for good; False when the whole group is given up
        with it."""
        group = self.groups[index]
        group.open -= 1
        group.failed += failed
        if group.open == 0 and not group.done:
            self.gate.withdraw(str(index))
            del self.groups[index]
            self._left += 1
            self._given_up.append(index)
            return False
        if group.open == 0:
            self.gate.finish(str(index))
        return True

    def take_given_up(self) -> tuple[int, ...]:
        """Prompts given up since the last call, in their order."""
        given_up, self._given_up = tuple(sorted(self._given_up)), []
        return given_up

    def next_batch(self) -> tuple[int, list[GroupState]] | None:
        """The step and groups of the next batch, once, when the gate allows it; it may run ahead of the trainer by what
        eta admits.

        Every group has a finished trajectory.
        """
        names = self.gate.batch()
        if not names:
            return None
        self.gate.consume(names)
        step = self._next_step
        self._next_step += 1
        return step, [self.groups[int(name)] for name in names]

    def trained(self, indices: tuple[int, ...]) -> None:
        """Forget groups that are trained."""
        for index in indices:
            self.groups.pop(index, None)

    def applied(self, version: int) -> None:
        """Every engine samples under ``version`` now, which gives new credit.

        Admission counts this version, not the trainer's: only then the staleness bound holds for the first token.
        """
        while self.gate.version < version:
            self.gate.publish(self.gate.version + 1)

    def blocked_share(self, now: float) -> float:
        """Share of the time since the last call in which the gate alone kept the next prompt out."""
        blocked = self._blocked_s + (now - self._blocked_since if self._blocked_since is not None else 0.0)
        self._blocked_s = 0.0
        if self._blocked_since is not None:
            self._blocked_since = now
        since, self._looked_at = self._looked_at, now
        return min(1.0, blocked / (now - since)) if since is not None and now > since else 0.0
