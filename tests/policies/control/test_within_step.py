"""Time-sharing within a step: when it pays, which nodes move, and who stays."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from libra_hpc.config.rollout import PlannerSection
from libra_hpc.policies.control.player import Player
from libra_hpc.policies.control.plays import BOTH, PlayWork, State
from libra_hpc.policies.control.within_step import TAIL, Rest, StepMoves, moves_within_step
from libra_hpc.protocol.plan import NodeFact, PlanDecision, SwitchFact, TrainStepFact, TrajectoryFact

from .plant import Known, Plant, ideal

TOKENS = 100
DIRECTIONS = ("to_train", "to_rollout")


def nodes(train: int, hybrid: str, rollout: int, count: int = 4, unit: int = 1, core: str = "") -> tuple[NodeFact, ...]:
    """``hybrid``, ``core``: roles of hybrid nodes, and of train nodes that share."""
    made = ["train"] * train + ["hybrid"] * count + ["rollout"] * rollout
    roles = {"train": core or "train", "hybrid": hybrid}
    return tuple(
        NodeFact(
            rank,
            component,
            roles.get(component, component),
            since=0.0,
            unit=rank - (rank - train) % unit if component == "hybrid" else 0 if component == "train" else rank,
            shares=component == "train" and core != "",
        )
        for rank, component in enumerate(made)
    )


class SharingRun(Plant):
    """A run with perfect scaling, none of whose stages overlap; ``train_s`` and ``rollout_s`` are those of one node."""

    def __init__(
        self, all_nodes: tuple[NodeFact, ...], train_s: float = 480.0, rollout_s: float = 480.0, eta: int = 0
    ) -> None:
        super().__init__(ideal(train_s, rollout_s), eta=eta)
        self.nodes, self.train_s, self.rollout_s = all_nodes, train_s, rollout_s
        self.switch_s: tuple[float, float] | None = None
        self.lost_s = 0.0
        """Of each batch, that nobody predicts."""
        self.ahead = 0.0
        """Share of training beside rollout, where nodes do not share."""
        self.mine = self.planner_of(10.0)

    def planner_of(self, switch_cost_s: float) -> Player:
        return self.planner(PlannerSection(switch_cost_s=switch_cost_s, min_dwell_s=0.0, time_sharing="auto"))

    def play(self, work: PlayWork, state: State) -> Known:
        train_s, rollout_s = self.train_s / state.train, self.rollout_s / state.rollout
        batch_s = rollout_s + train_s + (work.switches_s if state.in_turn else -train_s * self.ahead)
        return Known(batch_s, rollout_s / batch_s)

    def batch(self) -> None:
        sharing = sum(node.role == BOTH for node in self.nodes)
        train, rollout = (sum(n.role in (stage, BOTH) for n in self.nodes) for stage in ("train", "rollout"))
        spent, first = self.rollout_s / rollout, len(self.done)
        self.done += [
            TrajectoryFact(first + i, self.now + spent, TOKENS, TOKENS, 1, group=(first + i) // self.group)
            for i in range(64)
        ]
        if sharing and self.switch_s:
            for direction, seconds in zip(DIRECTIONS, self.switch_s, strict=True):
                self.switches += [SwitchFact(self.now + 1.0, direction, seconds)] * sharing
            spent += sum(self.switch_s)
        train_s = self.train_s / train
        self.now += spent + train_s * (1.0 - (0.0 if sharing else self.ahead)) + self.lost_s
        self.steps.append(TrainStepFact(self.now, 64 * TOKENS, train, train_s))

    def measured(self, count: int) -> PlanDecision:
        """The decision after the first batches."""
        self.decide()  # the split begins
        self.batches(count)
        return self.decide()

    def decide(self) -> PlanDecision:
        return self.mine.decide(self.snapshot(1000 - len(self.steps)), self.now)


def share(run: SharingRun, core: str = "") -> PlanDecision:
    """From the first decision, which is time-sharing, to the second; ``core`` as in `nodes`."""
    decision = run.measured(5)
    assert decision.action == "time_share"
    train = sum(node.component == "train" for node in run.nodes)
    run.nodes = nodes(train, BOTH, sum(node.component == "rollout" for node in run.nodes), core=core)
    run.decide()  # time-sharing begins
    return decision


@pytest.mark.parametrize(("train", "eta"), [(1, 0), (2, 0), (1, 1)])
def test_cheap_switches_let_all_hybrid_nodes_serve_both_stages(train: int, eta: int) -> None:
    run = SharingRun(nodes(train, "rollout", 1), eta=eta)
    decision = share(run)
    # One core node: 480 / 5 + 480 / 5 + 20 s, and 480 / 3 + 480 / 3 s with three nodes in either stage.
    shared = 480.0 / (4 + train) + 480.0 / 5 + 20.0
    assert (decision.numbers["shared_s"], decision.nodes) == (pytest.approx(shared), tuple(range(train, train + 4)))
    run.switch_s = 5.0, 5.0
    run.batches(1)
    assert run.decide().reason.startswith("hold: 1 of 2 steps")
    for _ in range(6):
        run.batches(1)
        assert run.decide().reason.startswith("hold: time-sharing")
    assert run.decide().numbers["shared_s"] == pytest.approx(shared - 10.0)


def test_what_is_trained_beside_rollout_counts_for_the_split_alone() -> None:
    run = SharingRun(nodes(2, "rollout", 1))
    run.ahead = 0.75
    # In turn 480 / 6 + 480 / 5 + 20 s; now 480 / 5 and a quarter of 480 / 2 s.
    assert run.measured(5).action != "time_share"
    run.ahead = 0.0
    run.batches(8)
    assert run.decide().action == "time_share"


def test_a_core_that_rolls_out_counts_in_both_stages_and_goes_back_to_training_at_the_end() -> None:
    run = SharingRun(nodes(1, "rollout", 1, core="train"))
    decision = share(run, core=BOTH)
    assert decision.numbers["shared_s"] == pytest.approx(480.0 / 5 + 480.0 / 6 + 20.0)
    assert decision.nodes == (1, 2, 3, 4, 0)
    run.switch_s = 120.0, 120.0
    run.batches(2)
    decision = run.decide()
    assert (decision.action, decision.nodes) == ("split", (1, 2, 0))


def test_a_core_that_rolls_out_needs_no_hybrid_nodes() -> None:
    found = SharingRun(nodes(1, "", 1, count=0, core="train")).measured(5)
    shared_s = pytest.approx(480.0 + 480.0 / 2 + 20.0)
    assert (found.action, found.nodes, found.numbers["shared_s"]) == ("time_share", (0,), shared_s)


@pytest.mark.parametrize(("assumed_s", "measured_s", "shares"), [(10.0, 90.0, False), (500.0, 5.0, True)])
def test_measured_switches_decide_and_dear_ones_keep_the_split(
    assumed_s: float, measured_s: float, shares: bool
) -> None:
    """The best split takes 320 s, time-sharing 192 s and a pair of switches."""
    run = SharingRun(nodes(1, "rollout", 1))
    run.mine = run.planner_of(assumed_s)
    run.switches = [SwitchFact(0.0, direction, measured_s) for direction in DIRECTIONS]
    actions = [run.measured(3).action for _ in range(4)]
    assert ("time_share" in actions) is shares
    assert shares or actions[0] in ("hold", "to_train"), "the best split has three nodes of each stage"


def test_dear_switches_end_it_for_good() -> None:
    run = SharingRun(nodes(1, "rollout", 1))
    share(run)
    run.switch_s = 120.0, 60.0
    run.batches(2)
    decision = run.decide()
    assert (decision.action, decision.nodes) == ("split", (1, 2)), "of three training and three rollout nodes"
    run.nodes = tuple(
        replace(n, role="train" if n.rank in (1, 2) else "rollout", since=run.now) if n.component == "hybrid" else n
        for n in run.nodes
    )
    for _ in range(6):
        run.batches(2)
        assert run.decide().action == "hold"


def test_batches_that_are_slower_than_predicted_end_it_until_the_work_changes() -> None:
    run = SharingRun(nodes(1, "rollout", 1))
    share(run)
    run.switch_s, run.lost_s = (5.0, 5.0), 200.0
    run.batches(6)
    assert run.decide().action == "split"
    run.nodes, run.lost_s = nodes(1, "rollout", 1), 0.0
    for _ in range(4):
        run.batches(3)
        assert run.decide().action != "time_share"


def test_a_split_that_is_nearly_as_good_stays() -> None:
    """Training is short: five of six nodes roll out anyway."""
    assert SharingRun(nodes(1, "rollout", 1), train_s=10.0).measured(6).action == "hold"


def test_a_lost_node_changes_the_numbers_and_not_the_mode() -> None:
    run = SharingRun(nodes(1, "rollout", 1))
    share(run)
    run.switch_s = 5.0, 5.0
    run.batches(6)
    run.nodes = tuple(NodeFact(2, "hybrid", "lost", run.now, 2) if n.rank == 2 else n for n in run.nodes)
    assert run.decide().action == "hold"
    run.batches(6)
    decision = run.decide()
    assert decision.reason.startswith("hold: time-sharing, a batch takes 250.0 s where 3 nodes")


def rest(trajectories: int, *, complete: bool = False, admitted: bool = True, engines: int = 1, **running: int) -> Rest:
    return Rest(complete, admitted, trajectories, {int(rank[1:]): n for rank, n in running.items()}, TAIL * engines)


ROLLS, PAIRS = nodes(1, "rollout", 1), nodes(1, "rollout", 1, unit=2)


@pytest.mark.parametrize(
    ("all_nodes", "found", "to_train"),
    [
        (ROLLS, rest(40), ()),
        (ROLLS, rest(24, n1=9, n2=1, n3=8, n4=6), (2, 4)),
        (ROLLS, rest(24, engines=2, n1=9, n2=1, n3=8, n4=6), (2, 4, 3)),
        # The rollout node stays.
        (ROLLS, rest(8), (1, 2, 3, 4)),
        # More groups follow.
        (ROLLS, rest(8, admitted=False), ()),
        # Nothing began.
        (ROLLS, rest(0), ()),
        (ROLLS, rest(0, complete=True), (1, 2, 3, 4)),
        # One stays for the rest of the batch, none for other batches.
        (nodes(1, "rollout", 0), rest(1), (1, 2, 3)),
        (nodes(1, "rollout", 0), rest(9, complete=True), (1, 2, 3, 4)),
        (nodes(2, "", 0, count=0, core="rollout"), rest(9), ()),
        (nodes(2, "", 0, count=0, core="rollout"), rest(9, complete=True), (0, 1)),
        # Nodes that train as one leave together.
        (PAIRS, rest(16, n1=3, n2=3), (3, 4)),
        (PAIRS, rest(32, n1=3, n2=3), ()),
        # Of six nodes one could go: the core has two, and leaves first; then the idlest.
        (nodes(2, "rollout", 1, core="rollout"), rest(48), ()),
        (nodes(2, "rollout", 1, core="rollout"), rest(40, r0=9, r1=9, r2=1), (0, 1)),
        (nodes(2, "rollout", 1, core="rollout"), rest(32, r0=9, r1=9, r2=1), (0, 1, 3)),
        (nodes(2, "rollout", 1, core="rollout"), rest(0, complete=True), (0, 1, 2, 3, 4, 5)),
    ],
)
def test_the_rest_of_a_batch_stays_on_few_nodes_and_the_others_go_the_idlest_first(
    all_nodes: tuple[NodeFact, ...], found: Rest, to_train: tuple[int, ...]
) -> None:
    assert moves_within_step(all_nodes, found, frozenset()).to_train == to_train


def test_after_the_commit_those_that_trained_go_back_and_others_stay() -> None:
    training = nodes(1, "train", 1)
    assert moves_within_step(training, rest(64), frozenset({1, 2, 3, 4})) == StepMoves(
        to_rollout=(1, 2, 3, 4), reason="the step is committed"
    )
    assert moves_within_step(training, rest(3), frozenset()).to_rollout == (), "they wait for the batch"


@pytest.mark.parametrize(
    ("hybrid", "core", "back"),
    [
        ("train", "train", (2, 3, 4, 5, 0, 1)),
        ("rollout", "train", (0, 1)),
        ("to_train", "train", ()),  # it is to join first
        ("train", "", (2, 3, 4, 5)),  # a core that does not share
    ],
)
def test_the_core_returns_once_no_other_node_is_on_its_way(hybrid: str, core: str, back: tuple[int, ...]) -> None:
    moves = moves_within_step(nodes(2, hybrid, 1, core=core), rest(64), frozenset(range(6)))
    assert moves.to_rollout == back
