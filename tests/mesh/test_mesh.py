"""The mesh between real ranks: dead and stopped peers, foreign bytes, and what an idle agent costs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PRELUDE = """
import asyncio, json, os, resource, signal, sys, time
from pathlib import Path
from libra_hpc.mesh.links import Outgoing
from libra_hpc.mesh.mesh import Mesh
from libra_hpc.mesh.world import meet
from libra_hpc.process.owner_link import OwnerLink
from libra_hpc.protocol import agents as wire
out = Path(sys.argv[1])
world = meet(OwnerLink())
(out / f"pid-{world.rank}").write_text(str(os.getpid()))
got = []
def handler(source, message):
    got.append((source, message))
def large(rank, size):
    return wire.Fatal(rank, chr(65 + rank) * size)
async def main():
    mesh = Mesh(world, handler)
    task = asyncio.create_task(mesh.run())
    facts = await script(mesh)
    await mesh.drain(5.0)
    task.cancel()
    return facts
async def until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.005)
async def pid(rank):
    path = out / f"pid-{rank}"
    await until(lambda: path.exists() and path.read_text())
    return int(path.read_text())
def finish():
    facts = asyncio.run(main())
    (out / f"{world.rank}.json").write_text(json.dumps(facts))
    os._exit(0)
"""


def ranks(size: int, logs: Path, program: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a program on so many ranks of one world."""
    launcher = [sys.executable, "-m", "tests.mesh.local_ranks", str(size), str(logs)]
    command = [*launcher, sys.executable, str(program), *arguments]
    environment = {**os.environ, **variables}
    return subprocess.run(command, env=environment, timeout=120, capture_output=True, text=True)


def world(tmp_path: Path, size: int, script: str) -> dict[int, Any]:
    """Run ``script`` on ``size`` ranks; returns what each surviving rank found."""
    program = tmp_path / "program.py"
    program.write_text(PRELUDE + script + "\nfinish()\n")
    ranks(size, tmp_path, program, str(tmp_path))
    found = {rank: tmp_path / f"{rank}.json" for rank in range(size)}
    logs = "\n".join(path.read_text() for path in tmp_path.glob("*.log"))
    assert found[0].exists(), logs
    return {rank: json.loads(path.read_text()) for rank, path in found.items() if path.exists()}


def test_a_dead_peer_blocks_nobody(tmp_path: Path) -> None:
    script = """
async def script(mesh):
    if mesh.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    await asyncio.sleep(1.0)
    for i in range(30):
        mesh.send(2, large(i, 500_000))
        mesh.send(1 - mesh.rank, wire.Fatal(i, ""))
    await until(lambda: len(got) == 30)
    mesh.drop(2)
    mesh.send(2, wire.Fatal(99, ""))
    return {"got": [m.rank for _, m in got]}
"""
    facts = world(tmp_path, 3, script)
    assert facts[0]["got"] == facts[1]["got"] == list(range(30))
    assert 2 not in facts


def test_a_stopped_rank_that_is_forgotten_and_remembered_gets_every_message_whole_and_in_order(tmp_path: Path) -> None:
    script = """
async def script(mesh):
    send = lambda i: mesh.send(1, large(i, 3_000_000 + i))
    other = await pid(1 - mesh.rank)
    if mesh.rank == 1:
        await until(lambda: len(got) == 6)
        mesh.send(0, wire.Fatal(99, ""))
        return {"got": [(m.rank, m == large(m.rank, len(m.reason)), len(m.reason) - m.rank) for _, m in got]}
    os.kill(other, signal.SIGSTOP)
    for i in (1, 2, 3):
        send(i)
    await asyncio.sleep(0.2)
    before = mesh.pending(1)
    await asyncio.wait_for(mesh.drain(3600.0, {1}), 60.0)
    mesh.drop(1)
    send(4)
    await asyncio.wait_for(mesh.drain(3600.0), 60.0)
    stopped = mesh.pending(1)
    os.kill(other, signal.SIGCONT)
    mesh.remember(1)
    for i in (5, 6, 7):
        send(i)
    await until(lambda: got and not mesh.pending(1))
    ranks = [m.rank for _, m in got]
    return {"before": before, "stopped": stopped, "after": mesh.pending(1), "got": ranks}
"""
    facts = world(tmp_path, 2, script)
    assert facts[0]["before"] > 9_000_000
    assert facts[0]["stopped"] == facts[0]["before"], "what waits stays while the rank takes nothing, and no more comes"
    assert (facts[0]["after"], facts[0]["got"]) == (0, [99])
    assert facts[1]["got"] == [[i, True, 3_000_000] for i in (1, 2, 3, 5, 6, 7)]


def test_messages_of_a_forgotten_rank_are_received_whole_and_passed_aside(tmp_path: Path) -> None:
    script = """
async def script(mesh):
    if mesh.rank == 1:
        for i in range(3):
            mesh.send(0, large(i, 3_000_000))
        await until(lambda: got)
        mesh.send(0, wire.Fatal(5, ""))
        await until(lambda: len(got) == 2)
        return {}
    aside = []
    mesh.from_lost = lambda rank, message: aside.append((rank, message.rank))
    mesh._handler = lambda *message: (handler(*message), mesh.drop(1))
    await until(lambda: len(got) + len(aside) == 3)
    seen, mesh._handler = len(got), handler
    mesh.remember(1)
    mesh.send(1, wire.Fatal(1, ""))
    await until(lambda: len(got) == seen + 1)
    mesh.send(1, wire.Fatal(2, ""))
    return {"aside": aside, "seen": seen, "last": got[-1][1].rank}
"""
    facts = world(tmp_path, 2, script)
    assert (facts[0]["seen"], facts[0]["aside"]) == (1, [[1, 1], [1, 2]])
    assert facts[0]["last"] == 5


def test_bytes_that_are_no_message_are_counted_and_ignored(tmp_path: Path) -> None:
    script = """
async def script(mesh):
    if mesh.rank == 1:
        link = mesh._links.setdefault(0, Outgoing(world, 0, lambda rank: None))
        for junk in (b"\\x80\\x04junk", b"", b"\\x92\\x00\\x81\\xa4type\\xa4Evil"):
            link.put(junk)
        mesh.send(0, wire.Fatal(7, ""))
        await asyncio.sleep(0.5)
        return {}
    said = []
    mesh.on_rejected = lambda sender, reason: said.append((sender, reason))
    await until(lambda: got)
    return {"got": [m.rank for _, m in got], "said": said}
"""
    facts = world(tmp_path, 2, script)
    ((sender, reason),) = facts[0].pop("said")
    assert facts[0] == {"got": [7]}
    assert sender == 1
    assert reason.startswith("a message of 6 bytes cannot be read (")
    assert reason.endswith("): 80046a756e6b")


def test_idle_ranks_use_hardly_any_processor_time(tmp_path: Path) -> None:
    script = """
async def script(mesh):
    await asyncio.sleep(1.0)
    before = resource.getrusage(resource.RUSAGE_SELF)
    await asyncio.sleep(4.0)
    after = resource.getrusage(resource.RUSAGE_SELF)
    return {"share": (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime) / 4.0}
"""
    facts = world(tmp_path, 4, script)
    assert sum(fact["share"] for fact in facts.values()) < 0.06, (
        "the agents' own polling, together, as a share of one core"
    )


@pytest.mark.slow
def test_a_world_that_never_meets_ends(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import os\nfrom libra_hpc.mesh import world\nfrom libra_hpc.process import owner_link\n"
        "owner_link.MEET_S, owner = 3, owner_link.OwnerLink()\n"
        "if owner.rank == 1:\n    os._exit(15)\nworld.meet(owner)\nos._exit(0)\n"
    )
    assert ranks(3, tmp_path, program).stdout == "exit codes by rank: 1 15 1\n"
