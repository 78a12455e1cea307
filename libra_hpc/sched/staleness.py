"""The staleness gate: when a new group of trajectories may start, and which finished groups the next step trains on.

Names.  ``B`` groups make one global batch; *version* v is the policy after v steps, so the step that turns v into v + 1
trains *at trainer version* v. A group is *admitted* (its sampling may start) while version a is the newest published,
*finished* when all its trajectories ended, *consumed* when the trainer takes it.  It is *outstanding* between admission
and consumption, and *open* between admission and finish.  Its staleness is the trainer version at consumption minus a,
and must be at most eta.

Admission (AReaL's formula, arXiv 2505.24298, section 5.1, with each group counted once):

    capacity = min(max_open - open,  (eta + v + 1) * B - slots)

where ``slots`` counts every group ever admitted.  It is a total: consumption does *not* lower it, because the credit
for a consumed batch is already given by v, which rises by one when that batch's step is published.  (Subtracting
consumed groups from ``slots`` as well gives the same credit twice, and the number outstanding then grows by B a step
without bound.)  Version v can only be published after v * B groups were consumed, hence

    outstanding = slots - consumed <= (eta + v + 1) * B - v * B = (eta + 1) * B.

Why the bound on staleness follows: the slot taken last before admission under version a has ordinal at most (eta + a +
1) * B - 1, so if groups are consumed in the order of admission it is part of the batch of trainer version at most eta +
a.  Consuming in the order of *finishing* instead would be faster but lets a slow group be overtaken for ever.  `batch`
offers both: in data order (``in_order``) it waits for the oldest B groups; else it takes finished groups, oldest
version first, as long as every group left behind can still meet its deadline a + eta when the following steps consume B
groups each, and waits for the slow group only then.  The second waits less, at the price of batches that are biased
towards short trajectories.  With eta = 0 this is synchronous training: B groups are sampled under version v, trained at
version v, and nothing is admitted until v + 1 is published.

Batches may be taken ahead of publication: the next batch is fixed while the trainer still works on the present one, so
it never waits for a hand-over.

A group that is *withdrawn* (none of its trajectories can be trained) gives its place back: ``slots`` counts the groups
admitted and not withdrawn.  Both bounds are statements about those alone.  For the first, consumption is unchanged.
For the second, a withdrawal lowers the ordinals of the groups behind it and raises none, and the group that takes the
place is admitted under the newest version, behind everything: its ordinal is at most (eta + v + 1) * B - 1 by the same
formula.  In the other order, fewer groups are left behind, and the newcomer is one of at most (eta + v + 1 - batches) *
B outstanding ones.

A start from version s may *take in* groups that earlier ranks began to sample under versions a <= s and never trained:
`admit` with that version.  Each counts against the credit like any other, so outstanding <= (eta + 1) * B stands, and
`fits` says whether it can still be consumed by trainer version a + eta:

* in data order, behind everything outstanding: ``batches + outstanding // B <= a + eta``;
* else, when for every j the groups due by trainer version ``batches + j`` are at most (j + 1) * B, the new one among
  them.  A group admitted under the newest version v, due at eta + v, never breaks this: all outstanding groups are at
  most (eta + v + 1 - batches) * B.

Taken in by index, as they were admitted first, all of them fit and find credit at once.  Under versions <= a at most
(eta + a + 1) * B groups were ever admitted, and s * B of all groups are trained at s.  In data order those come first,
so the group's place from the beginning, which does not change, is below (eta + a + 1) * B.  In the other order the
earlier gate held the second rule from the moment at which batch s was consumed, so of the groups under versions <= a
that are untrained at s at most (a + eta + 1 - s) * B were left, and a = s makes that (eta + 1) * B for all.  A new
start gets less only when the configuration has changed in between (a smaller eta), when ``max_open`` lets a group in
late, or when it samples a prompt again that was withdrawn after s, which moves the groups behind it by one place; then
`fits` is False and the group is sampled anew.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class _Group:
    version: int
    finished: bool = False


class StalenessGate:
    """Admission and consumption of groups under a staleness bound.

    ``eta`` >= 0 versions; ``batch`` = B >= 1 groups; ``max_open`` >= 1 groups sampled at once; ``version`` is the
    version a resumed run starts from. A call that breaks the protocol (an unknown group, more admissions than the
    capacity, a version before its batch was consumed) raises `ValueError`: it would silently break the bound.
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
        self._slots = version * batch
        self._open = 0
        self._groups: dict[str, _Group] = {}

    @property
    def version(self) -> int:
        """Newest published version."""
        return self._version

    @property
    def outstanding(self) -> int:
        """Groups admitted and not consumed; never more than ``(eta + 1) * B``."""
        return len(self._groups)

    @property
    def open(self) -> int:
        """Groups still being sampled."""
        return self._open

    @property
    def ready(self) -> int:
        """Finished groups that wait for the trainer."""
        return len(self._groups) - self._open

    @property
    def capacity(self) -> int:
        """Groups that may be admitted now."""
        credit = (self.eta + self._version + 1) * self.size - self._slots
        return max(0, min(self.max_open - self._open, credit))

    @property
    def blocked(self) -> bool:
        """Whether the staleness bound alone, not ``max_open``, keeps the next group out."""
        return self._open < self.max_open and self.capacity == 0

    def fits(self, version: int) -> bool:
        """Whether a group first sampled under ``version`` can still be consumed within the bound, and so can all
        others."""
        last = version + self.eta
        if not 0 <= version <= self._version:
            return False
        if self._in_order:
            return self._batches + len(self._groups) // self.size <= last
        return self._feasible([*(group.version for group in self._groups.values()), version], self._batches)

    def admit(self, group: str, version: int | None = None) -> int:
        """Start a group, or take in one that was first sampled under ``version``; returns the version it counts as
        sampled under."""
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
        self._slots += 1
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
        """An open group will never be trained: its place is free for another one."""
        if self._known(group).finished:
            raise ValueError(f"group {group} was already finished")
        del self._groups[group]
        self._open -= 1
        self._slots -= 1

    def batch(self) -> tuple[str, ...]:
        """The B finished groups the next step is to train on, oldest first.

        Empty while there are too few, or while taking them would leave behind a group that then gets too stale.
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
        """Fix the batch of trainer version "batches consumed so far"; returns the largest staleness in it.

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
        """The step of a consumed batch is done and every engine samples under its weights."""
        if version != self._version + 1 or version > self._batches:
            raise ValueError(f"version {version} cannot follow {self._version} after {self._batches} consumed batches")
        self._version = version

    def _known(self, group: str) -> _Group:
        state = self._groups.get(group)
        if state is None:
            raise ValueError(f"group {group} is not outstanding")
        return state

    def _feasible_without(self, taken: set[str]) -> bool:
        """Whether B groups a step still meet every deadline once ``taken`` are the next batch."""
        return self._feasible(
            [group.version for name, group in self._groups.items() if name not in taken], self._batches + 1
        )

    def _feasible(self, versions: list[int], first: int) -> bool:
        """Whether groups of these versions meet their deadlines when batches of B are taken from trainer version
        ``first`` on, earliest deadline first."""
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
