"""Engines and trainers of a node take turns with its devices: one kind waits until the other has freed its memory."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from tests.agent.train_scene import Scene
from tests.stage.waiting import until


@pytest.mark.parametrize("end", [signal.SIGCONT, signal.SIGKILL])
async def test_nothing_starts_until_the_others_have_freed_their_memory_or_are_dead(
    tmp_path: Path, end: signal.Signals
) -> None:
    trains, other = Scene(tmp_path / "a", rank=2), Scene(tmp_path / "b", rank=2)
    other.node.beside = trains.node
    async with trains:
        pid = await trains.ready()
        await asyncio.wait_for(other.node.room(), 30.0)
        os.kill(pid, signal.SIGSTOP)
        trains.node.standby()
        start = asyncio.create_task(other.node.start())
        await asyncio.sleep(0.2)
        assert not start.done()
        os.kill(pid, end)
        await asyncio.wait_for(start, 30.0)
        await until(lambda: other.states("ready"))
        await other.node.stop()


async def test_a_start_that_waits_is_given_up_when_the_node_is_reset(tmp_path: Path) -> None:
    trains, other = Scene(tmp_path / "a", rank=2), Scene(tmp_path / "b", rank=2)
    other.node.beside = trains.node
    async with trains:
        pid = await trains.ready()
        os.kill(pid, signal.SIGSTOP)
        trains.node.standby()
        start = asyncio.create_task(other.node.start())
        await asyncio.sleep(0.1)
        await other.node.reset()
        os.kill(pid, signal.SIGCONT)
        await asyncio.wait_for(start, 30.0)
        assert not other.node.pids
