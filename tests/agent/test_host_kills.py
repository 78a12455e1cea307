"""A killed environment host: its processes and folders are gone, another follows, and the other host goes on."""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from libra_hpc.agent.hosting import hosts as module
from libra_hpc.agent.hosting.hosts import Hosts
from libra_hpc.config.load import validate
from libra_hpc.facts.rundir import RunDir
from libra_hpc.process import reaper
from libra_hpc.process.child import Child
from libra_hpc.protocol.codec import pack_i32
from libra_hpc.protocol.engine_state import Doing
from libra_hpc.protocol.env import EpisodeOpened, HostReady, OpenEpisode, StepEpisode
from tests.example_files import write_keychain_tokenizer
from tests.stage.node_parts import Outbox

TASK = f"{Path(__file__).parents[1] / 'host' / 'user_tasks.py'}:Littering"
LIMIT_S = 60.0


class Service:
    """Two real hosts under a subreaper that looks for strangers, as an agent does."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.diary = folder / "private", folder / "diary"
        self.folder.mkdir()
        write_keychain_tokenizer(folder / "policy")
        task = {"name": TASK, "options": {"path": str(self.diary)}, "hosts": 2, "tool_timeout_s": 300.0}
        config = validate({"task": task, "model": {"path": str(folder / "policy")}})
        self.seen: list[tuple[int, Any]] = []
        self.downs: list[int] = []
        owner = SimpleNamespace(
            on_host=lambda host, message: self.seen.append((host, message)),
            on_host_down=lambda host, reason: self.downs.append(host),
        )
        context = Outbox().context_of(self.folder, 2, config=config, run=RunDir(folder))
        self.hosts = Hosts(context, owner)
        self.before = reaper.children()

    def lines(self) -> list[list[str]]:
        return [line.split() for line in self.diary.read_text().splitlines()] if self.diary.exists() else []

    def count(self, kind: type, host: int) -> int:
        return sum(isinstance(message, kind) for at, message in self.seen if at == host)

    def child(self, host: int) -> Child:
        return self.hosts._hosts[host].children[0]

    async def until(self, true: Callable[[], object]) -> None:
        async with asyncio.timeout(LIMIT_S):
            while not true():
                if not Child.starting:
                    reaper.end_strangers({*self.before, *Child.live})
                await asyncio.sleep(0.02)

    def left(self, host: int, pids: list[int]) -> list[object]:
        """What a killed host left: processes, and folders other than that of the host that follows."""
        folders = list(self.folder.glob(f"host{host}-*"))
        return [*(pid for pid in pids if Path(f"/proc/{pid}").exists()), *folders[1:]]


@asynccontextmanager
async def two_hosts(folder: Path) -> AsyncIterator[Service]:
    reaper.become_subreaper()
    made = Service(folder)
    try:
        await made.hosts.start()
        yield made
    finally:
        await made.hosts.stop()
        ctypes.CDLL(None).prctl(36, 0, 0, 0, 0)


@pytest.mark.slow
async def test_a_host_killed_at_any_point_leaves_no_process_and_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "RESTART_S", 0.05)
    async with two_hosts(tmp_path) as service:
        for point in ("before it is ready", "ready", "an episode is open", "a tool runs"):
            number = len(service.downs)
            if point != "before it is ready":
                await service.until(lambda number=number: service.count(HostReady, 0) == max(1, number))
            daemon = Path(f"{service.diary}.daemon{number}")
            if point in ("an episode is open", "a tool runs"):
                opened = service.count(EpisodeOpened, 0)
                service.hosts.send(0, OpenEpisode(f"e{number}", number, 0, 0.0))
                await service.until(lambda opened=opened: service.count(EpisodeOpened, 0) > opened)
            if point == "a tool runs":
                service.hosts.send(0, StepEpisode(f"e{number}", pack_i32([1]), 1000))
                await service.until(lambda daemon=daemon: daemon.exists() and daemon.read_text())
            host = service.child(0)
            folders = [Path(text) for index, what, text in service.lines() if what == "folder" and index == str(number)]
            pids = [host.pid, *(int(text) for index, what, text in service.lines() if what == "process")]
            pids += map(int, daemon.read_text().split()) if daemon.exists() else []
            host.kill()
            await service.until(lambda number=number: len(service.downs) > number)
            await service.until(lambda pids=pids: not service.left(0, pids))
            assert not [folder for folder in folders if folder.exists()]
        assert len([line for line in service.lines() if line[1] == "folder"]) == 2


@pytest.mark.slow
async def test_the_other_host_keeps_its_episodes_and_closes_each_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "RESTART_S", 0.05)
    async with two_hosts(tmp_path) as service:
        await service.until(lambda: service.count(HostReady, 0) and service.count(HostReady, 1))
        for number in range(4):
            service.hosts.send(number % 2, OpenEpisode(f"e{number}", number, 0, 0.0))
        await service.until(lambda: service.count(EpisodeOpened, 0) + service.count(EpisodeOpened, 1) == 4)
        service.child(0).kill()
        await service.until(lambda: service.downs == [0])
        beats = service.count(Doing, 1)
        await service.until(lambda: service.count(Doing, 1) > beats)
        assert not [line for line in service.lines() if line[1] not in ("process", "folder")]
        await service.hosts.stop()
        ends = [tuple(line) for line in service.lines() if line[1] not in ("process", "folder")]
        assert sorted(ends) == [("1", "shutdown"), ("3", "shutdown")]
