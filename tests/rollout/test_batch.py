"""A batch's columns of `metrics.jsonl`."""

from __future__ import annotations

import asyncio
from pathlib import Path

from libra_hpc.config.run import RunConfig
from libra_hpc.protocol.codec import pack_i32
from libra_hpc.protocol.mesh import StepReport, TrainingFinished
from libra_hpc.protocol.metrics import COLUMNS
from libra_hpc.rollout.group_state import GroupState, batch_stats
from libra_hpc.rollout.trajectory import Trajectory
from libra_hpc.telemetry.rundir import read_lines
from tests.runtime.test_coordinator import Scene
from tests.train.test_leader import World, batch, play, until


def finished(index: int, sample: int, info: dict[str, float]) -> Trajectory:
    trajectory = Trajectory(index, sample, 0)
    trajectory.add_environment(pack_i32([1, 2]))
    trajectory.place, trajectory.info, trajectory.first_version = "done", info, 0
    return trajectory


def test_a_number_that_one_trajectory_lacks_counts_as_zero_there() -> None:
    group = GroupState(
        0, 4, [finished(0, 0, {"solved": 1.0}), *(finished(0, sample, {"truncated": 1.0}) for sample in (1, 2, 3))]
    )
    stats = batch_stats([group], 0)
    assert stats.extra == {"solved": 0.25, "truncated": 0.75}


def test_a_number_of_the_task_never_overwrites_a_column() -> None:
    info = dict.fromkeys(COLUMNS, 7.0)
    stats = batch_stats([GroupState(0, 2, [finished(0, sample, info) for sample in (0, 1)])], 0)
    assert (stats.reward, stats.trajectories) == (0.0, 2)
    assert stats.extra == {f"task_{name}": 7.0 for name in COLUMNS}


def test_a_line_has_every_column(tmp_path: Path) -> None:
    """The rollout leader's, the train leader's and the coordinator's, as they write them."""
    world = World(steps=1, checkpoint_every=0)
    world.add(1)

    async def script() -> None:
        world.leader.on_generation(1, (1,))
        world.leader.on_batch(batch(1))
        await until(lambda: world.of(TrainingFinished))

    play(world, script)
    (report,) = world.of(StepReport)
    scene = Scene(tmp_path, config=RunConfig())
    scene.hello()
    scene.deliver((1, report), (1, TrainingFinished(1)))
    asyncio.run(asyncio.wait_for(scene.coordinator.run(), 30))
    (line,) = read_lines(scene.run.metrics)
    assert set(line) == COLUMNS
    assert report.metrics.columns().items() <= line.items()
