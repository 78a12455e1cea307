"""The clock of a step, and invalid answers of a task: each fails its episode alone, with a sentence."""

from __future__ import annotations

import asyncio
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from libra_hpc.host import answers
from libra_hpc.host import live_episode as steps
from libra_hpc.process import progress
from libra_hpc.protocol.env import EpisodeFailed, EpisodeOpened, EpisodeStepped, OpenEpisode
from libra_hpc.tasks.base import Episode, PolicyTurn, ToolResult, Tools, Turn
from tests.host.leader import Leader, host_settings
from tests.host.user_tasks import ODD


class Quick(Episode):
    """Waits a moment."""

    async def step(self, turn: PolicyTurn, tools: Tools) -> Turn:
        await asyncio.sleep(0.05)
        return Turn([7])


class NoTools:
    async def call(self, name: str, *args: Any, **named: Any) -> ToolResult:
        raise KeyError(name)

    async def python(self, code: str) -> ToolResult:
        raise KeyError("python")


def outcome(limit_s: float, stall_s: float) -> Turn | BaseException:
    """How a step ends when the loop is blocked at its beginning."""

    async def inside() -> Turn | BaseException:
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[Turn | BaseException] = loop.create_future()
        loop.call_later(0.01, time.sleep, stall_s)
        step = steps.Step(partial(Quick().step, PolicyTurn([1])), NoTools(), limit_s, ended.set_result)
        found = await ended
        step.cancel()
        return found

    return asyncio.run(inside())


def test_the_time_of_a_blocked_loop_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "STALL_S", 0.1)
    assert outcome(0.2, 0.5) == Turn([7])
    monkeypatch.setattr(progress, "STALL_S", 10.0)
    assert isinstance(outcome(0.2, 0.5), steps.StepTimeout)


TASK = f"{Path(__file__).with_name('user_tasks.py')}:Odd"


def test_every_odd_answer_fails_its_episode_with_kind_and_value(keychain_folder: Path) -> None:
    with Leader(host_settings(task=TASK, model=str(keychain_folder))) as leader:
        for index, (kind, error, *_) in enumerate(ODD):
            name = f"e{index}"
            leader.send(OpenEpisode(name, index, 0, 0.0))
            message = leader.next()
            if isinstance(message, EpisodeOpened):
                message = leader.step(name, [9])
            assert isinstance(message, EpisodeFailed), (error, message)
            assert (message.episode, message.kind, message.error[: len(error)]) == (name, kind, error)
            assert len(message.error) <= 500
        leader.open("good", len(ODD))
        assert isinstance(leader.step("good", [9]), EpisodeStepped)


class Unprintable:
    def __repr__(self) -> str:
        raise ValueError("no words")


@pytest.mark.parametrize("value", [Unprintable(), 10**5000, [Unprintable()]], ids=["object", "number", "list"])
def test_every_value_can_be_named(value: object) -> None:
    assert 0 < len(answers.shown(value)) < 200
