"""The owner's connections: a killed process ends its own, whatever else happens to it or the network."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from libra_hpc.owner import rank_links as module
from libra_hpc.owner.rank_links import RankLinks
from libra_hpc.process.owner_link import LINK, OWNER, NoWorld, OwnerLink, call_owner

TASK = """
import time
print("here", flush=True)
time.sleep(60)
"""


@pytest.fixture
def links() -> RankLinks:
    return RankLinks(2)


def task(links: RankLinks, owner: str, rank: int) -> subprocess.Popen[bytes]:
    """A rank as Slurm starts it, which has joined."""
    places = {OWNER: owner, "SLURM_PROCID": str(rank), "SLURMD_NODENAME": f"n{rank}"}
    argv = [sys.executable, "-m", "libra_hpc.slurm.rank", "-c", TASK]
    process = subprocess.Popen(argv, env={**os.environ, **places}, stdout=subprocess.PIPE)
    until(links, lambda: rank in links.nodes)
    assert process.stdout is not None
    assert process.stdout.readline() == b"here\n"
    return process


def until(links: RankLinks, condition: object) -> None:
    while not condition():  # type: ignore[operator]
        links.wait(0.05)


def test_a_killed_task_is_gone_and_a_stopped_one_is_not(links: RankLinks) -> None:
    owner = links.open(["127.0.0.1"])
    killed, stopped = (task(links, owner, rank) for rank in range(2))
    assert links.nodes == {0: "n0", 1: "n1"}
    os.kill(stopped.pid, signal.SIGSTOP)
    links.wait(0.2)
    assert not links.gone
    killed.kill()
    until(links, lambda: links.gone)
    assert list(links.gone) == [0]
    stopped.kill()
    until(links, lambda: 1 in links.gone)
    links.close()


def test_all_get_the_records_of_all_in_each_round_also_where_the_kernel_has_little_room(
    links: RankLinks, monkeypatch: pytest.MonkeyPatch
) -> None:
    agents = []
    for rank in range(2):
        stream, link = links.born(rank)
        links._streams[rank].stream.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        monkeypatch.setenv(LINK, link)
        agents.append(OwnerLink())
        stream.detach()
    assert [(agent.rank, agent.size) for agent in agents] == [(0, 2), (1, 2)]
    assert agents[0].secret == agents[1].secret != links._secret
    with ThreadPoolExecutor() as pool:
        for _ in range(2):
            records = [os.urandom(10_000) for _ in agents]
            answers = [pool.submit(agent.gather, record) for agent, record in zip(agents, records, strict=True)]
            until(links, lambda asked=answers: all(answer.done() for answer in asked))
            assert [answer.result() for answer in answers] == [records] * 2
    links.close()


async def test_all_get_the_end_of_a_rank_with_its_reason_also_one_that_joins_later(
    links: RankLinks, monkeypatch: pytest.MonkeyPatch
) -> None:
    agents = []
    for rank in range(3):
        stream, link = links.born(rank)
        monkeypatch.setenv(LINK, link)
        agents.append(OwnerLink())
        stream.detach()
        if rank == 1:
            links.announce(7, "Slurm set node a800-7 down")
    for agent in agents:
        agent.serve()
    agents[0].met()
    links.announce(7)
    links.announce(8)
    until(links, lambda: links.met)
    while any(agent.lost != {7: "Slurm set node a800-7 down", 8: ""} for agent in agents):
        await asyncio.sleep(0.01)
    links.close()
    await asyncio.sleep(0.05)


def test_strangers_are_turned_away_and_end_nobody(
    links: RankLinks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MOST_UNPROVEN", 2)
    monkeypatch.setattr(module, "CALL_S", 0.3)
    owner = links.open(["127.0.0.1"])
    secret, size, port, address = owner.split()
    own = task(links, owner, 0)
    monkeypatch.setenv(OWNER, f"{'00' * len(bytes.fromhex(secret))} {size} {port} {address}")
    calls = [socket.create_connection((address, int(port))) for _ in range(4)]
    until(links, lambda: len(links._callers) == 2)
    calls[3].sendall(b"\xff" * 64)
    began = time.monotonic()
    until(links, lambda: not links._callers)
    assert time.monotonic() - began > 0.1, "a silent one has its time"
    assert (list(links.nodes), links.gone, links.met) == ([0], {}, False)
    own.kill()
    until(links, lambda: links.gone)
    links.close()
    monkeypatch.setenv(OWNER, owner)
    assert call_owner(0, "n0") == -1
    with pytest.raises(NoWorld) as refused:
        OwnerLink().gather(b"")
    assert str(refused.value) == f"n0 cannot reach the owner of the run (127.0.0.1 port {port})"
    assert refused.value.rank == 0, "it leaves why, as no other rank can"
