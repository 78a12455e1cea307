"""Environment hosts that hang, end and come back, with processes that only keep count."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from libra_hpc.agent import supervised
from libra_hpc.agent.hosting import hosts as module
from libra_hpc.agent.hosting.hosts import Hosts
from libra_hpc.config.load import validate
from libra_hpc.facts.rundir import RunDir
from libra_hpc.mesh.agent_context import AgentContext
from libra_hpc.mesh.rank_layout import RankLayout
from libra_hpc.protocol.agents import Fatal, Log
from libra_hpc.protocol.env import ChatChoice, CloseEpisode, EpisodeFailed, EpisodeStepped, HostHeartbeat, HostReady
from libra_hpc.protocol.layout import ResumePoint
from tests.mesh.test_links import until


class FakeChild:
    def __init__(
        self,
        name: str,
        path: Path,
        outbound: Any,
        inbound: Any,
        on_message: Callable[..., None],
        on_exit: Callable[..., None],
    ) -> None:
        self.name, self.message, self.exited = name, on_message, on_exit
        self.ends, self.fault, self.stopping, self.log_start = 0, "", False, 0
        self.got: list[Any] = []
        self.starting = FakeChild.slow_start

    refused = 0
    slow_start: asyncio.Future[None] | None = None

    async def start(self, argv: list[str], environment: dict[str, str], log: Path) -> None:
        if FakeChild.refused:
            FakeChild.refused -= 1
            raise OSError(28, "No space left on device")
        if self.starting is not None:
            await self.starting

    def send(self, message: Any) -> None:
        self.got.append(message)

    async def stop(self) -> None:
        pass

    async def end_hung(self) -> None:
        self.ends += 1
        self.exited(self, -9)


STEPPED = EpisodeStepped("0.0.0", b"", None, True, 1.0, {})


class Scene:
    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(supervised, "Child", FakeChild)
        monkeypatch.setattr(module, "RESTART_S", 0.0)
        config = validate({"deadlines": {"floor_s": 20, "first_s": 100, "factor": 5}})
        self.now = 0.0
        self.sent: list[Any] = []
        self.seen: list[Any] = []
        self.downs: list[str] = []
        layout = RankLayout(("planner", "train", "rollout"))
        context = AgentContext(
            2,
            layout,
            config,
            RunDir(folder),
            1,
            lambda rank, m: self.sent.append(m),
            ResumePoint(0, "", 0, ()),
            folder,
            folder,
        )
        self.listener = SimpleNamespace(
            on_host=lambda host, m: self.seen.append(m), on_host_down=lambda host, reason: self.downs.append(reason)
        )
        self.hosts = Hosts(context, self.listener, lambda: self.now)

    @property
    def failed(self) -> list[str]:
        return [message.reason for message in self.sent if isinstance(message, Fatal)]

    @property
    def child(self) -> Any:
        return self.hosts._hosts[0].children[0]

    def send(self, message: Any, at: float) -> None:
        self.now = at
        self.child.message(self.child, message)

    async def watch(self, at: float) -> None:
        self.now = at
        self.hosts.watch()
        for _ in range(4):
            await asyncio.sleep(0)

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [m.fields for m in self.sent if isinstance(m, Log) and m.kind == kind]


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scene:
    return Scene(tmp_path, monkeypatch)


async def test_a_host_without_a_sign_of_life_is_reported_slow_then_ended_and_followed(scene: Scene) -> None:
    await scene.hosts.start()
    scene.send(HostReady("toy"), 1.0)
    scene.send(STEPPED, 1.5)
    for second in range(2, 8):
        scene.send(HostHeartbeat(), float(second))
    first = scene.child
    await scene.watch(17.0)
    assert scene.events("slow") == []
    for at in (18.0, 19.0, 26.9):
        await scene.watch(at)
    (slow,) = scene.events("slow")
    assert slow["part"] == "environment host 0"
    assert slow["reason"].startswith("The sign of life of environment host has not ended after 11 s (limit 20 s)")
    assert first.ends == 0
    await scene.watch(27.1)
    assert (first.ends, len(scene.events("hung")), len(scene.events("host_lost"))) == (1, 1, 1)
    (down,) = scene.downs
    assert down.startswith("process host0 was killed by signal 9: The sign of life of environment host has not")
    assert scene.child is not first
    await scene.watch(28.0)
    assert len(scene.events("hung")) == 1
    assert not scene.failed


async def test_how_the_chat_is_written_is_an_event_once(scene: Scene) -> None:
    await scene.hosts.start()
    for template in ("ab", "ab", "cd"):
        scene.send(HostReady("toy", chats=(ChatChoice(template, 34, "json"),)), 1.0)
    assert [(event["calls"], event["template"]) for event in scene.events("chat_choice")] == [
        ("json", "ab"),
        ("json", "cd"),
    ]


async def test_a_slow_start_has_the_longer_deadline_and_any_message_is_a_sign_of_life(scene: Scene) -> None:
    await scene.hosts.start()
    await scene.watch(99.0)
    assert scene.child.ends == 0
    scene.send(HostReady("toy"), 99.5)
    scene.send(HostHeartbeat(), 100.5)
    scene.send(STEPPED, 101.0)
    scene.send(EpisodeFailed("0.0.0", "x"), 119.0)
    await scene.watch(138.0)
    assert (scene.child.ends, len(scene.seen)) == (0, 4)
    await scene.watch(140.0)
    assert len(scene.events("hung")) == 1


async def test_a_late_load_of_data_before_the_first_step_has_the_longer_deadline(scene: Scene) -> None:
    await scene.hosts.start()
    for number in range(2):
        at = 1000.0 * number
        scene.send(HostReady("toy"), at + 1.0)
        scene.send(HostHeartbeat(), at + 1.0)
        await scene.watch(at + 100.0)
        assert (scene.child.ends, len(scene.events("hung"))) == (0, number)
        await scene.watch(at + 102.0)
        assert len(scene.events("hung")) == number + 1


async def test_a_step_may_hold_up_the_host_for_as_long_as_the_task_declares(scene: Scene) -> None:
    await scene.hosts.start()
    scene.send(HostReady("toy", busy_s=1800.0), 1.0)
    scene.send(STEPPED, 2.0)
    scene.send(HostHeartbeat(), 3.0)
    await scene.watch(1800.0)
    assert scene.child.ends == 0
    await scene.watch(1804.0)
    assert "(limit 1800 s)" in scene.events("hung")[0]["reason"]


async def test_nothing_goes_to_the_next_host_before_its_episodes_are_opened_again(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    await scene.hosts.start()
    scene.send(HostReady("toy"), 1.0)
    scene.listener.on_host_down = lambda host, reason: scene.hosts.send(host, CloseEpisode("opened again"))
    for early in (False, True):
        monkeypatch.setattr(FakeChild, "slow_start", asyncio.get_running_loop().create_future())
        old = scene.child
        old.exited(old, 1)
        await until(lambda old=old: scene.child is not old)
        scene.hosts.send(0, CloseEpisode("during its start"))
        if early:
            scene.send(HostReady("toy"), 2.0)
        FakeChild.slow_start.set_result(None)
        await asyncio.sleep(0.05)
        scene.hosts.send(0, CloseEpisode("later"))
        assert scene.child.got == [CloseEpisode("opened again"), CloseEpisode("later")]


async def test_a_stall_of_the_watcher_itself_counts_for_nobody(scene: Scene) -> None:
    await scene.hosts.start()
    scene.send(HostReady("toy"), 1.0)
    scene.send(HostHeartbeat(), 2.0)
    scene.hosts.discount(30.0)
    await scene.watch(33.0)
    assert not scene.sent


async def test_a_host_that_cannot_be_started_is_tried_again(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "NO_START_S", 0.0)
    monkeypatch.setattr(FakeChild, "refused", 2)
    await scene.hosts.start()
    await until(lambda: scene.downs)
    assert [event["reason"] for event in scene.events("host_lost")] == [
        "environment host cannot be started: No space left on device"
    ] * 2
    assert len(scene.downs) == 1, "once one is there"
    scene.send(HostReady("toy"), 1.0)
    assert scene.seen == [HostReady("toy")]


async def test_hosts_that_keep_ending_fail_the_run_and_single_ends_never_do(scene: Scene) -> None:
    await scene.hosts.start()
    for number in range(20):
        scene.now = 100.0 * number
        scene.send(HostReady("toy"), scene.now)
        scene.child.exited(scene.child, 1)
        await until(lambda number=number: len(scene.downs) > number)
    assert (scene.failed, len(scene.downs)) == ([], 20)
    for number in range(6):
        scene.send(HostReady("toy"), 5000.0 + number)
        scene.child.exited(scene.child, 1)
        await until(lambda number=number: len(scene.downs) > 20 + number or scene.failed)
    assert len(scene.failed) == 1
    assert "environment host 0 ended 6 times in 300 s, the last time because process host0" in scene.failed[0]
