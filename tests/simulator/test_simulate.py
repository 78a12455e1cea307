"""The whole stage against cases computed by hand, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any

import msgspec
import pytest

from bench.controlled_simulation import ControlledSimulation
from libra_hpc.errors import OperationError, UserError
from libra_hpc.models.update_time import UpdateTime
from libra_hpc.policies.scheduling.board import Board
from libra_hpc.policies.scheduling.protocol import Decision, TurnView
from libra_hpc.protocol.trace import TrajectoryRecord, TurnRecord
from libra_hpc.simulator.result import SimulationResult
from libra_hpc.simulator.settings import EngineSpec, SimulationSettings, trajectory_ids
from libra_hpc.simulator.simulate import simulate
from libra_hpc.simulator.simulated_trajectory import SimulatedTrajectory

from .toys import Linear, Spread, exchange, single, spec, turn

NOW = SimulationSettings(block_size=4, send_s=0.0, answer_s=0.0)
"""Hops that take no time."""


def with_(**changes: object) -> SimulationSettings:
    return msgspec.structs.replace(NOW, **changes)


class Always(Spread):
    """Routes every turn in the same way."""

    def __init__(self, engine: Callable[[TurnView], str]) -> None:
        super().__init__()
        self._engine = engine

    def route(self, turn: TurnView, board: Board, now: float) -> Decision:
        engine = self._engine(turn)
        return Decision(engine, 0, board.engines[engine].level if engine else 0, "always", {})


ONE = [spec("e", Linear(400))]
UPDATE = UpdateTime(diff_s=1.0, wire_s=2.0, stage_s=4.0, pause_s=0.5)
RUNS = [
    pytest.param(
        [TrajectoryRecord("p", 0, 8, (turn(3, tool_s=5.0), turn(2, new=4, tool_s=1.0), turn(1, tool=None)))],
        ONE,
        {"send_s": 0.25, "answer_s": 0.5},
        # 3 turns of (0.25 + tokens + 0.5) and two tools.
        {
            "makespan_s": 3 * 0.75 + 6 + 6,
            "completion.mean": 3 * 0.75 + 6 + 6,
            "turn_latency.p99": 3.75,
            "turns": 3,
            "generated_tokens": 6,
            "tokens_per_s": 6 / 14.25,
            "idle_share": 1.0 - 6 / 14.25,
        },
        [],
        id="tools and hops add up",
    ),
    pytest.param(
        [single(f"p{i}", 4, 10) for i in range(3)],
        ONE,
        {"max_inflight": 1},
        {"finish_s": [10.0, 20.0, 30.0], "turn_latency.p99": 30.0},
        [],
        id="a full engine lets turns wait in order",
    ),
    pytest.param(
        [single(f"p{i}", 4, 10) for i in range(5)],
        ONE,
        {"seats": 2},
        # Both seats are free again at 10 s, and at 20 s one is left over: 0, 0, 10, 10 and 20 s.
        {"finish_s": [10.0, 10.0, 20.0, 20.0, 30.0], "seat_wait_s": 8.0, "completion.p99": 30.0},
        [],
        id="trajectories wait for a seat",
    ),
    pytest.param(
        [single(f"p{i}", 4, 10 + i) for i in range(4)],
        ONE,
        {"batch_groups": 2, "eta": 0, "train_s": 5.0, "sync_s": 2.0},
        # Two groups, the longer of 11 tokens; 5 s of training; 2 s of update; then the same with 13 tokens and 5 s.
        {"finish_s": [10.0, 11.0, 30.0, 31.0], "makespan_s": 36.0},
        [
            {"step": n, "groups": 2, "tokens": tokens, "staleness": 0, "batch_at": at, "start_at": at, "end_at": at + 5}
            for n, tokens, at in ((1, 8 + 21, 11.0), (2, 8 + 25, 31.0))
        ],
        id="synchronous steps follow the gate",
    ),
    *(
        # Complete at 10, 14 and 18 s, with 14, 18 and 22 of 54 tokens; a second of training for three tokens.
        pytest.param(
            [single(f"p{i}", 4, 10 + 4 * i) for i in range(3)],
            ONE,
            {"batch_groups": 3, "eta": eta, "train_s": 18.0, "portion_groups": portion},
            {"finish_s": [10.0, 14.0, 18.0]},
            [{"end_at": pytest.approx(18.0 + left_s)}],
            id=f"portions of {portion} groups of a batch are trained once they are complete, eta {eta}",
        )
        for portion, eta, left_s in ((0, 0, 18.0), (1, 0, 10.0), (2, 0, 14.0), (3, 0, 18.0), (1, 1, 18.0))
    ),
    pytest.param(
        [single(f"p{i}", 4, 8) for i in range(6)],
        ONE,
        {"batch_groups": 1, "eta": 1, "train_s": 4.0, "sync_s": 0.5, "max_open_groups": 1},
        # A group starts the moment the one before ends; its update comes at the boundary 4 s later, costs 0.5 s and the
        # prefill is repeated by the step that gives the next token anyway.
        {"finish_s": [8.0, 16.5, 25.0, 33.5, 42.0, 50.5], "recomputed": 5},
        [{"staleness": 0}, *[{"staleness": 1}] * 5],
        id="asynchronous steps overlap within the staleness bound",
    ),
    pytest.param(
        [single(f"p{i}", 4, 8) for i in range(2)],
        ONE,
        {"batch_groups": 1, "eta": 0, "train_s": 5.0, "update": UPDATE},
        # The next group starts after 5 s of training, and 1 + 2 + 4 + 0.5 s of update.
        {"finish_s": [8.0, 28.5]},
        [{"end_at": 14.0}, {"end_at": 34.5}],
        id="new weights are written, sent and staged before engines switch",
    ),
    pytest.param(
        [single("p0", 4, 4), single("p1", 4, 1), single("p2", 4, 1)],
        [spec("a", Linear(400)), spec("b", Linear(400, base=10.0))],
        {"batch_groups": 1, "eta": 1, "train_s": 1.0, "sync_s": 0.5},
        # Version 1 is there at 5; a has it at 5.5, b at 10.5, after its step: only then p2 starts.
        {"finish_s": [4.0, 10.0, 11.5]},
        [],
        id="admission counts the version of the slowest engine",
    ),
    pytest.param(
        [single("p", 16, 2), single("p", 41, 2, sample=1)],
        ONE,
        {},
        {"cached_tokens": 16, "prefilled_tokens": 16 + 25},
        [],
        id="samples with prompts of different length share the shorter",
    ),
]


@pytest.mark.parametrize(("work", "engines", "changes", "facts", "steps"), RUNS)
def test_a_run_is_what_was_computed_by_hand(
    work: list[TrajectoryRecord],
    engines: list[EngineSpec],
    changes: dict[str, Any],
    facts: dict[str, Any],
    steps: list[dict[str, Any]],
) -> None:
    result = simulate(work, engines, Spread(), with_(**changes))
    assert {name: attrgetter(name)(result) for name in facts} == facts
    seen = [{name: getattr(step, name) for name in wanted} for step, wanted in zip(result.steps, steps, strict=False)]
    assert seen == steps
    assert msgspec.json.decode(msgspec.json.encode(result), type=SimulationResult) == result


def test_the_timeline_of_an_engine_has_its_mean_number_of_running_sequences() -> None:
    assert simulate([single("p", 4, 5)], ONE, Spread(), NOW).engines[0].segments == [(0.0, 5.0, 1.0)]


def test_moves_are_counted_and_computed_again() -> None:
    alternate = Always(lambda turn: "ab"[turn.turns % 2])
    work = [TrajectoryRecord("p", 0, 8, (turn(3), turn(2, new=4), turn(1, new=1)))]
    result = simulate(work, [spec("a", Linear(400)), spec("b", Linear(400, tp=2))], alternate, NOW)
    assert (result.moves, result.decisions) == (2, 3)
    # b computes all 15 again, 10 of which had been; a still has 8 of the 18, and 16 had been computed.
    assert (result.prefilled_tokens, result.cached_tokens) == (8 + 15 + 10, 8)
    assert result.reprefilled_by == {"move": 10 + 8}
    assert result.reprefilled_tokens == 18
    # A turn goes where it fits.
    small = [spec("small", Linear(40)), spec("large", Linear(100))]
    result = simulate([single("p", 40, 20)], small, Always(lambda turn: "small"), NOW)
    assert (result.engines[0].generated_tokens, result.makespan_s) == (20, 20.0)


def test_a_policy_sees_what_the_live_leader_shows_it() -> None:
    turns = (
        TurnRecord(0, 3, "test", "error", 2.0, exit_code=1, passed=4, failed=2),
        TurnRecord(7, 2, "edit", None, 0.0),
        TurnRecord(5, 4),
    )
    policy = Spread()
    simulate([TrajectoryRecord("p", 6, 10, turns)], [spec("e", Linear(400))], policy, NOW)
    first, second, third = policy.turns
    assert (first.trajectory, first.prompt_id, first.sample, first.task) == ("p/6", "p", 6, "simulated")
    assert (first.context_tokens, first.attained_tokens, first.turns, first.engine, first.signals) == (10, 0, 0, "", ())
    assert (second.context_tokens, second.attained_tokens, second.turns, second.engine) == (10 + 3 + 7, 3, 1, "e")
    assert second.ready_at == 3.0 + 2.0
    signal = second.signals[0]
    assert (signal.tool, signal.outcome, signal.payload_tokens, signal.seconds) == ("test", "error", 7, 2.0)
    assert (signal.exit_code, signal.passed, signal.failed) == (1, 4, 2)
    assert (third.signals[1].outcome, third.context_tokens) == ("ok", 20 + 2 + 5)
    (record,) = policy.records
    assert (record.generated_tokens, record.turns, record.at_signal, record.context_tokens) == (9, 3, (3, 5), 31)


def test_names_distinguish_repeated_samples() -> None:
    work = [single("p", 4, 1), single("q", 4, 1), single("p", 4, 1), single("p", 4, 1, sample=1)]
    assert trajectory_ids(work) == ["p/0", "q/0", "p/0#2", "p/1"]


def test_a_training_function_gets_the_tokens_of_the_batch_and_the_nodes() -> None:
    asked = []

    def training(tokens: int, nodes: int) -> float:
        asked.append((tokens, nodes))
        return 1.0

    work, settings = [single("p", 4, 3), single("q", 4, 5)], with_(batch_groups=1, eta=1, train_nodes=3)
    simulate(work, [spec("e", Linear(400))], Spread(), settings, training)
    assert asked == [(7, 3), (9, 3)]


def test_an_engine_leaves_after_its_turns_and_another_joins() -> None:
    work = [TrajectoryRecord(f"p{i}", 0, 4, (turn(10), turn(10, new=1, tool=None))) for i in range(2)]
    control = exchange("a", spec("c", Linear(400, tp=2)), delay_s=15.0)
    engines = [spec("a", Linear(400)), spec("b", Linear(400))]
    result = ControlledSimulation(
        work, engines, Spread(), with_(max_inflight=1), controller=control, controller_s=5.0
    ).run()
    # a ends its turn at 10 and leaves.  b goes on with its own until 20; the other one waits for it: c would come at
    # 25.
    assert result.finish_s == [20.0, 30.0]
    assert {engine.engine: engine.busy_s for engine in result.engines} == {"a": 10.0, "b": 30.0, "c": 0.0}


def test_a_new_sample_is_a_context_of_its_own_and_all_samples_are_trained() -> None:
    turns = (turn(20), turn(5, new=3), msgspec.structs.replace(turn(6, new=10), new_sample=True))
    spec_of = TrajectoryRecord("p", 0, 8, turns)
    assert (spec_of.context, spec_of.all_tokens) == (36, 52)
    run = SimulatedTrajectory("p/0", spec_of)
    run.answered(27, 0)
    run.answered(35, 0)
    assert (run.context, run.attained, run.high, run.engine) == (10, 25, 0, "")
    settings = with_(max_inflight=1, batch_groups=1, max_model_len=36)
    result = simulate([spec_of], [spec("a", Linear(400))], Spread(), settings)
    assert (result.generated_tokens, [step.tokens for step in result.steps]) == (31, [52])
    assert result.prefilled_tokens + result.cached_tokens == 8 + (8 + 20 + 3) + 10


def test_seeds_shuffle_the_groups_and_nothing_else() -> None:
    work = [single(f"p{i}", 4, 5 + i) for i in range(6)]
    engines = [spec("e", Linear(400))]
    runs = [simulate(work, engines, Spread(), with_(max_inflight=1, seed=seed)) for seed in (0, 1, 1, 2)]
    assert runs[1] == runs[2]
    assert len({tuple(run.finish_s) for run in runs}) == 3
    assert {run.makespan_s for run in runs} == {sum(range(5, 11))}


def test_a_policy_may_neither_wait_for_ever_nor_overfill_an_engine() -> None:
    work, engines = [single("p", 4, 5), single("q", 4, 5)], [spec("e", Linear(400)), spec("f", Linear(400))]
    with pytest.raises(OperationError, match="spread leaves 2 turns waiting"):
        simulate(work, engines, Always(lambda turn: ""), NOW)
    with pytest.raises(ValueError, match="no free slot"):
        simulate(work, engines, Always(lambda turn: "e"), with_(max_inflight=1))


@pytest.mark.parametrize(
    ("work", "changes", "message"),
    [
        ([], {}, "empty"),
        ([single("p", 390, 5)], {}, r"p/0 is 395 tokens long; .* at most 392"),
        ([single("p", 90, 15)], {"max_model_len": 100}, "105 tokens long; max_model_len .* is 100"),
        ([single("p", 0, 5)], {}, "empty prompt"),
    ],
)
def test_mistakes_are_one_sentence(work: list[TrajectoryRecord], changes: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        simulate(work, [spec("e", Linear(396))], Spread(), with_(**changes))
