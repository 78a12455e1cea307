"""Clients that leave, wait, outlive their agent, stop the loop, or send more than a context can have."""

from __future__ import annotations

from pathlib import Path

import pytest

from libra_hpc.endpoint import agent_endpoint
from libra_hpc.endpoint.agent_clock import AgentClock
from libra_hpc.protocol.codec import unpack_i32
from libra_hpc.tasks.tokenizer import TaskTokenizer
from tests.chat.chat_folder import write_chat_folder

from .played import play
from .test_agents import task_of


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> TaskTokenizer:
    return TaskTokenizer(write_chat_folder(tmp_path_factory.mktemp("policy")))


@pytest.mark.parametrize("clients", [20, pytest.param(300, marks=pytest.mark.nightly)])
async def test_a_turn_whose_client_left_is_not_trained(
    tokenizer: TaskTokenizer, tmp_path: Path, clients: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_endpoint, "RETRY_S", 0.1)
    task = task_of(tokenizer, tmp_path, "leaving", row={"clients": clients})
    played = await play(task, lambda context: None if "left" in context else "yes")
    trajectory = played.trajectory
    assert played.end.info["agent_failed"] == 0
    assert played.end.info["unread_turns"] == len(played.turns) - 2 > 0
    (sample, last) = trajectory.samples_for_training(1.0)
    for one, content in ((sample, "read"), (last, "read, too")):
        trained = [token for token, own in zip(unpack_i32(one.tokens), one.loss_mask, strict=True) if own]
        assert trained == played.turns[0]
        assert content in tokenizer.decode(unpack_i32(one.tokens))


async def test_the_time_of_an_agent_stands_while_it_waits_for_a_turn(tokenizer: TaskTokenizer, tmp_path: Path) -> None:
    played = await play(task_of(tokenizer, tmp_path, "completions", wall_s=3.0), lambda context: "yes", delay_s=0.8)
    assert (played.end.info["turns"], played.end.info.get("limit_time")) == (4, None)


@pytest.mark.parametrize(
    ("changes", "left"),
    [
        ([(3.0, False)], 7.0),
        ([(3.0, True), (53.0, False)], 7.0),
        ([(0.0, True), (150.0, False)], -40.0),
        ([(0.0, True), (60.0, False), (61.0, True), (101.0, True)], 9.0),
        ([(1.0, True)], 109.0),
    ],
)
def test_time_stands_in_sum_at_most_ten_times_the_limit(changes: list[tuple[float, bool]], left: float) -> None:
    clock = AgentClock(10.0, 0.0)
    assert [clock.left(now, waits) for now, waits in changes][-1] == left
