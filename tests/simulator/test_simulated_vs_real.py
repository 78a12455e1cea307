"""The comparison with real engines, itself checked: a simulator calibrated on a run of known engines
predicts another run of them, and a replay is the workload."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from bench.replay import Played, Setup, TurnTimes
from bench.replay_task import Replay, ReplayedEpisode
from bench.simulated_vs_real import (
    CALIBRATIONS,
    GROUP_SIZE,
    PREDICTED,
    SCHEDULERS,
    Hops,
    Pair,
    Play,
    Simulator,
    compare,
    make_work,
    plays,
    rows,
)
from libra_hpc.engine.steplog import StepLogHeader
from libra_hpc.models.step_times.measured import StepPoint
from libra_hpc.policies.scheduling.registry import make_policy
from libra_hpc.protocol.trace import TrajectoryRecord
from libra_hpc.simulator.settings import EngineSpec, SimulationSettings
from libra_hpc.simulator.simulate import simulate
from libra_hpc.tasks.base import PolicyTurn

SEND_S, ANSWER_S, ENV_S, STEP_S = 0.003, 0.003, 0.004, 0.01
SETUP = Setup(model=Path("none"))
HEADER = StepLogHeader(tp=1, kv_tokens=65536, block_size=32, max_num_seqs=32, max_num_batched_tokens=2048)


class Known:
    """Engines whose step times the test chose; it notes every step asked for."""

    tp, kv_capacity, source = 1, HEADER.kv_tokens, "chosen"

    def __init__(self, slower: float = 1.0) -> None:
        self.points: list[StepPoint] = []
        self._slower = slower

    def step_s(self, decodes: int, kv_tokens: int, prefill: int = 0, context: int = 0) -> float:
        seconds = self._slower * (STEP_S + 2e-4 * decodes + 1e-7 * kv_tokens + 1e-4 * prefill)
        self.points.append(
            StepPoint(tp=1, decodes=decodes, kv_tokens=kv_tokens, prefill=prefill, context=context, seconds=seconds)
        )
        return seconds


def reality(work: list[TrajectoryRecord], engines: Known, open_groups: int) -> Any:
    """A run of the known engines, with the hops of a real one."""
    limits = SimulationSettings(
        max_inflight=SETUP.max_inflight,
        max_num_seqs=32,
        max_num_batched_tokens=2048,
        max_model_len=SETUP.max_model_len,
        send_s=SEND_S,
        answer_s=ANSWER_S,
        max_open_groups=open_groups,
    )
    slower = [
        msgspec.structs.replace(
            spec, turns=tuple(msgspec.structs.replace(turn, tool_s=turn.tool_s + ENV_S) for turn in spec.turns)
        )
        for spec in work
    ]
    return simulate(slower, [EngineSpec(f"r2.{n}", 1, engines) for n in range(2)], make_policy("cmlfq"), limits)


def played(engines: Known) -> Played:
    """The log of such a run; each message waits for half of a step."""
    middle = sorted(point.seconds for point in engines.points)[len(engines.points) // 2]
    turns = [TurnTimes(0.0, 0.0, SEND_S + middle / 2 + 0.5 + ANSWER_S, 0.1, 0.4, 0, "r2.0", ENV_S) for _ in range(9)]
    return Played(1.0, turns, engines.points, HEADER, {}, 0.0)


def test_calibrated_on_one_run_it_predicts_others() -> None:
    runs = []
    for load in CALIBRATIONS:
        engines = Known()
        reality(make_work(load, 0, 0.5), engines, load.open_groups)
        runs.append(played(engines))
    simulated = Simulator.of(runs, SETUP)
    assert simulated.hops.send_s + simulated.hops.answer_s == pytest.approx(SEND_S + ANSWER_S, rel=0.05)
    assert simulated.hops.env_s == pytest.approx(ENV_S)
    for load in PREDICTED:
        work = make_work(load, 1, 0.5)
        predicted, real = simulated.predict(work, "cmlfq", load.open_groups), reality(work, Known(), load.open_groups)
        assert predicted.makespan_s == pytest.approx(real.makespan_s, rel=0.03)
        assert predicted.turn_latency.p50 == pytest.approx(real.turn_latency.p50, rel=0.05)
        assert predicted.turn_latency.p95 == pytest.approx(real.turn_latency.p95, rel=0.05)


def test_hops_are_never_negative() -> None:
    step = StepPoint(tp=1, decodes=1, kv_tokens=8, seconds=5.0)
    turns = [TurnTimes(0.0, 0.0, 1.0, 0.5, 0.5, 0, "r2.0", -0.1)]
    assert Hops.of([Played(1.0, turns, [step], HEADER, {}, 0.0)]) == Hops(0.0, 0.0, 0.0)


def test_calibrating_runs_stand_between_the_others_and_span_them() -> None:
    first, second = plays(0), plays(1)
    assert [(play.load.name, play.policy) for play in second] == [
        (play.load.name, play.policy) for play in reversed(first)
    ]
    assert [play.load for play in first if play.load in PREDICTED] == [load for load in PREDICTED for _ in SCHEDULERS]
    assert [first.index(play) for play in first if play.load in CALIBRATIONS] == [0, 1 + len(SCHEDULERS)]
    assert all(max(load.open_groups for load in CALIBRATIONS) >= load.open_groups for load in PREDICTED)
    assert all(max(load.prompt for load in CALIBRATIONS) >= load.prompt for load in PREDICTED)


def test_a_run_is_predicted_from_others_alone() -> None:
    """The calibrating runs' steps last twice as long as those of the predicted run: so does the prediction, while
    its own steps give its own time."""
    done = []
    for load in (*CALIBRATIONS, PREDICTED[1]):
        engines = Known(2.0 if load in CALIBRATIONS else 1.0)
        sim = reality(make_work(load, 0, 0.5), engines, load.open_groups)
        done.append(
            (Play(load, "cmlfq", 0), msgspec.structs.replace(played(engines), makespan_s=sim.makespan_s, stats={}))
        )
    found, facts = compare(done, SETUP, 0.5)
    assert {pair.load for pair in found} == {PREDICTED[1].name}
    span = found[0]
    assert span.figure == "makespan s"
    assert span.own == pytest.approx(span.real, rel=0.05)
    assert 1.5 * span.real < span.predicted < 2.1 * span.real
    assert len(facts["loads"]) == 3


def test_work_is_even_groups_that_depend_on_the_seed() -> None:
    for load in (*CALIBRATIONS, *PREDICTED):
        work = make_work(load, 3)
        assert len(work) == load.groups * GROUP_SIZE
        assert [spec.sample for spec in work] == list(range(GROUP_SIZE)) * load.groups
        assert len({(spec.prompt_id, spec.prompt_tokens) for spec in work}) == load.groups, "siblings share the prompt"
        assert work == make_work(load, 3)
        assert work != make_work(load, 4)
        assert (
            max(spec.context + max(turn.gen_tokens for turn in spec.turns) for spec in work) <= SETUP.max_model_len
        ), "or the leader would cut it"


def test_table_and_ranking() -> None:
    found = [
        Pair(load.name, policy, "makespan s", predicted, 2.0, 1.0)
        for load in PREDICTED
        for policy, predicted in (("cmlfq", 1.0), ("least_loaded", 3.0))
        for _ in range(3)
    ]
    found.append(Pair("short", "cmlfq", "preemptions", 0.0, 0.0, 0.0))
    lines = rows(found)
    assert lines[0] == ["short  cmlfq  makespan s", 1.0, 2.0, "0.50 (0.50..0.50)", 0.5]
    assert ["short  cmlfq  preemptions", 0.0, 0.0, "1.00 (1.00..1.00)", 1.0] in lines
    assert lines[-2] == ["short  least_loaded / cmlfq", 3.0, 1.0, "3.00 (3.00..3.00)", 1.0]


def test_a_replayed_episode_is_its_specification(tmp_path: Path) -> None:
    work = make_work(PREDICTED[0], 0, 0.1)
    path = tmp_path / "work.json"
    path.write_bytes(msgspec.json.encode(work))
    task = Replay(cast(Any, None), seed=5, work=str(path), group_size=GROUP_SIZE)
    first, sibling, other = task.open(0, 0, 0.0), task.open(0, 1, 0.0), task.open(1, 0, 0.0)
    assert first.prompt == sibling.prompt != other.prompt

    async def run(episode: Any, spec: TrajectoryRecord) -> None:
        for number, turn in enumerate(spec.turns):
            answer = await episode.step(PolicyTurn([7] * turn.gen_tokens), cast(Any, None))
            last = number + 1 == len(spec.turns)
            assert answer.done is last
            if not last:
                assert len(answer.tokens) == spec.turns[number + 1].new_tokens == answer.signals[0].payload_tokens
                assert answer.signals[0].seconds == turn.tool_s

    quick = [msgspec.structs.replace(turn, tool_s=0.0) for turn in work[0].turns]
    spec = msgspec.structs.replace(work[0], turns=tuple(quick))
    asyncio.run(run(ReplayedEpisode(spec, 5), spec))
    with pytest.raises(ValueError, match="has 1 tokens"):
        asyncio.run(first.step(PolicyTurn([7] * (1 + (work[0].turns[0].gen_tokens == 1))), cast(Any, None)))
