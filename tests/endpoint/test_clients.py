"""Clients that leave, wait, outlive their agent, stop the loop, or send more than a context can have."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from aiohttp import ClientSession

from libra_hpc.endpoint import agent_endpoint
from libra_hpc.endpoint.agent_clock import AgentClock
from libra_hpc.endpoint.agent_endpoint import AgentEndpoint
from libra_hpc.errors import UserError
from libra_hpc.protocol.codec import unpack_i32
from libra_hpc.tasks.tokenizer import TaskTokenizer

from .played import play
from .test_agents import task_of


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


async def test_a_thread_that_outlives_its_agent_gets_no_turn(tokenizer: TaskTokenizer, tmp_path: Path) -> None:
    said, turns = tmp_path / "said", iter(["yes", None])
    task = task_of(tokenizer, tmp_path, "outlived", row={"said": str(said)})
    played = await play(task, lambda context: next(turns))
    assert (len(played.turns), played.end.info["unread_turns"]) == (2, 1)
    assert sum(played.trajectory.mask) == len(played.turns[0])
    while not (said.exists() and said.read_text()):
        await asyncio.sleep(0.01)
    assert said.read_text().startswith("410 ")


async def test_a_synchronous_client_in_a_coroutine_is_a_sentence(tokenizer: TaskTokenizer, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^task.agent = '.*:synchronous': it asks the policy by a synchronous client"):
        await play(task_of(tokenizer, tmp_path, "synchronous"), lambda context: "yes")


async def test_the_exception_of_an_agent_has_its_traceback_in_the_log_once(
    tokenizer: TaskTokenizer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    task = task_of(tokenizer, tmp_path, "failing")
    for index in range(2):
        await play(task, lambda context: "yes", index)
    log = capsys.readouterr().err
    assert log.count('raise KeyError("lost")') == log.count("KeyError: 'lost'") == 1


@asynccontextmanager
async def undisturbed(most_s: float, most_bytes: float) -> AsyncIterator[None]:
    """The loop's thread takes no more CPU seconds between two passes, and its process grows by no more bytes."""
    stretches, process = list[float](), psutil.Process()
    before, sizes = process.memory_info().rss, list[int]()

    async def watch() -> None:
        while True:
            began = time.thread_time()
            await asyncio.sleep(0.001)
            stretches.append(time.thread_time() - began)
            sizes.append(process.memory_info().rss - before)

    watching = asyncio.create_task(watch())
    yield
    watching.cancel()
    print(f"{max(stretches):.3f} s, {max(sizes) / 1e6:.0f} MB")
    assert max(stretches) < most_s
    assert max(sizes) < most_bytes


@pytest.mark.parametrize("size", [16 << 20, pytest.param(256 << 20, marks=pytest.mark.nightly)])
async def test_bodies_that_no_context_has_room_for_hold_up_nobody(size: int) -> None:
    endpoint = AgentEndpoint(context=4096, longest=32)
    await endpoint.start()
    for key in range(10):
        endpoint.open(str(key), lambda asked: None, lambda waits: None)

    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(size >> 16):
            yield bytes(1 << 16)

    async def send(session: ClientSession, key: int) -> tuple[int, Any]:
        sized = {"Content-Length": str(size)} if key % 2 else {}
        async with session.post(f"{endpoint.url}/{key}/v1/chat/completions", data=pieces(), headers=sized) as answer:
            return answer.status, await answer.json()

    async with ClientSession() as session, undisturbed(0.5, 300e6):
        answers = await asyncio.gather(*(send(session, key) for key in range(10)))
    await endpoint.stop()
    why = "The body has more than 1,048,576 bytes, and no context of 4,096 tokens has room for that."
    assert [(status, body["error"]["message"]) for status, body in answers] == [(413, why)] * 10


async def test_text_that_a_context_has_no_room_for_is_read_by_pieces_in_a_thread(
    tokenizer: TaskTokenizer, tmp_path: Path
) -> None:
    task = task_of(tokenizer, tmp_path, "talkative", row={"words": 1 << 20})
    task.context, task.endpoint.largest = 4096, 8 << 20
    async with undisturbed(0.2, 100e6):
        played = await play(task, lambda context: "yes")
    assert (played.end.info["agent_failed"], len(played.turns)) == (0, 1)
