"""A killed environment host: its processes and folders are gone, and another follows."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
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
from libra_hpc.protocol.env import EpisodeOpened, HostLost, HostReady, OpenEpisode, StepEpisode
from tests.example_files import write_keychain_tokenizer
from tests.stage.node_parts import Outbox

TASK = f"{Path(__file__).parents[1] / 'host' / 'user_tasks.py'}:Littering"
LIMIT_S = 60.0


class Service:
    """A real host under a subreaper that looks for strangers, as an agent does."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.diary = folder / "private", folder / "diary"
        self.folder.mkdir()
        write_keychain_tokenizer(folder / "policy")
        task = {"name": TASK, "options": {"path": str(self.diary)}, "tool_timeout_s": 300.0}
        config = validate({"task": task, "model": {"path": str(folder / "policy")}})
        self.seen: list[Any] = []
        self.downs: list[int] = []
        owner = SimpleNamespace(on_host=self.on_host)
        context = Outbox().context_of(self.folder, 2, config=config, run=RunDir(folder))
        self.hosts = Hosts(context, owner)
        self.before = reaper.children()

    def on_host(self, host: int, message: Any) -> None:
        if isinstance(message, HostLost):
            self.downs.append(host)
        else:
            self.seen.append(message)

    def lines(self) -> list[list[str]]:
        return [line.split() for line in self.diary.read_text().splitlines()] if self.diary.exists() else []

    def count(self, kind: type) -> int:
        return sum(isinstance(message, kind) for message in self.seen)

    async def until(self, true: Callable[[], object]) -> None:
        async with asyncio.timeout(LIMIT_S):
            while not true():
                if not Child.starting:
                    reaper.end_strangers({*self.before, *Child.live})
                await asyncio.sleep(0.02)

    def left(self, pids: list[int]) -> list[object]:
        """What a killed host left: processes, and folders other than that of the host that follows."""
        folders = list(self.folder.glob("host0-*"))
        return [*(pid for pid in pids if Path(f"/proc/{pid}").exists()), *folders[1:]]

    async def __aenter__(self) -> Service:
        reaper.become_subreaper()
        await self.hosts.start()
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self.hosts.stop()


@pytest.mark.slow
async def test_a_host_killed_at_any_point_leaves_no_process_and_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "RESTART_S", 0.05)
    async with Service(tmp_path) as service:
        for point in ("before it is ready", "ready", "an episode is open", "a tool runs"):
            number = len(service.downs)
            if point != "before it is ready":
                await service.until(lambda number=number: service.count(HostReady) == max(1, number))
            daemon = Path(f"{service.diary}.daemon{number}")
            if point in ("an episode is open", "a tool runs"):
                opened = service.count(EpisodeOpened)
                service.hosts.send(0, OpenEpisode(f"e{number}", number, 0, 0.0))
                await service.until(lambda opened=opened: service.count(EpisodeOpened) > opened)
            if point == "a tool runs":
                service.hosts.send(0, StepEpisode(f"e{number}", pack_i32([1]), 1000))
                await service.until(lambda daemon=daemon: daemon.exists() and daemon.read_text())
            host = service.hosts._hosts[0].children[0]
            folders = [Path(text) for index, what, text in service.lines() if what == "folder" and index == str(number)]
            pids = [host.pid, *(int(text) for index, what, text in service.lines() if what == "process")]
            pids += map(int, daemon.read_text().split()) if daemon.exists() else []
            host.kill()
            await service.until(lambda number=number: len(service.downs) > number)
            await service.until(lambda pids=pids: not service.left(pids))
            assert not [folder for folder in folders if folder.exists()]
        assert len([line for line in service.lines() if line[1] == "folder"]) == 2
