"""The staleness gate: when a group of trajectories may start, and which finished groups the next step trains on.

B groups make one global batch; version v is the policy after v steps.  The *staleness* of a group is the trainer
version at its consumption minus the version a of its admission, and at most ``eta``.

- Capacity is left -> a group is admitted: ``min(max_open - open, (eta + v + 1) * B - admitted)``, as in AReaL (arXiv
  2505.24298, 5.1).  ``admitted`` is a total: v rises with each consumed batch and gives its credit back.
- `batch` with ``in_order`` -> the oldest B groups, once all are finished.
- `batch` otherwise -> the B finished groups of the oldest versions, if every group left out can still meet a + eta.
  It waits less; batches are biased to short trajectories until a deadline.
- An open group is withdrawn -> its place is free; the next group gets the newest version.
- A restart takes in groups of older versions -> `fits` decides whether their deadlines can still be met.

At most (eta + 1) * B groups are outstanding; the proofs are in tests/policies/scheduling/test_staleness.py.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class _Group:
    version: int
    finished: bool = False


class StalenessGate:
    """Admission and consumption of groups under a staleness bound.

    ``eta`` >= 0 versions; ``batch`` = B >= 1 groups; ``max_open`` >= 1 groups sampled at once; ``version`` is where a
    resumed run starts.  A call out of order raises `ValueError`, because it would break the bound silently.
    """

    def __init__(self, eta: int, batch: int, max_open: int, version: int = 0, in_order: bool = False) -> None:
        if eta < 0 or batch < 1 or max_open < 1 or version < 0:
            raise ValueError(
                f"need eta >= 0, batch >= 1, max_open >= 1, version >= 0, got {eta}, {batch}, {max_open}, {version}"
            )
        self.eta, self.size, self.max_open = eta, batch, max_open
        self._in_order = in_order
        self._version = version
        self._batches = version
        self._admitted = version * batch
        self._open = 0
        self._groups: dict[str, _Group] = {}

    @property
    def version(self) -> int:
        """Newest published weight version."""
        return self._version

    @property
    def outstanding(self) -> int:
        """Groups admitted and not consumed, at most ``(eta + 1) * B``."""
        return len(self._groups)

    @property
    def ready(self) -> int:
        """Finished groups that wait for the trainer."""
        return len(self._groups) - self._open

    @property
    def capacity(self) -> int:
        """Groups that may be admitted now."""
        credit = (self.eta + self._version + 1) * self.size - self._admitted
        return max(0, min(self.max_open - self._open, credit))

    @property
    def blocked(self) -> bool:
        """Whether the staleness bound alone, not ``max_open``, stops the next group."""
        return self._open < self.max_open and self.capacity == 0

    def fits(self, version: int) -> bool:
        """Whether a group first sampled under ``version``, and all others, can still be consumed within the bound."""
        last = version + self.eta
        if not 0 <= version <= self._version:
            return False
        if self._in_order:
            return self._batches + len(self._groups) // self.size <= last
        return self._feasible([*(group.version for group in self._groups.values()), version], self._batches)

    def admit(self, group: str, version: int | None = None) -> int:
        """Start a group, or take in one first sampled under ``version``; returns the version that counts."""
        version = self._version if version is None else version
        if group in self._groups:
            raise ValueError(f"group {group} was already admitted")
        if self.capacity == 0:
            raise ValueError(
                f"group {group}: no capacity, {self.outstanding} groups are outstanding at version {self._version}"
            )
        if version != self._version and not self.fits(version):
            raise ValueError(
                f"group {group}: of version {version}, it would be consumed more than {self.eta} versions later"
            )
        self._groups[group] = _Group(version)
        self._admitted += 1
        self._open += 1
        return version

    def finish(self, group: str) -> None:
        """All trajectories of an open group ended."""
        state = self._known(group)
        if state.finished:
            raise ValueError(f"group {group} was already finished")
        state.finished = True
        self._open -= 1

    def withdraw(self, group: str) -> None:
        """An open group will never be trained; its place becomes free."""
        if self._known(group).finished:
            raise ValueError(f"group {group} was already finished")
        del self._groups[group]
        self._open -= 1
        self._admitted -= 1

    def batch(self) -> tuple[str, ...]:
        """The B finished groups of the next step, oldest first.

        Empty while there are too few, or while a group left out would become too stale.
        """
        if self._in_order:
            oldest = list(self._groups)[: self.size]
            return (
                tuple(oldest)
                if len(oldest) == self.size and all(self._groups[name].finished for name in oldest)
                else ()
            )
        taken = [name for name, group in self._groups.items() if group.finished]
        taken.sort(key=lambda name: self._groups[name].version)
        if len(taken) < self.size:
            return ()
        chosen = taken[: self.size]
        return tuple(chosen) if self._feasible_without(set(chosen)) else ()

    def consume(self, groups: tuple[str, ...]) -> int:
        """Take the next batch, possibly before the step ahead of it is published; returns its largest staleness.

        Raises `ValueError` unless these are B finished groups within the bound.
        """
        if len(set(groups)) != self.size:
            raise ValueError(f"a batch is {self.size} different groups, got {len(set(groups))}")
        if any(not self._known(name).finished for name in groups):
            raise ValueError("a batch may only contain finished groups")
        staleness = max(self._batches - self._groups[name].version for name in groups)
        if staleness > self.eta or not self._feasible_without(set(groups)):
            raise ValueError(f"this batch breaks the staleness bound {self.eta}")
        for name in groups:
            del self._groups[name]
        self._batches += 1
        return staleness

    def publish(self, version: int) -> None:
        """The step of a consumed batch is done, and every engine has its weights."""
        if version != self._version + 1 or version > self._batches:
            raise ValueError(f"version {version} cannot follow {self._version} after {self._batches} consumed batches")
        self._version = version

    def _known(self, group: str) -> _Group:
        state = self._groups.get(group)
        if state is None:
            raise ValueError(f"group {group} is not outstanding")
        return state

    def _feasible_without(self, taken: set[str]) -> bool:
        """Whether all other groups can meet their deadlines once ``taken`` are the next batch."""
        return self._feasible(
            [group.version for name, group in self._groups.items() if name not in taken], self._batches + 1
        )

    def _feasible(self, versions: list[int], first: int) -> bool:
        """Whether groups of these versions meet their deadlines with B per step, earliest deadline first.

        ``first`` is the trainer version of the first such step.
        """
        due = [0] * (self.eta + 1)
        for version in versions:
            if version + self.eta < first:
                return False
            due[version + self.eta - first] += 1
        left = 0
        for later, count in enumerate(due):
            left += count
            if left > (later + 1) * self.size:
                return False
        return True
