"""The mesh on real MPI ranks: order, blobs, dead peers, foreign bytes, and what an idle agent costs."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(importlib.util.find_spec("mpi4py") is None, reason="mpi4py is not installed")

PRELUDE = """
import asyncio, json, os, resource, signal, sys, time
from pathlib import Path
from libra_hpc.pool.mesh import MPI, Mesh, TAG_FRAME, meet
from libra_hpc.protocol import mesh as wire
out = Path(sys.argv[1])
comm = meet()
got = []
def handler(source, message, blob):
    got.append((source, message, blob))
async def main():
    mesh = Mesh(comm, handler)
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
def finish():
    facts = asyncio.run(main())
    (out / f"{comm.rank}.json").write_text(json.dumps(facts))
    os._exit(0)
"""


def world(tmp_path: Path, size: int, script: str) -> dict[int, Any]:
    """Run ``script`` on ``size`` ranks; returns what each surviving rank found."""
    program = tmp_path / "program.py"
    program.write_text(PRELUDE + script + "\nfinish()\n")
    command = [sys.executable, "-m", "libra_hpc.slurm.ranks", "--size", str(size), "--logs", str(tmp_path), "--", sys.executable, str(program), str(tmp_path)]
    subprocess.run(command, check=False, timeout=120, stdout=subprocess.DEVNULL)
    found = {rank: tmp_path / f"{rank}.json" for rank in range(size)}
    logs = "\n".join(path.read_text() for path in tmp_path.glob("*.log"))
    assert found[0].exists(), logs
    return {rank: json.loads(path.read_text()) for rank, path in found.items() if path.exists()}


def test_polling_adds_a_twentieth_of_the_wait_or_a_moment() -> None:
    from libra_hpc.pool.mesh import POLL_MAX_S, POLL_MIN_S, POLL_SHARE, pause

    # Of what waits for an answer, the polls that find nothing yet; the one that finds it comes at most a pause late.
    for answer_s in (0.0, 0.0004, 0.008, 0.05, 0.3, 2.0, 60.0):
        found = 0.0
        while found < answer_s:
            found += pause(found)
        assert found - answer_s <= max(POLL_MIN_S, POLL_SHARE * answer_s)
    assert pause(3600.0) == POLL_MAX_S


def test_messages_arrive_in_order_with_their_blobs_from_everyone_at_once(tmp_path: Path) -> None:
    facts = world(
        tmp_path,
        3,
        """
async def script(mesh):
    for i in range(40):
        for dest in range(mesh.size):
            if i % 10 == 0:
                mesh.send(dest, wire.WeightsChunk(i, 0, 0, 0, ()), memoryview(bytes([mesh.rank]) * (1 + 300_000 * (i % 3))))
            else:
                mesh.send(dest, wire.RankLost(i))
    await until(lambda: len(got) == 40 * mesh.size)
    order = {}
    for source, message, blob in got:
        order.setdefault(source, []).append(message.version if blob else message.rank)
        assert set(blob) <= {source}
    return {"order": order, "bytes": sum(len(b) for _, _, b in got), "rejected": mesh.rejected}
""",
    )
    assert len(facts) == 3
    for fact in facts.values():
        assert all(order == list(range(40)) for order in fact["order"].values())
        assert fact["bytes"] == 3 * sum(1 + 300_000 * (i % 3) for i in (0, 10, 20, 30))
        assert fact["rejected"] == 0


def test_a_dead_peer_blocks_nobody(tmp_path: Path) -> None:
    facts = world(
        tmp_path,
        3,
        """
async def script(mesh):
    if mesh.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    await asyncio.sleep(1.0)
    for i in range(30):
        mesh.send(2, wire.WeightsChunk(i, 0, 0, 0, ()), memoryview(b"x" * 500_000))
        mesh.send(1 - mesh.rank, wire.RankLost(i))
    await until(lambda: len(got) == 30)
    mesh.forget(2)
    mesh.send(2, wire.RankLost(99))
    return {"got": [m.rank for _, m, _ in got]}
""",
    )
    assert facts[0]["got"] == facts[1]["got"] == list(range(30))
    assert 2 not in facts


def test_bytes_that_are_no_message_are_counted_and_ignored(tmp_path: Path) -> None:
    facts = world(
        tmp_path,
        2,
        """
async def script(mesh):
    if mesh.rank == 1:
        for junk in (b"\\x80\\x04junk", b"", b"\\x92\\x00\\x81\\xa4type\\xa4Evil"):
            comm.Send([junk, MPI.BYTE], 0, TAG_FRAME)
        mesh.send(0, wire.RankLost(7))
        await asyncio.sleep(0.5)
        return {}
    await until(lambda: got)
    return {"rejected": mesh.rejected, "got": [m.rank for _, m, _ in got]}
""",
    )
    assert facts[0] == {"rejected": 3, "got": [7]}


def test_idle_ranks_use_hardly_any_processor_time(tmp_path: Path) -> None:
    facts = world(
        tmp_path,
        4,
        """
async def script(mesh):
    await asyncio.sleep(1.0)
    before = resource.getrusage(resource.RUSAGE_SELF)
    await asyncio.sleep(4.0)
    after = resource.getrusage(resource.RUSAGE_SELF)
    return {"share": (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime) / 4.0}
""",
    )
    assert sum(fact["share"] for fact in facts.values()) < 0.06, "the agents' own polling, together, as a share of one core"


def test_a_world_that_never_meets_ends(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import os\n"
        "from libra_hpc.pool import mesh\n"
        "mesh.MEET_S = 3\n"
        "if os.environ['PMI_RANK'] == '1':\n"
        "    os._exit(15)\n"
        "mesh.meet()\n"
        "os._exit(0)\n"
    )
    command = [sys.executable, "-m", "libra_hpc.slurm.ranks", "--size", "3", "--logs", str(tmp_path), "--", sys.executable, str(program)]
    told = subprocess.run(command, check=False, timeout=120, capture_output=True, text=True)
    assert told.stdout == "exit codes by rank: -14 15 -14\n"
