"""Work for real engines, and the comparison with them: a simulator calibrated on runs of known engines predicts
another run of them, and a replay is the workload."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
from msgspec.structs import replace

from bench import live_kv
from bench.replay import GROUP_SIZE, Played, Setup, TurnTimes
from bench.replay_task import Replay, ReplayedEpisode
from bench.simulated_vs_real import (
    CALIBRATIONS,
    PREDICTED,
    SCHEDULERS,
    Play,
    Simulator,
    compare,
    make_work,
    plays,
    rows,
    slower,
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
    specs = [EngineSpec(f"r2.{n}", 1, engines) for n in range(2)]
    return simulate([slower(spec, ENV_S) for spec in work], specs, make_policy("cmlfq"), limits)


def played(engines: Known, makespan_s: float = 1.0) -> Played:
    """The log of such a run; each message waits for half of a step."""
    middle = sorted(point.seconds for point in engines.points)[len(engines.points) // 2]
    turns = [TurnTimes(0.0, 0.0, SEND_S + middle / 2 + 0.5 + ANSWER_S, 0.1, 0.4, ENV_S) for _ in range(9)]
    return Played(makespan_s, turns, engines.points, HEADER, 0.0)


def test_calibrating_runs_stand_between_the_others() -> None:
    first, second = plays(0), plays(1)
    assert [play[:2] for play in second] == [play[:2] for play in reversed(first)]
    assert [play.load for play in first if play.load in PREDICTED] == [load for load in PREDICTED for _ in SCHEDULERS]
    assert [first.index(play) for play in first if play.load in CALIBRATIONS] == [0, 1 + len(SCHEDULERS)]


def test_a_run_is_predicted_from_others_alone() -> None:
    """Of two predicted runs one has engines twice as fast as those of the calibration."""
    done = []
    for load, speed in zip((*CALIBRATIONS, *PREDICTED), (1.0, 1.0, 1.0, 0.5), strict=True):
        engines = Known(speed)
        sim = reality(make_work(load, 0, 0.5), engines, load.open_groups)
        done.append((Play(load, "cmlfq", 0), played(engines, sim.makespan_s)))
    simulator = Simulator.of([one for _, one in done[:2]], SETUP)
    assert simulator.limits.send_s + simulator.limits.answer_s == pytest.approx(SEND_S + ANSWER_S, rel=0.05)
    assert simulator.env_s == pytest.approx(ENV_S)
    found = compare(done, SETUP, 0.5)
    (same,), (fast,) = (found[f"{load.name}  cmlfq  makespan s"] for load in PREDICTED)
    assert same[0] == pytest.approx(same[1], rel=0.03)
    assert 1.5 * fast[1] < fast[0] < 2.1 * fast[1]
    assert rows({"x": [(1.0, 2.0), (3.0, 2.0)]}) == [["x", 2.0, 2.0, "1.00 (0.50..1.50)"]]


def test_work_is_even_groups_that_depend_on_the_seed_and_fit_every_engine() -> None:
    for make in (live_kv.make_work, *(lambda seed, load=load: make_work(load, seed) for load in PREDICTED)):
        work = make(3)
        assert [spec.sample for spec in work] == list(range(GROUP_SIZE)) * (len(work) // GROUP_SIZE)
        assert len({(spec.prompt_id, spec.prompt_tokens) for spec in work}) == len(work) // GROUP_SIZE
        assert work == make(3) != make(4)
        assert max(spec.context + max(turn.gen_tokens for turn in spec.turns) for spec in work) <= SETUP.max_model_len


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
            assert last or len(answer.tokens) == spec.turns[number + 1].new_tokens == answer.signals[0].payload_tokens

    spec = replace(work[0], turns=tuple(replace(turn, tool_s=0.0) for turn in work[0].turns))
    asyncio.run(run(ReplayedEpisode(spec, 5), spec))
    with pytest.raises(ValueError, match="has 1 tokens"):
        asyncio.run(first.step(PolicyTurn([7] * (1 + (work[0].turns[0].gen_tokens == 1))), cast(Any, None)))
