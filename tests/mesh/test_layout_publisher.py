"""Layouts by MPI between real ranks of this machine, over TCP: who gets them how, and what a lost process costs."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("mpi4py") is None:
    pytest.skip("mpi4py is not installed", allow_module_level=True)

from libra_hpc.mesh.layout_publisher import opened, sealed
from libra_hpc.protocol.layout import LayoutChange, Row
from tests.mesh.test_mesh import ranks

PROGRAM = """
import asyncio, json, os, signal, sys, time
from pathlib import Path
from types import SimpleNamespace
from libra_hpc.agent.agent import Agent
from libra_hpc.mesh import layout_publisher as module
from libra_hpc.mesh.mesh import Mesh
from libra_hpc.mesh.mpi_link import MpiLink
from libra_hpc.mesh.layout_publisher import Publisher
from libra_hpc.mesh.world import meet
from libra_hpc.process.owner_link import OwnerLink
from libra_hpc.protocol.agents import Heartbeat, MpiBarrier, MpiStart
from libra_hpc.protocol.layout_changes import NOTHING
from libra_hpc.protocol.layout import LayoutChange, Layout, Row

# A busy machine is no fault.
module.ECHO_S, module.BEAT_S, module.FRAME_S, module.RELINK_S, out = 3.0, 3.0, 0.0, 0.5, Path(sys.argv[1])
owner = OwnerLink()
link = MpiLink(owner.rank, owner.size, owner.secret)
world = meet(owner)

class Node(Agent):
    # An agent less its engines: what it has of each Layout, and by which way.
    def __init__(self):
        self.rank, self.ways, self.events, self.beats, self.streamed = world.rank, {}, [], {}, 0
        self.lines = []
        self.mesh = Mesh(world, self.on)
        self._secret, self._link, self._link_world = world.secret, link, 0
        self._members = tuple(range(world.size))
        self._life, self._by_mpi, self._ended_world, self._newest = 0, False, -1, NOTHING
        self._watch, self._stop = SimpleNamespace(seen=lambda: None), asyncio.Event()
        self.context = SimpleNamespace(publisher=None)
    def on(self, source, message):
        match message:
            case LayoutChange():
                self.streamed += source != self.rank
                self._on_change(message)
            case MpiStart():
                self._on_mpi_start(message)
            case MpiBarrier():
                self._on_barrier(message)
            case Heartbeat():
                self.beats[message.rank] = message
                self.context.publisher.on_beat(message.rank, message)
    def _on_change(self, change, by_mpi=False):
        was = self._newest.number, self._by_mpi
        super()._on_change(change, by_mpi)
        if (self._newest.number, self._by_mpi) != was:
            self.ways[self._newest.number] = "mpi" if self._by_mpi else "stream"
            self._beat()
    def _on_layout(self, layout, was):
        self.row = layout.rows[1].state
    def _beat(self):
        self.mesh.send(0, Heartbeat(self.rank, "", {}, -1, layout=self._newest.number, by_mpi=self._by_mpi,
                                    ended_world=self._ended_world))
    async def publish(self, *numbers, ranks=(0, 1, 2)):
        for number in numbers:
            self.context.publisher.publish(Layout(0, {1: Row(f"{number}" + "x" * 4000)}), ranks)
            await self.have(number, ranks)
    async def have(self, number, ranks=(0, 1, 2)):
        await self.until(lambda: all(r in self.beats and self.beats[r].layout >= number for r in ranks))
    async def until(self, condition):
        async with asyncio.timeout(30):
            while not condition():
                await asyncio.sleep(0.01)
    def pid(self, rank):
        return int((out / f"link-{rank}").read_text())

async def main():
    node = Node()
    (out / f"link-{node.rank}.new").write_text(str(node._link.pid))
    (out / f"link-{node.rank}.new").rename(out / f"link-{node.rank}")
    accepting = asyncio.create_task(node.mesh.run())
    if node.rank == 0:
        event = lambda kind, **fields: node.events.append([kind, fields])
        node.context.publisher = Publisher(node.mesh, world.secret, event, node.lines.append)
        node.mesh.on_closed = node.context.publisher.leave_out
        watching = asyncio.create_task(node.context.publisher.watch())
    node._serve_link(node._link)
    node._beat()
    await SCRIPT(node) if node.rank == 0 else await node.until(lambda: (out / "0.json").exists())
    maps = lambda pid: "/libmpi" in Path(f"/proc/{pid}/maps").read_text()
    facts = {"ways": node.ways, "events": node.events, "streamed": node.streamed, "lines": node.lines}
    facts["libmpi"] = [maps("self"), maps(node._link.pid) if node._link.alive else None]
    facts["summary"] = node.context.publisher.summary if node.context.publisher else ""
    (out / f"{node.rank}.new").write_text(json.dumps(facts))
    (out / f"{node.rank}.new").rename(out / f"{node.rank}.json")
    await node.until(lambda: all((out / f"{rank}.json").exists() for rank in EXPECTED))
    os._exit(0)

EXPECTED, module.FIRST_S = [0, 1, 2], 60.0
"""


def play(tmp_path: Path, script: str, before: str = "", **variables: str) -> list[dict[str, Any]]:
    """What three ranks saw of a script that rank 0 plays."""
    body = script.replace("\n", "\n    ")
    program = f"{PROGRAM}\n{before}\nasync def SCRIPT(node):\n    {body}\nasyncio.run(main())\n"
    (tmp_path / "program.py").write_text(program)
    # Shared memory would hide what a lost process does to the others.
    left = {"PMIX_NAMESPACE": "x", "MPIR_CVAR_PMI_VERSION": "x"}
    done = ranks(3, tmp_path, tmp_path / "program.py", str(tmp_path), UCX_TLS="tcp,self", **left, **variables)
    found = [tmp_path / f"{rank}.json" for rank in range(3)]
    logs = [path.read_text()[-3000:] for path in sorted(tmp_path.glob("agent-*.log"))]
    assert not done.returncode, logs
    return [json.loads(path.read_text()) if path.exists() else {} for path in found]


def ways(facts: dict[str, Any]) -> dict[int, str]:
    return {int(number): way for number, way in facts["ways"].items()}


def turns(facts: dict[str, Any]) -> list[tuple[int, str]]:
    """Node and way, whenever it got Layouts another way than before, by the log of Layouts."""
    return [(int(rank), way) for line in facts["lines"] for rank, way in sorted(line.get("ways", {}).items())]


def test_without_a_fallback_every_layout_comes_by_mpi_and_none_by_stream(tmp_path: Path) -> None:
    script = """await node.publish(*range(1, 31))
for number in range(31, 1001):  # 62 MB, of which the process has room for 4
    node.context.publisher.publish(Layout(0, {1: Row(f"{number}" + "x" * 64_000)}), (0, 1, 2))
await node.have(1000)"""
    found = play(tmp_path, script, before="module.ECHO_S = module.BEAT_S = float('inf')")
    for facts in found[1:]:
        assert ways(facts) == dict.fromkeys([*range(1, 32), 1000], "mpi"), "what waits goes in one frame"
        assert facts["streamed"] == 0
    assert [facts["libmpi"] for facts in found] == [[False, True]] * 3, "only the processes beside the agents load it"
    assert found[0]["summary"] == "by MPI"
    assert [line["number"] for line in found[0]["lines"]] == list(range(1, 1001))
    assert turns(found[0]) == [(1, "mpi"), (2, "mpi")]


def test_a_process_that_is_killed_costs_its_node_alone_mpi_until_all_have_new_ones(tmp_path: Path) -> None:
    script = """await node.publish(1)
os.kill(node.pid(2), signal.SIGKILL)
await node.until(lambda: node.beats[2].ended_world == 0 and not Path(f"/proc/{node.pid(2)}").exists())
module.RELINK_EVERY_S = float("inf")
await node.publish(2, 3)
module.RELINK_EVERY_S = 0.0
await node.until(lambda: node.context.publisher._world == 1)
module.RELINK_EVERY_S = float("inf")
await node.until(lambda: node.events[-1] == ["mpi_world", {"nodes": 3, "lost": []}])
await node.publish(4)"""
    first, second, third = play(tmp_path, script)
    assert ways(second) == {1: "mpi", 2: "mpi", 3: "mpi", 4: "mpi"}
    assert ways(third) == {1: "mpi", 2: "stream", 3: "stream", 4: "mpi"}
    worlds = [[*fields.values()] for kind, fields in first["events"] if kind == "mpi_world"]
    assert worlds == [[3, []], [2, [2]], [3, []]]


@pytest.mark.parametrize("victim", [0, 1])
def test_a_process_that_takes_frames_and_sends_none_is_noticed_and_streams_bring_them(
    tmp_path: Path, victim: int
) -> None:
    script = f"""await node.publish(1)
os.kill(node.pid({victim}), signal.SIGSTOP)
await node.publish(2)
await asyncio.sleep(1.6)
await node.publish(3)
if {victim}: os.kill(node.pid(1), signal.SIGKILL)  # rank 0 has ended its own"""
    first, second, third = play(tmp_path, script, before="module.RELINK_EVERY_S = float('inf')\nmodule.RELINK_S = 99")
    assert ways(second) == {1: "mpi", 2: "stream", 3: "stream"}
    assert ways(third) == ({1: "mpi", 2: "stream", 3: "stream"} if victim == 0 else {1: "mpi", 2: "mpi", 3: "mpi"})
    assert first["summary"] == ("by stream" if victim == 0 else "by MPI, to 1 by stream")
    assert turns(first) == [(1, "mpi"), (2, "mpi"), (1, "stream"), (2, "stream")][: 4 if victim == 0 else 3]


AGAIN = """
def again(self, start, begin=Node._on_mpi_start):
    os.environ.pop("MPI4PY_LIBMPI", "")
    begin(self, start)
Node._on_mpi_start = again
"""
STOPPED = """
module.FIRST_S = 1.0
if world.rank == 2:
    os.kill(link.pid, signal.SIGSTOP)
"""


@pytest.mark.parametrize(("fault", "variables"), [("", {"MPI4PY_LIBMPI": "/nowhere.so"}), (STOPPED, {})])
def test_without_mpi_layouts_come_by_stream_until_new_processes_have_met(
    tmp_path: Path, fault: str, variables: dict[str, str]
) -> None:
    script = """await node.publish(1)
module.RELINK_EVERY_S = 0.0
await node.until(lambda: node.context.publisher._world == 1)
module.RELINK_EVERY_S = float("inf")
await node.until(lambda: node.events and node.events[-1] == ["mpi_world", {"nodes": 3, "lost": []}])
await node.publish(2)"""
    for facts in play(tmp_path, script, before=AGAIN + fault, **variables)[1:]:
        assert ways(facts) == {1: "stream", 2: "mpi"}


def test_a_killed_agent_costs_the_others_nothing(tmp_path: Path) -> None:
    script = """await node.publish(1)
victim = int(Path(f"/proc/{node.pid(2)}/stat").read_text().split()[3])
os.kill(victim, signal.SIGKILL)
await node.until(lambda: 2 not in node.context.publisher._reached)
await node.publish(2, 3, ranks=(0, 1))
maps = Path(f"/proc/{node.pid(2)}/maps")
await node.until(lambda: not maps.exists() or not maps.read_text())
EXPECTED.remove(2)"""
    first, second, _ = play(tmp_path, script, before="module.RELINK_S = 99\nif world.rank == 1: EXPECTED = [0, 1]")
    assert ways(second) == {1: "mpi", 2: "mpi", 3: "mpi"}
    assert first["libmpi"] == [False, True], "the process of rank 0 lives, and that of the agent went with it"


def test_a_frame_that_somebody_without_the_secret_made_is_no_layout() -> None:
    change = LayoutChange(3, 2, 99, {1: Row("rollout", "rollout", starts=2)})
    frame = sealed(b"secret", change)
    assert opened(b"secret", frame) == change
    assert opened(b"another", frame) is None
    assert opened(b"secret", frame[:-1] + bytes([frame[-1] ^ 1])) is None
    assert opened(b"secret", b"") is None
