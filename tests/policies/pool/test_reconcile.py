"""Layouts on a bad network: nodes that miss, repeat and reorder them come to the newest, and do no order twice."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from libra_hpc.policies.pool import states
from libra_hpc.policies.pool.reconcile import Action, Reset, StandbyEngines, StartEngines, StopTrainers, reconcile
from libra_hpc.policies.pool.states import EnginesAre, MoveOrdered, NodeState, RankBack, RankLost, TurnsDrained, advance
from libra_hpc.protocol.layout import Layout, LayoutChange, Row
from libra_hpc.protocol.layout_changes import NOTHING, LayoutHistory, taken

from .layout_orders import layout_of

KINDS = ((1, "train"), (2, "train"), (3, "rollout"), (4, "hybrid"), (5, "hybrid"))
TRAIN_LEADER, ROLLOUT_LEADER, CORE = 1, 3, (1, 2)
PAIR = {4: (4, 5), 5: (4, 5)}
UNITS = st.sampled_from([{}, PAIR])
"""Hybrid nodes that move alone, or together."""
SHARING = st.sampled_from([dict.fromkeys(CORE, CORE), dict.fromkeys(CORE, CORE) | PAIR])


BEAT = "beat"


class Node:
    """An agent: its processes, and the rows that it has seen."""

    def __init__(self, rank: int) -> None:
        self.rank, self.observed = rank, Row()
        self.life = 0
        self.awake: set[str] = set()
        self.trainers = -1
        """World of its trainers; -1: there are none."""
        self.starting = False
        """Whether these wait for those of the other nodes of their world."""
        self.began: list[tuple[int, int]] = []
        """Starts, by life and number."""

    def see(self, layout: Layout) -> list[Any]:
        """Take a newer Layout; returns the reports of what was done."""
        row = layout.rows[self.rank]
        self.observed, actions = reconcile(row, self.observed, self.trainers >= 0)
        return [report for action in actions for report in self.do(action, row)]

    def do(self, action: Action, row: Row) -> list[Any]:
        match action:
            case Reset():
                self.life, self.awake, self.trainers = row.life, set(), -1
                return [BEAT]
            case StopTrainers():
                self.awake.discard("train")
                self.trainers = -1
            case StandbyEngines(kind=kind):
                self.awake.discard(kind)
            case StartEngines(kind=kind, world=world):
                assert not self.awake - {kind}, "two kinds of engines would have the node's devices at once"
                assert (row.life, row.starts) not in self.began, "a start is carried out once"
                self.began.append((row.life, row.starts))
                assert kind != "train" or self.trainers in (-1, world), "trainers of two worlds"
                self.awake.add(kind)
                if kind == "train" and self.trainers < 0:
                    self.trainers, self.starting = world, True
                    return []
                return [EnginesAre(self.rank, kind, "ready", world)]
        return []


class Run:
    """Rank 0, its nodes, and a network that loses, delays, doubles and reorders Layouts, and delays reports."""

    def __init__(self, units: dict[int, tuple[int, ...]], role: str, core_rolls_out: bool = False) -> None:
        unit: Callable[[int], tuple[int, ...]] = lambda rank: units.get(rank, (rank,))  # noqa: E731
        self.pool = states.start(KINDS, role, unit, core_rolls_out=core_rolls_out)  # type: ignore[arg-type]
        self.nodes = {rank: Node(rank) for rank, _ in KINDS}
        self.published, self.frames = LayoutHistory(), list[tuple[int, LayoutChange]]()
        self.known = dict.fromkeys((0, *self.nodes), NOTHING)
        self.reports: dict[int, list[Any]] = {rank: [] for rank, _ in KINDS}
        self.members: dict[int, int] = {}
        """The generation that each node trains in, if it does."""
        self.publish()

    @property
    def layout(self) -> Layout:
        return self.published.layout

    def publish(self) -> None:
        before = self.layout.number
        self.published.put(layout_of(self.pool))
        self.frames += [(rank, self.published.since(before)) for rank in self.known]

    def echo(self, rank: int) -> None:
        """Its heartbeat has a number, which rank 0 answers."""
        self.frames.append((rank, self.published.since(self.known[rank].number)))

    def apply(self, event: Any) -> None:
        with contextlib.suppress(states.IllegalTransition):
            self.pool = advance(self.pool, event)
        self.publish()

    def deliver(self, index: int, twice: bool = False) -> None:
        rank, change = self.frames[index] if twice else self.frames.pop(index)
        was, layout = self.known[rank], taken(self.known[rank], change)
        self.known[rank] = layout
        assert layout.number >= was.number, "no sum is wrong"
        if layout.number == was.number:
            return
        if rank == 0:
            self.lead(layout, was)
        else:
            self.reports[rank] += self.nodes[rank].see(layout)
            unit = [self.nodes[other] for other in self.pool.nodes[rank].unit]
            if len({node.trainers for node in unit}) == 1 and unit[0].trainers >= 0:
                for node in unit:
                    if node.starting:
                        self.reports[node.rank].append(EnginesAre(node.rank, "train", "ready", node.trainers))
                    node.starting = False

    def lead(self, layout: Layout, was: Layout) -> None:
        """The leaders have their share of the rows: drains, the generation, whose members are all awake or late, and
        the core's rest."""
        for rank, row in layout.rows.items():
            known = was.rows.get(rank, Row())
            if row.drain and (row.drain, row.starts) != (known.drain, known.starts):
                self.reports[ROLLOUT_LEADER].append(TurnsDrained(rank))
        if layout.generation > was.generation:
            for rank in layout.members:
                self.members[rank] = layout.generation
                self.reports[TRAIN_LEADER] += [states.StateArrived(rank), states.MemberOf(rank, layout.generation)]
        if layout.rest and not was.rest:
            self.reports[TRAIN_LEADER] += [EnginesAre(rank, "train", "standby") for rank in CORE]

    def report(self, rank: int) -> None:
        event, node = self.reports[rank].pop(0), self.pool.nodes[rank]
        if node.state is not NodeState.LOST:
            if event != BEAT:
                self.apply(event)
        elif event == BEAT and self.nodes[rank].life == node.life:
            self.apply(RankBack(rank))

    def crash(self, rank: int, kind: str) -> None:
        """An engine ends; what it reported may still be on its way."""
        node = self.nodes[rank]
        if kind == "train" and node.trainers >= 0:
            self.reports[rank].append(EnginesAre(rank, "train", "lost", node.trainers))
            node.trainers = -1
            node.awake.discard("train")
        elif kind == "rollout" and "rollout" in node.awake:
            self.reports[rank].append(EnginesAre(rank, "rollout", "lost"))
            node.awake.discard("rollout")

    def settle(self) -> None:
        """The network is whole again: rank 0 answers every heartbeat, and everything is delivered."""
        for _ in range(60):
            self.frames = []
            for rank in self.known:
                self.echo(rank)
            while self.frames:
                self.deliver(0)
            if not any(self.reports.values()):
                assert all(layout == self.layout for layout in self.known.values())
                return
            for rank, waiting in self.reports.items():
                for _ in range(len(waiting)):
                    self.report(rank)
        raise AssertionError("it comes to no rest")


def disturb(run: Run, data: st.DataObject, *movable: int) -> None:
    kinds = ["frame", "frame", "double", "drop", "echo", "report", "report", "move", "crash", "lose"]
    match data.draw(st.sampled_from(kinds)):
        case "echo":
            run.echo(data.draw(st.integers(0, 5)))
        case "frame" if run.frames:
            run.deliver(data.draw(st.integers(0, len(run.frames) - 1)))
        case "double" if run.frames:
            run.deliver(data.draw(st.integers(0, len(run.frames) - 1)), twice=True)
        case "drop" if run.frames:
            run.frames.pop(data.draw(st.integers(0, len(run.frames) - 1)))
        case "report" if ranks := [rank for rank, waiting in run.reports.items() if waiting]:
            run.report(data.draw(st.sampled_from(ranks)))
        case "move":
            rank, kind = data.draw(st.sampled_from(movable)), data.draw(st.sampled_from(["train", "rollout"]))
            run.apply(MoveOrdered(rank, kind))  # type: ignore[arg-type]
        case "crash":
            run.crash(data.draw(st.integers(1, 5)), data.draw(st.sampled_from(["train", "rollout"])))
        case "lose":
            rank = data.draw(st.integers(4, 5))
            # Its stream breaks: what it reported is gone, and it may live on.
            run.reports[rank] = [BEAT]
            run.apply(RankLost(rank))


def disturbed(run: Run, data: st.DataObject, *movable: int) -> Run:
    """A run that has come to rest after moves, crashes, losses and a bad network."""
    for _ in range(data.draw(st.integers(0, 60))):
        disturb(run, data, *movable)
        for node in run.nodes.values():
            assert len(node.awake) <= 1, "it trains and rolls out at once"
    run.settle()
    return run


def assert_at_work(run: Run) -> None:
    """Every node has made its row true, and works in its role; whoever trains is a member."""
    for rank, node in run.nodes.items():
        row = run.layout.rows[rank]
        assert (node.observed.starts, node.observed.life) == (row.starts, row.life)
        assert node.awake == {row.active}
    for known in run.pool.nodes.values():
        assert known.state is (NodeState.TRAIN if known.role == "train" else NodeState.ROLLOUT)
    training = {rank for rank, row in run.layout.rows.items() if row.active == "train"}
    assert training == set(run.layout.members) == set(states.trainers(run.pool))
    assert run.pool.forming is None


@settings(max_examples=120, deadline=None)
@given(st.data(), UNITS, st.sampled_from(["train", "rollout"]), st.booleans())
def test_whatever_the_network_does_every_node_comes_to_the_newest_layout(
    data: st.DataObject, units: dict[int, tuple[int, ...]], role: str, works: bool
) -> None:
    run = Run(units, role)
    if works:
        run.settle()
    assert_at_work(disturbed(run, data, 4, 5))


@settings(max_examples=120, deadline=None)
@given(st.data(), SHARING)
def test_whatever_happens_a_core_that_is_wanted_trains_and_all_others_work(
    data: st.DataObject, units: dict[int, tuple[int, ...]]
) -> None:
    run = disturbed(Run(units, "rollout", core_rolls_out=True), data, 1, 4, 5)
    if run.pool.nodes[1].state is NodeState.ROLLOUT:
        run.apply(MoveOrdered(1, "train", abort=True))
        run.settle()
    assert run.pool.nodes[1].state is NodeState.TRAIN
    assert_at_work(run)


def test_a_row_that_holds_asks_for_nothing_and_one_that_was_missed_is_out_of_date() -> None:
    row = Row("rollout", "rollout", starts=1)
    done, actions = reconcile(row, Row(), trainers=False)
    assert actions == (StartEngines("rollout"),)
    assert reconcile(row, done, trainers=False) == (done, ())
    # To training and back, of which the node saw nothing: its engines, which are awake, report again.
    later, actions = reconcile(Row("to_rollout", "rollout", starts=3), done, trainers=False)
    assert actions == (StartEngines("rollout"),)
    trains, actions = reconcile(Row("to_train", "train", starts=4, world=2), later, trainers=True)
    assert actions == (StopTrainers(), StandbyEngines("rollout"), StartEngines("train", 2))
    lost = reconcile(Row("lost", None, starts=4, world=2, life=1), trains, trainers=True)
    assert lost == (Row(life=1), (Reset(),))
    again = Row("starting", "train", starts=5, world=2, life=1)
    back, actions = reconcile(again, lost[0], trainers=False)
    assert actions == (StartEngines("train", 2),)
    assert back == again
