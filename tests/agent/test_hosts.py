"""Environment hosts that hang, end and come back, with processes that only keep count."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from libra_hpc.agent import supervised
from libra_hpc.agent.hosting import hosts as module
from libra_hpc.agent.hosting.hosts import EnvNode, Hosts
from libra_hpc.config.load import validate
from libra_hpc.mesh.agent_context import RankLayout
from libra_hpc.protocol.agents import Fatal, FromEnvHost
from libra_hpc.protocol.engine_state import SERVING, Doing, ObservedEngine
from libra_hpc.protocol.env import ChatChoice, CloseEpisode, HostLost, HostReady
from tests.stage.node_parts import Outbox
from tests.stage.waiting import until


class FakeChild:
    def __init__(
        self, name: str, outbound: Any, inbound: Any, on_message: Callable[..., None], on_exit: Callable[..., None]
    ) -> None:
        self.name, self.message, self.exited = name, on_message, on_exit
        self.ends, self.fault, self.stopping, self.ended, self.log_start, self.pid = 0, "", False, False, 0, 0
        self.got: list[Any] = []
        self._outbound = SimpleNamespace(frame=lambda message: message)
        self.starting = FakeChild.slow_start

    refused = 0
    slow_start: asyncio.Future[None] | None = None

    async def start(self, argv: list[str], environment: dict[str, str], log: Path) -> None:
        if FakeChild.refused:
            FakeChild.refused -= 1
            raise OSError(28, "No space left on device")
        if self.starting is not None:
            await self.starting

    def send_frame(self, message: Any) -> None:
        self.got.append(message)

    async def stop(self, leave_s: float = 0.0) -> None:
        pass

    async def end_hung(self) -> None:
        self.ends += 1
        self.exited(self, -9)


class Scene(Outbox):
    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(supervised, "Child", FakeChild)
        monkeypatch.setattr(module, "RESTART_S", 0.0)
        config = validate({"deadlines": {"floor_s": 20, "first_s": 100, "factor": 5}})
        super().__init__()
        self.now = 0.0
        self.seen: list[Any] = []
        self.downs: list[str] = []
        context = self.context_of(folder, 2, config=config)
        self.listener = SimpleNamespace(on_host=self.on_host)
        clock = SimpleNamespace(monotonic=lambda: self.now)
        for user in (supervised, module):
            monkeypatch.setattr(user, "time", clock)
        self.hosts = Hosts(context, self.listener)

    def on_host(self, host: int, message: Any) -> None:
        if isinstance(message, HostLost):
            self.downs.append(message.reason)
        else:
            self.seen.append(message)

    @property
    def failed(self) -> list[str]:
        return [fatal.reason for fatal in self.of(Fatal)]

    @property
    def child(self) -> Any:
        return self.hosts._hosts[0].children[0]

    def reports(self, message: Any, at: float) -> None:
        self.now = at
        self.child.message(self.child, message)

    async def watch(self, at: float) -> None:
        self.now = at
        await self.hosts.check(at)
        for _ in range(4):
            await asyncio.sleep(0)


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scene:
    return Scene(tmp_path, monkeypatch)


async def test_a_host_that_reports_nothing_is_slow_then_ended_and_followed(scene: Scene) -> None:
    await scene.hosts.start()
    for second in range(8):
        scene.reports(HostReady("toy") if not second else Doing({SERVING: 0.0}), float(second))
    first = scene.child
    for at, slow, hung in ((17.0, 0, 0), (18.0, 1, 0), (26.9, 1, 0), (27.1, 1, 1), (28.0, 1, 1)):
        await scene.watch(at)
        assert (len(scene.events("slow")), len(scene.events("hung")), first.ends) == (slow, hung, hung)
    assert scene.events("slow")[0] == {
        "rank": 2,
        "part": "environment host 0",
        "reason": "host0: has reported nothing for 11 s (limit 20 s); its last report: serving",
        "waits": False,
    }
    (down,) = scene.downs
    assert down.startswith("process host0 was killed by signal 9: host0: has reported nothing for 20 s")
    assert scene.child is not first
    assert (len(scene.events("host_lost")), scene.failed) == (1, [])


async def test_how_the_chat_is_written_is_an_event_once(scene: Scene) -> None:
    await scene.hosts.start()
    for template in ("ab", "ab", "cd"):
        scene.reports(HostReady("toy", chats=(ChatChoice(template, 34, "json"),)), 1.0)
    assert [(event["calls"], event["template"]) for event in scene.events("chat_choice")] == [
        ("json", "ab"),
        ("json", "cd"),
    ]


async def test_nothing_goes_to_the_next_host_before_its_episodes_are_opened_again(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    await scene.hosts.start()
    scene.reports(HostReady("toy"), 1.0)

    def lost(host: int, message: Any) -> None:
        if isinstance(message, HostLost):
            scene.hosts.send(host, CloseEpisode("opened again"))

    scene.listener.on_host = lost
    for early in (False, True):
        monkeypatch.setattr(FakeChild, "slow_start", asyncio.get_running_loop().create_future())
        old = scene.child
        old.exited(old, 1)
        await until(lambda old=old: scene.child is not old)
        scene.hosts.send(0, CloseEpisode("during its start"))
        if early:
            scene.reports(HostReady("toy"), 2.0)
        FakeChild.slow_start.set_result(None)
        await asyncio.sleep(0.05)
        scene.hosts.send(0, CloseEpisode("later"))
        assert scene.child.got == [CloseEpisode("opened again"), CloseEpisode("later")]


async def test_a_host_that_cannot_be_started_is_tried_again(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "NO_START_S", 0.0)
    monkeypatch.setattr(FakeChild, "refused", 2)
    await scene.hosts.start()
    await until(lambda: scene.downs)
    assert [event["reason"] for event in scene.events("host_lost")] == [
        "environment host cannot be started: No space left on device"
    ] * 2
    assert len(scene.downs) == 1, "once one is there"
    scene.reports(HostReady("toy"), 1.0)
    assert scene.seen == [HostReady("toy")]


async def test_hosts_that_keep_ending_fail_the_run_and_single_ends_never_do(scene: Scene) -> None:
    await scene.hosts.start()
    for number in range(20):
        scene.now = 100.0 * number
        scene.reports(HostReady("toy"), scene.now)
        scene.child.exited(scene.child, 1)
        await until(lambda number=number: len(scene.downs) > number)
    assert (scene.failed, len(scene.downs)) == ([], 20)
    for number in range(6):
        scene.reports(HostReady("toy"), 5000.0 + number)
        scene.child.exited(scene.child, 1)
        await until(lambda number=number: len(scene.downs) > 20 + number or scene.failed)
    assert len(scene.failed) == 1
    assert "environment host 0 ended 6 times in 300 s, the last time because process host0" in scene.failed[0]


async def test_an_environment_node_whose_hosts_keep_ending_is_given_up_alone(scene: Scene) -> None:
    layout = RankLayout(("planner", "train", "rollout", "env"))
    scene.hosts = node = EnvNode(replace(scene.hosts._context, rank=3, layout=layout))
    await node.start(1)

    def lost() -> list[FromEnvHost]:
        return [m for m in scene.of(FromEnvHost) if isinstance(m.message, HostLost)]

    for number in range(6):
        scene.reports(HostReady("toy"), float(number))
        assert node.observed == {"e3.0": ObservedEngine("env", "ready", starts=1)}
        scene.child.exited(scene.child, 1)
        await until(lambda number=number: len(lost()) > number or node.observed["e3.0"].state == "closed")
    assert node.observed["e3.0"].reason.startswith(
        "e3.0 ended 6 times in 300 s, the last time because process e3.0 ended with 1"
    )
    assert (scene.failed, [m.rank for m in lost()]) == ([], [3] * 5)
    assert FromEnvHost(3, 0, HostReady("toy")) in scene.of(FromEnvHost)
    await node.reset()
    assert node.observed["e3.0"].state == "lost"
    await node.start(2)
    scene.reports(HostReady("toy"), 10.0)
    assert node.observed["e3.0"].state == "ready"
