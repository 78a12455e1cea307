"""What it costs rank 0 to bring the MPI processes of a thousand nodes together, by messages as they are."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import asyncio, json, os, socket, sys, time
from types import SimpleNamespace
from libra_hpc.agent import agent as module
from libra_hpc.mesh import links
from libra_hpc.mesh.layout_publisher import Publisher
from libra_hpc.mesh.mesh import Mesh
from libra_hpc.mesh.world import Endpoint, World
from libra_hpc.process.child import raise_limits
from libra_hpc.protocol.agents import MpiStart
from libra_hpc.protocol.start_up import KeyValueSpace

size, released, met = int(sys.argv[1]), [], asyncio.Event()
raise_limits(2 * size)

class Link:
    # Says what MPICH says, of which a node's address takes 9 lines.
    alive = False
    def __init__(self, index, size, secret, world):
        self.index, self.space = index, KeyValueSpace(size, "w")
    def key(self, index, part):
        return f"-allgather-1-{index}" + (f"-seg-{part}/9" if part else "")
    def serve(self, received, ended, barrier):
        for part in range(10):
            value = os.urandom(110).hex() + 150 * "0" if part else "segments=9"
            self.space.answer(f"cmd=put kvsname=w key={self.key(self.index, part)} value={value}")
        barrier(self.space.put())
    def release(self, others):
        released.append(self.index)
        if self.index in (0, size - 1):
            self.space.take(others)
            for index in range(size):
                for part in range(10):
                    assert "success" in self.space.answer(f"cmd=get kvsname=w key={self.key(index, part)}")
        if len(released) == (size - 1 if self.index else 1):
            met.set()

class Node(module.Agent):
    def __init__(self, rank):
        self.rank, self._secret, self._link = rank, b"s", None
        self.mesh = Mesh(World(rank, endpoints, b"s" * 32, listeners[rank]), self.on)
        self.context = SimpleNamespace(publisher=None)
        self._running = asyncio.create_task(self.mesh.run())
    def on(self, source, message):
        (self._on_mpi_start if isinstance(message, MpiStart) else self._on_barrier)(message)

async def others():
    nodes = [Node(rank) for rank in range(1, size)]
    await met.wait()
    os._exit(len(set(released)) != size - 1)

async def first():
    node = Node(0)
    publisher = node.context.publisher = Publisher(node.mesh, b"s", lambda kind, **fields: None, print)
    publisher._ranks = range(size)
    began = time.process_time()
    publisher._relink(0.0)
    await met.wait()
    await node.mesh.drain(60)
    assert os.waitpid(child, 0)[1] == 0
    print(json.dumps([time.process_time() - began, sum(sent)]))

sent = []
put = links.Outgoing.put
links.Outgoing.put = lambda self, frame: (sent.append(len(frame)), put(self, frame))
module.MpiLink = Link
listeners = [socket.create_server(("127.0.0.1", 0), backlog=size) for _ in range(size)]
[listener.setblocking(False) for listener in listeners]
endpoints = tuple(Endpoint("n", ("127.0.0.1",), listener.getsockname()[1]) for listener in listeners)
child = os.fork()
asyncio.run(first() if child else others())
"""


@pytest.mark.parametrize(
    ("size", "most_mb"),
    [pytest.param(256, 12, marks=pytest.mark.slow), pytest.param(1024, 50, marks=pytest.mark.nightly)],
)
def test_new_mpi_processes_of_all_nodes_cost_rank_0_little(size: int, most_mb: int, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, str(tmp_path / "program.py"), str(size)], capture_output=True, text=True, timeout=240
    )
    assert not done.returncode, done.stderr[-3000:]
    cpu_s, sent_bytes = json.loads(done.stdout)
    assert cpu_s < 4.0
    assert sent_bytes < most_mb * 1e6
