"""The clock of a step, and invalid answers of a task: each fails its episode alone, with a sentence."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from libra_hpc.host import answers
from libra_hpc.host import step as steps
from libra_hpc.protocol.env import EpisodeFailed, EpisodeOpened, EpisodeStepped, OpenEpisode
from libra_hpc.tasks.base import Episode, ToolResult, Tools, Turn
from tests.host.leader import Leader, host_settings
from tests.host.user_tasks import ODD


class Quick(Episode):
    """Waits a moment."""

    async def step(self, tokens: list[int], tools: Tools) -> Turn:
        await asyncio.sleep(0.05)
        return Turn([7])


class NoTools:
    async def call(self, name: str, *args: Any) -> ToolResult:
        raise KeyError(name)

    async def python(self, code: str) -> ToolResult:
        raise KeyError("python")


def outcome(limit_s: float, stall_s: float) -> Turn | BaseException:
    """How a step ends when the loop is blocked at its beginning."""

    async def inside() -> Turn | BaseException:
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[Turn | BaseException] = loop.create_future()
        loop.call_later(0.01, time.sleep, stall_s)
        step = steps.Step(Quick(), [1], NoTools(), limit_s, ended.set_result)
        found = await ended
        step.cancel()
        return found

    return asyncio.run(inside())


def test_the_time_of_a_blocked_loop_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "STALL_S", 0.1)
    assert outcome(0.2, 0.5) == Turn([7])
    monkeypatch.setattr(steps, "STALL_S", 10.0)
    assert isinstance(outcome(0.2, 0.5), steps.StepTimeout)


TASK = f"{Path(__file__).with_name('user_tasks.py')}:Odd"

EXPECTED = {
    "nan": ("reward", "BadReward: reward is nan, not a finite number of 32 bits"),
    "infinite": ("reward", "BadReward: reward is -inf, not a finite number of 32 bits"),
    "beyond float": ("reward", "BadReward: reward is 10000000000"),
    "beyond float32": ("reward", "BadReward: reward is 1e+39, not a finite number of 32 bits"),
    "text reward": ("reward", "BadReward: reward is 'much', not a finite number"),
    "no reward": ("reward", "BadReward: reward is None, not a finite number"),
    "nan info": ("reward", "BadReward: info['speed'] is nan, not a finite number of 32 bits"),
    "no info": ("answer", "BadAnswer: info is None, not a dict of numbers"),
    "key of info": ("answer", "BadAnswer: the answer does not fit the protocol (Expected `str`, got `int`"),
    "no turn": ("answer", "BadAnswer: step returned None, not a Turn"),
    "text": ("answer", "BadAnswer: tokens is 'words', not a list of token ids"),
    "bytes": ("answer", "BadAnswer: tokens is b'abcd', not a list of token ids"),
    "fractions": ("answer", "BadAnswer: tokens = [1.5] holds something else than integers"),
    "beyond int32": ("answer", "BadAnswer: tokens = [1, 2147483648] holds something else than integers"),
    "negative": ("answer", "BadAnswer: tokens holds -1, and token ids are integers from 0"),
    "signal": ("answer", "BadAnswer: the answer does not fit the protocol (Expected `str`, got `int`"),
    "seconds": ("answer", "BadAnswer: signal.seconds is inf, not a finite number"),
    "text prompt": ("answer", "BadAnswer: prompt is 'words', not a list of token ids"),
    "empty prompt": ("answer", "BadAnswer: prompt is empty"),
    "no room": ("answer", "BadAnswer: max_tokens is 0, not an integer >= 1"),
}


def test_every_odd_answer_fails_its_episode_with_kind_and_value(keychain_folder: Path) -> None:
    assert EXPECTED.keys() == ODD.keys()
    with Leader(host_settings(task=TASK, model=str(keychain_folder))) as leader:
        for index, (name, (kind, error)) in enumerate(EXPECTED.items()):
            leader.send(OpenEpisode(name, index, 0, 0.0))
            message = leader.receive()
            if isinstance(message, EpisodeOpened):
                message = leader.step(name, [9])
            assert isinstance(message, EpisodeFailed), (name, message)
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
