"""The staleness gate under every interleaving of admission, finishing, training and failure.

What it plays is proved. B: groups per batch, v: the newest version, a: the version of a group's admission. ``admitted``
counts every group ever admitted and not withdrawn, trained ones included.

- At most (eta + 1) B groups are outstanding. Version v is published after v B groups were consumed, so outstanding =
  admitted - consumed <= (eta + v + 1) B - v B. To subtract consumed groups from ``admitted`` as well would give the
  same credit twice, and the number outstanding would grow by B a step without bound.
- Staleness is at most eta in data order. The last place taken under version a is number (eta + a + 1) B - 1 or lower,
  so it is in the batch of trainer version eta + a or earlier. In the order of finishing a slow group could be overtaken
  for ever, so `batch` checks the deadlines of all groups left out: for every j, at most (j + 1) B groups are due by
  trainer version batches + j.
- A withdrawal breaks neither bound. It lowers the places of later groups and raises none. The group that takes the free
  place is admitted under the newest version, at place (eta + v + 1) B - 1 or lower. In the other order fewer groups are
  left out, and all outstanding ones are at most (eta + v + 1 - batches) B.
- A group admitted under the newest version always fits: it is due at eta + v, and all outstanding groups are at most
  (eta + v + 1 - batches) B.
- After a restart at version s every untrained group of a version a <= s fits, taken in by index. At most (eta + a + 1)
  B groups were ever admitted under versions up to a, and s B of all are trained. In data order its place is unchanged.
  In the other order the earlier gate kept the rule when batch s was consumed, so at most (a + eta + 1 - s) B are left.
- So `fits` is False in three cases only: a smaller eta; a group let in late by ``max_open``; a prompt sampled again
  that was withdrawn after s.
"""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from libra_hpc.policies.scheduling.staleness import StalenessGate


class GateMachine(RuleBasedStateMachine):
    """Drives the gate with its own record of admission versions and of the trainer's version.

    A group is named by its place in the data order.  `restart` continues from any version that could have been saved:
    untrained groups are admitted in data order, some of them as recovered ones.
    """

    @initialize(
        eta=st.integers(0, 3),
        size=st.integers(1, 4),
        max_open=st.integers(1, 20),
        version=st.integers(0, 5),
        in_order=st.booleans(),
    )
    def begin(self, eta: int, size: int, max_open: int, version: int, in_order: bool) -> None:
        self.eta, self.size, self.max_open, self.in_order = eta, size, max_open, in_order
        self.first = version
        self.trained: list[tuple[str, ...]] = []
        self.sampled: dict[str, int] = {}
        self.given_up: list[tuple[int, str]] = []
        """(batch with which it counts as trained, group)"""
        self.again = False
        """Whether a start has sampled a prompt once more that an earlier one gave up: then not all that is there
        finds its place again."""
        self.start(version, {})

    def start(self, version: int, recovered: dict[str, int]) -> None:
        """From ``version``, with the versions under which recovered groups were first sampled."""
        self.gate = StalenessGate(
            eta=self.eta, batch=self.size, max_open=self.max_open, version=version, in_order=self.in_order
        )
        self.recovered = recovered
        self.admitted: dict[str, int] = {}
        self.running: set[str] = set()
        self.version = self.consumed = version
        self.done = {name for batch in self.trained for name in batch} | {name for _, name in self.given_up}
        self.count = 0

    @precondition(lambda self: self.gate.capacity > 0)
    @rule()
    def admit(self) -> None:
        while str(self.count) in self.done:
            self.count += 1
        name = str(self.count)
        self.count += 1
        version = self.recovered.pop(name, self.version)
        if not self.gate.fits(version):
            assert self.again or self.max_open < (self.eta + 1) * self.size, (
                "all that is recovered is taken in, unless it could not be at once"
            )
            version = self.version
        assert self.gate.admit(name, version) == version
        self.admitted[name] = self.sampled[name] = version
        self.running.add(name)
        assert len(self.running) <= self.max_open

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        self.finish_group(data.draw(st.sampled_from(sorted(self.running))))

    def finish_group(self, name: str) -> None:
        self.gate.finish(name)
        self.running.remove(name)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.running)))
        before = self.gate.capacity
        self.gate.withdraw(name)
        assert before <= self.gate.capacity <= before + 1
        self.running.remove(name)
        del self.admitted[name], self.sampled[name]
        self.given_up.append((self.consumed + 1, name))

    @precondition(lambda self: self.gate.batch())
    @rule()
    def train(self) -> None:
        groups = self.gate.batch()
        assert len(groups) == self.size
        worst = max(self.consumed - self.admitted[g] for g in groups)
        assert self.gate.consume(groups) == worst <= self.eta
        for group in groups:
            assert group not in self.running
            del self.admitted[group]
        self.trained.append(groups)
        self.consumed += 1

    @precondition(lambda self: self.version < self.consumed)
    @rule()
    def publish(self) -> None:
        self.version += 1
        self.gate.publish(self.version)

    @rule(data=st.data())
    def restart(self, data: st.DataObject) -> None:
        step = data.draw(st.integers(self.first, self.consumed), "step")
        del self.trained[step - self.first :]
        before, self.given_up = self.given_up, [entry for entry in self.given_up if entry[0] <= step]
        done = {name for batch in self.trained for name in batch}
        left = sorted(name for name, version in self.sampled.items() if name not in done and version <= step)
        assert self.again or len(left) <= (self.eta + 1) * self.size
        if self.again:
            left = [name for name in left if self.sampled[name] + self.eta >= step]
        recovered = data.draw(st.sets(st.sampled_from(left)), "recovered") if left else set()
        versions = {name: data.draw(st.integers(self.sampled[name], step), "version") for name in sorted(recovered)}
        assert all(version + self.eta >= step for version in versions.values())
        self.sampled = {name: version for name, version in self.sampled.items() if name in done or name in recovered}
        self.again = self.again or len(before) > len(self.given_up)
        self.start(step, versions)
        while self.recovered and self.gate.capacity:
            self.admit()
            if data.draw(st.booleans(), "whole"):
                self.finish_group(str(self.count - 1))

    @invariant()
    def bounded(self) -> None:
        if not hasattr(self, "gate"):
            return
        assert self.gate.outstanding == len(self.admitted) <= (self.eta + 1) * self.size
        assert self.gate.ready == len(self.admitted) - len(self.running)
        # Batches taken ahead of publication came out of the same (eta + 1) B.
        assert self.gate.outstanding <= (self.eta + 1 - (self.consumed - self.version)) * self.size
        if self.eta == 0:
            assert all(v == self.version for v in self.admitted.values())

    @invariant()
    def never_stuck(self) -> None:
        """Idle trainer, nothing running: either a batch is there or a group may start."""
        if hasattr(self, "gate") and self.version == self.consumed and not self.running:
            assert self.gate.batch() or self.gate.capacity > 0


GateMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
TestGate = GateMachine.TestCase


def test_a_slow_group_is_overtaken_until_its_last_step_and_then_waited_for() -> None:
    gate = StalenessGate(1, 2, max_open=8)
    for name in ("slow", "a", "b", "c"):
        gate.admit(name)
    for name in ("a", "b", "c"):
        gate.finish(name)
    assert gate.batch() == ("a", "b")
    gate.consume(("a", "b"))
    gate.publish(1)
    for name in ("d", "e"):
        gate.admit(name)
        gate.finish(name)
    assert gate.batch() == (), (
        "c and d are finished, but without slow now it would be trained at version 2, two versions late"
    )
    gate.finish("slow")
    assert set(gate.batch()) == {"slow", "c"}


@pytest.mark.parametrize("in_order", [False, True])
def test_what_is_taken_in_keeps_its_deadline_or_is_refused(in_order: bool) -> None:
    gate = StalenessGate(2, 1, max_open=8, version=4, in_order=in_order)
    assert gate.admit("a", 2) == 2
    assert [gate.fits(version) for version in (1, 2, 3, 4, 5)] == [False, False, True, True, False], (
        "a is what version 4 trains on"
    )
    with pytest.raises(ValueError, match="of version 2, it would be consumed more than 2 versions later"):
        gate.admit("b", 2)
    gate.admit("b", 3)
    gate.admit("c")
    assert (gate.capacity, gate.outstanding) == (0, 3)
    for name in "cba":
        assert gate.batch() == ()
        gate.finish(name)
    for name in "abc":
        assert gate.batch() == (name,)
        assert gate.consume((name,)) == 2


def test_breaking_the_protocol_is_refused() -> None:
    gate = StalenessGate(1, 1, max_open=1)
    gate.admit("a")
    for wrong in (
        lambda: gate.admit("a"),
        lambda: gate.admit("b"),
        lambda: gate.finish("x"),
        lambda: gate.consume(("a",)),
        lambda: gate.consume(()),
        lambda: gate.publish(1),
        lambda: StalenessGate(-1, 1, 1),
        lambda: StalenessGate(0, 0, 1),
    ):
        with pytest.raises(ValueError, match=r"."):
            wrong()
    assert gate.outstanding == 1
    gate.finish("a")
    for call in (gate.finish, gate.withdraw):
        with pytest.raises(ValueError, match="already finished"):
            call("a")
    gate.consume(("a",))
    gate.publish(1)
    with pytest.raises(ValueError, match="cannot follow"):
        gate.publish(2)
