"""The staleness gate under every interleaving of admission, finishing, training and failure."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from libra_hpc.rollout.staleness import StalenessGate


class GateMachine(RuleBasedStateMachine):
    """Drives the gate and keeps books of its own: admission version of every group, and the trainer's."""

    @initialize(eta=st.integers(0, 3), size=st.integers(1, 4), max_open=st.integers(1, 20), version=st.integers(0, 5), in_order=st.booleans())
    def begin(self, eta: int, size: int, max_open: int, version: int, in_order: bool) -> None:
        self.eta, self.size, self.max_open = eta, size, max_open
        self.gate = StalenessGate(eta, size, max_open, version, in_order)
        self.admitted: dict[str, int] = {}
        self.running: set[str] = set()
        self.version = self.consumed = version
        self.count = 0

    @precondition(lambda self: self.gate.capacity > 0)
    @rule()
    def admit(self) -> None:
        name = f"g{self.count}"
        self.count += 1
        assert self.gate.admit(name) == self.version
        self.admitted[name] = self.version
        self.running.add(name)
        assert len(self.running) <= self.max_open

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.running)))
        self.gate.finish(name)
        self.running.remove(name)

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
        self.consumed += 1

    @precondition(lambda self: self.version < self.consumed)
    @rule()
    def publish(self) -> None:
        self.version += 1
        self.gate.publish(self.version)

    @invariant()
    def bounded(self) -> None:
        if not hasattr(self, "gate"):
            return
        assert self.gate.outstanding == len(self.admitted) <= (self.eta + 1) * self.size
        assert self.gate.open == len(self.running)
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


@pytest.mark.parametrize("eta", [0, 1, 4])
def test_a_consumed_batch_is_credited_once(eta: int) -> None:
    """A rollout that always fills its capacity holds (eta + 1) B groups after any number of steps, where a double credit would let it grow by B a step."""
    gate, count = StalenessGate(eta, 32, max_open=10_000), 0
    for step in range(41):
        while gate.capacity:
            gate.admit(str(count))
            gate.finish(str(count))
            count += 1
        assert gate.outstanding == (eta + 1) * 32
        gate.consume(gate.batch())
        gate.publish(step + 1)


def test_eta_0_is_synchronous() -> None:
    gate = StalenessGate(0, 2, max_open=8)
    gate.admit("a")
    gate.admit("b")
    assert gate.capacity == 0
    assert gate.blocked
    gate.finish("a")
    assert gate.batch() == ()
    gate.finish("b")
    gate.consume(gate.batch())
    assert gate.capacity == 0, "nothing may be sampled under version 0 for the step that trains at version 1"
    gate.publish(1)
    assert gate.capacity == 2
    assert gate.admit("c") == 1


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
    assert gate.batch() == (), "c and d are finished, but without slow now it would be trained at version 2, two versions late"
    gate.finish("slow")
    assert set(gate.batch()) == {"slow", "c"}


def test_breaking_the_protocol_is_refused() -> None:
    gate = StalenessGate(1, 1, max_open=1)
    gate.admit("a")
    for wrong in (
        lambda: gate.admit("a"), lambda: gate.admit("b"), lambda: gate.finish("x"), lambda: gate.consume(("a",)), lambda: gate.consume(()),
        lambda: gate.publish(1), lambda: StalenessGate(-1, 1, 1), lambda: StalenessGate(0, 0, 1),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"."):
            wrong()
    assert gate.outstanding == 1
    gate.finish("a")
    with pytest.raises(ValueError, match="already finished"):
        gate.finish("a")
    gate.consume(("a",))
    gate.publish(1)
    with pytest.raises(ValueError, match="cannot follow"):
        gate.publish(2)
