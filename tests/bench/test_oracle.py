"""The clairvoyant oracle: how it prices an engine's work, where trajectories start, and when they move."""

from __future__ import annotations

import random
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.policies import POLICIES
from bench.policies.oracle import Foresight, Load, Oracle, OracleWork, drain_s, foresight_of, prefill_s
from libra_hpc.policies.scheduling.board import Board
from libra_hpc.policies.scheduling.dispatch import Dispatcher
from libra_hpc.policies.scheduling.protocol import Decision
from libra_hpc.protocol.trace import TrajectoryRecord, TurnRecord
from libra_hpc.simulator.compare import compare
from libra_hpc.simulator.settings import EngineSpec, SimulationSettings
from libra_hpc.traces.generate import Dials, generate
from tests.policies.scheduling.boards import assert_nothing_is_kept, board_of, drive, random_lengths, turn_of

MIXED = (("one", 1), ("uno", 1), ("two", 2), ("four", 4))


class Linear:
    """Step times: a base, and a slope per sequence, per cached token and per prefilled token."""

    source = "made up"

    def __init__(self, tp: int, kv_capacity: int = 100_000) -> None:
        self.tp, self.kv_capacity = tp, kv_capacity
        self._base = 0.02 / float(tp**0.65)

    def step_s(self, decodes: int, kv_tokens: int, prefill: int = 0, context: int = 0) -> float:
        return self._base * (1.0 + decodes / 64 + kv_tokens / 200_000 + prefill / 250)


def load(tokens: int, name: str = "", prefill: float = 0.0, tools: float = 0.0, context: int = 0) -> Load:
    return Load(tokens, name, prefill, tools, context)


def test_an_engine_drains_in_stages() -> None:
    steps = Linear(1)
    assert drain_s([], steps, 8) == 0.0
    assert drain_s([load(100)], steps, 8) == pytest.approx(100 * steps.step_s(1, 0))
    both = 100 * steps.step_s(2, 0) + 200 * steps.step_s(1, 0)
    assert drain_s([load(100), load(300)], steps, 8) == pytest.approx(both)
    assert drain_s([load(100, prefill=3.0), load(300, tools=5.0)], steps, 8) > both + 7.0
    assert drain_s([load(100), load(100)], steps, 1) == pytest.approx(2 * 100 * steps.step_s(1, 0)), (
        "one slot: one after the other"
    )
    crowd = [load(100, context=60_000) for _ in range(2)]
    assert drain_s(crowd, steps, 8) > 100 * steps.step_s(2, 120_000), "more KV than fits: they take turns"
    assert prefill_s(steps, 0, 500) == 0.0
    assert prefill_s(steps, 10_000, 0) == pytest.approx(10_000 * 0.02 / 250)


class Future:
    """Trajectories of one turn with known lengths."""

    def __init__(self, lengths: list[int]) -> None:
        self.left = {f"t{i}": OracleWork(tokens, 100, 0, 0.0) for i, tokens in enumerate(lengths)}

    def __call__(self, trajectory: str, turns: int) -> OracleWork:
        return self.left[trajectory]


def oracle(truth: Future) -> Oracle:
    return Oracle(Foresight(truth, {tp: Linear(tp) for tp in (1, 2, 4)}, 64))


def started(truth: Future, board: Board, *prompts: str, context: int = 100) -> list[tuple[str, Decision]]:
    """Every trajectory is ready at once: what is sent, in order; ``prompts`` by turns."""
    dispatcher = Dispatcher(oracle(truth), board)
    for i, name in enumerate(truth.left):
        dispatcher.ready(turn_of(name, prompt=prompts[i % len(prompts)] if prompts else "p", context=context), 0.0)
    return [(turn.trajectory, decision) for turn, decision in dispatcher.dispatch(0.0)]


def test_the_oracle_sends_the_longest_to_the_fastest_and_first() -> None:
    sent = started(Future([100, 9_000, 5_000, 100]), board_of(("slow", 1), ("fast", 4)))
    assert [(name, d.engine) for name, d in sent] == [("t1", "fast"), ("t2", "fast"), ("t0", "slow"), ("t3", "slow")]
    priorities = [d.priority for _, d in sent]
    assert priorities == sorted(priorities)


def test_the_oracle_computes_a_long_prompt_once() -> None:
    truth = Future([100, 100, 100, 100])
    truth.left = {name: OracleWork(100, 50_000, 0, 0.0) for name in truth.left}
    sent = started(truth, board_of(("a", 1), ("b", 1)), "even", "odd", context=50_000)
    where = {name: d.engine for name, d in sent}
    assert where["t0"] == where["t2"] != where["t1"] == where["t3"]
    assert "prompt cached" in sent[-1][1].reason


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(50, 9_000), min_size=1, max_size=6))
def test_the_oracles_plan_is_near_the_best_of_all_assignments(lengths: list[int]) -> None:
    tps = {"a": 1, "b": 1, "c": 4}
    truth = Future(lengths)
    where = {name: d.engine for name, d in started(truth, board_of(*tps.items(), cap=8))}

    def makespan(assigned: tuple[str, ...]) -> float:
        ends = []
        for engine, tp in tps.items():
            steps = Linear(tp)
            mine = sorted(
                load(n, str(i), prefill_s(steps, 100, 0), 0.0, 100 + n // 2)
                for i, n in enumerate(lengths)
                if assigned[i] == engine
            )
            ends.append(drain_s(mine, steps, 8))
        return max(ends)

    best = min(makespan(assigned) for assigned in product(tps, repeat=len(lengths)))
    assert makespan(tuple(where[name] for name in truth.left)) <= 1.15 * best


def test_the_oracle_moves_when_it_pays_and_else_uses_its_prefix() -> None:
    truth = Future([4_000, 60])
    policy, board = oracle(truth), board_of(("slow", 1), cap=2)
    for i in range(2):
        assert policy.route(turn_of(f"t{i}", context=100), board, 0.0).engine == "slow"
    board.up("fast", 4, 100_000, 0)
    truth.left["t1"] = OracleWork(50, 10, 0, 0.0)
    stays = policy.route(turn_of("t1", context=5_000, at="slow", turns=1), board, 1.0)
    assert (stays.engine, stays.reason.split(",")[0]) == ("slow", "stays on slow"), (
        "the other one decides when slow ends"
    )
    truth.left["t0"] = OracleWork(3_900, 10, 0, 0.0)
    moves = policy.route(turn_of("t0", context=5_000, at="slow", turns=1), board, 1.0)
    assert moves.engine == "fast"
    assert moves.reason.startswith("moves to fast: the later of both ends falls by ")
    truth.left["t0"] = OracleWork(3_000, 10, 0, 0.0)
    assert policy.route(turn_of("t0", context=6_000, at="fast", turns=2), board, 2.0).engine == "fast"
    board.down("fast")
    assert policy.route(turn_of("t0", context=6_000, at="fast", turns=2), board, 3.0).engine == "slow"


def test_the_oracle_weighs_the_prefill_it_would_repeat() -> None:
    for context, engine in ((1_000, "fast"), (99_000, "slow")):
        truth = Future([400])
        policy, board = oracle(truth), board_of(("slow", 1))
        policy.route(turn_of("t0", context=context), board, 0.0)
        board.up("fast", 4, 200_000, 0)
        truth.left["t0"] = OracleWork(100, 10, 0, 0.0)
        assert policy.route(turn_of("t0", context=context, at="slow", turns=1), board, 1.0).engine == engine


def test_the_oracle_waits_for_a_full_engine_only_while_that_is_best() -> None:
    truth = Future([9_000, 8_000, 20])
    policy, board = oracle(truth), board_of(("slow", 1), ("fast", 4), cap=1)
    dispatcher = Dispatcher(policy, board)
    dispatcher.ready(turn_of("t0", context=100), 0.0)
    assert dispatcher.dispatch(0.0)[0][1].engine == "fast"
    truth.left["t0"] = OracleWork(100, 10, 0, 0.0)
    dispatcher.withdraw("t0")
    policy.forget("t0")
    policy.route(turn_of("t0", context=100, at="fast", turns=1), board, 1.0)
    for name in ("t1", "t2"):
        dispatcher.ready(turn_of(name, context=100), 1.0)
    sent = dispatcher.dispatch(1.0)
    assert [(turn.trajectory, d.engine) for turn, d in sent] == [("t2", "slow")], (
        "100 tokens at fast are sooner over than 8,000 at slow"
    )
    waiting = policy.route(turn_of("t1", context=100), board, 1.5)
    assert (waiting.engine, waiting.wait, waiting.reason) == ("", "slot", "wait: fast is full and still the best")
    board.answered("fast", 100)
    assert [(turn.trajectory, d.engine) for turn, d in dispatcher.dispatch(2.0)] == [("t1", "fast")]


def test_all_engines_end_at_about_the_same_time() -> None:
    rng = random.Random(3)
    truth, board = Future([rng.randint(1, 5_000) for _ in range(40)]), board_of(*MIXED, cap=40)
    ends: dict[str, list[Load]] = {name: [] for name in board.engines}
    for name, decision in started(truth, board):
        tokens = truth.left[name].decode_tokens
        ends[decision.engine].append(load(tokens, name, 0.0, 0.0, 100 + tokens // 2))
    finish = [drain_s(sorted(loads), Linear(board.engines[name].tp), 40) for name, loads in ends.items()]
    assert max(finish) < 1.3 * min(finish)


class Truth:
    """Remaining work of the trajectories of `drive`."""

    def __init__(self, lengths: dict[str, list[int]]) -> None:
        self._lengths = lengths

    def __call__(self, trajectory: str, turns: int) -> OracleWork:
        left = self._lengths[trajectory][turns:]
        return OracleWork(sum(left), 50 if turns else 500, 50 * (len(left) - 1), 1.0 * (len(left) - 1))


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 2**32))
def test_everything_is_served_and_nothing_is_kept_of_it(seed: int) -> None:
    rng = random.Random(seed)
    lengths = random_lengths(rng, groups=rng.randint(1, 12))
    policy = Oracle(Foresight(Truth(lengths), {tp: Linear(tp) for tp in (1, 2, 4)}, 64))
    assert sorted(drive(policy, board_of(*MIXED, cap=2), lengths, rng)) == sorted(lengths)
    assert_nothing_is_kept(policy)


def test_the_future_of_each_turn() -> None:
    turns = (TurnRecord(0, 100, "run", "ok", 2.0), TurnRecord(30, 50, "run", "ok", 4.0), TurnRecord(7, 20))
    engines = [EngineSpec("a", 1, Linear(1)), EngineSpec("b", 1, Linear(1)), EngineSpec("c", 4, Linear(4))]
    future = foresight_of([TrajectoryRecord("p", 0, 500, turns)], engines, SimulationSettings(max_num_seqs=8))
    name = "p/0"
    assert future.truth(name, 0) == OracleWork(170, 500, 37, 6.0)
    assert future.truth(name, 1) == OracleWork(70, 30, 7, 4.0)
    assert future.truth(name, 2) == OracleWork(20, 7, 0, 0.0)
    assert {tp: steps.tp for tp, steps in future.steps.items()} == {1: 1, 4: 4}
    assert future.max_num_seqs == 8


@pytest.mark.parametrize("preset", ["search", "math"])
def test_no_rule_ends_sooner_than_the_oracle(preset: str) -> None:
    work = generate(preset, Dials(trajectories=64, group=8, seed=3, max_context=60_000))
    engines = [
        EngineSpec(f"{tp}-{i}", tp, Linear(tp, 400_000 * tp))
        for tp, count in ((1, 4), (2, 2), (4, 1))
        for i in range(count)
    ]
    names = {file: name for name, file in POLICIES.items() if name != "cmlfq"}
    done = compare(work, engines, list(names), SimulationSettings(max_num_seqs=16, max_inflight=24))
    ends = {names[file]: one.result.makespan_s for file, one in done.items()}
    assert min(ends, key=ends.__getitem__) == "oracle", ends
