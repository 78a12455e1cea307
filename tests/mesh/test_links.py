"""Streams between agents, in one process: strangers, connections that break, and what follows."""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from libra_hpc.mesh import links
from libra_hpc.mesh import mesh as mesh_module
from libra_hpc.mesh.links import HEADER, Outgoing, accept
from libra_hpc.mesh.mesh import Mesh
from libra_hpc.mesh.world import Endpoint, World
from libra_hpc.protocol.agents import RankLost

SECRET = secrets.token_bytes(32)


def worlds(size: int = 2) -> list[World]:
    """Ranks of one run, all in this process."""
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(size)]
    for listener in listeners:
        listener.setblocking(False)
    endpoints = tuple(Endpoint("here", ("127.0.0.1",), listener.getsockname()[1]) for listener in listeners)
    return [World(rank, endpoints, SECRET, listener) for rank, listener in enumerate(listeners)]


@asynccontextmanager
async def serving() -> AsyncIterator[tuple[list[World], list[tuple[int, bytes, bytes]]]]:
    """Two ranks, and what the second one has received: (rank, frame, blob)."""
    ranks, received = worlds(), list[tuple[int, bytes, bytes]]()
    task = asyncio.create_task(accept(ranks[1], lambda rank, frame, blob: received.append((rank, frame, bytes(blob)))))
    async with asyncio.timeout(30.0):
        yield ranks, received
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    for world in ranks:
        world.listener.close()


async def until(condition: Callable[[], object]) -> None:
    while not condition():
        await asyncio.sleep(0.005)


async def test_frames_and_blobs_of_every_size_arrive_in_order() -> None:
    sent = [
        (bytes([i]) * size, bytes([i]) * blob)
        for i, (size, blob) in enumerate([(1, 0), (70_000, 0), (3, 5), (0, 9_000_000), (200, 0), (65_536, 65_536)])
    ]

    async with serving() as (ranks, received):
        link, taken = Outgoing(ranks[0], 1, lambda rank: None), list[bool]()
        for frame, blob in sent:
            link.put(frame, memoryview(blob), taken.append)
        assert link.pending == sum(len(frame) + len(blob) for frame, blob in sent)
        await until(lambda: len(received) == len(taken) == len(sent))
        assert received == [(0, frame, blob) for frame, blob in sent]
        assert (taken, link.pending) == ([True] * len(sent), 0)


async def test_a_caller_without_the_secret_is_turned_away_and_harms_nobody() -> None:
    async with serving() as (ranks, received):
        broken: list[int] = []
        stranger = World(0, ranks[0].endpoints, secrets.token_bytes(32), ranks[0].listener)
        Outgoing(stranger, 1, broken.append).put(b"evil", memoryview(b""), None)
        for junk in (b"", b"GET / HTTP/1.1\r\n\r\n" * 10, bytes(300)):
            _, writer = await asyncio.open_connection("127.0.0.1", ranks[1].endpoints[1].port)
            writer.write(junk)
            writer.close()
        await until(lambda: broken)
        Outgoing(ranks[0], 1, broken.append).put(b"good", memoryview(b""), None)
        await until(lambda: received)
        assert (received, broken) == ([(0, b"good", b"")], [1])


async def test_a_frame_beyond_all_sizes_ends_the_connection() -> None:
    async with serving() as (ranks, _):
        stream = await links._connect(ranks[0], 1)
        await asyncio.get_running_loop().sock_sendall(stream, HEADER.pack((1 << 32) - 1, 0))
        assert await asyncio.get_running_loop().sock_recv(stream, 1) == b""
        stream.close()


async def test_what_waits_for_a_rank_that_is_gone_is_dropped_and_a_new_one_is_reached_after_reopen() -> None:
    async with asyncio.timeout(30.0):
        ranks = worlds()
        port = ranks[1].endpoints[1].port
        ranks[1].listener.close()
        broken, taken = list[int](), list[bool]()
        link = Outgoing(ranks[0], 1, broken.append)
        link.put(b"1", memoryview(b"x" * 1000), taken.append)
        link.put(b"2", memoryview(b""), taken.append)
        await until(lambda: len(taken) == 2)
        link.put(b"3", memoryview(b""), taken.append)
        assert (taken, broken, link.pending) == ([False] * 3, [1], 0)
        received: list[bytes] = []
        listener = socket.create_server(("127.0.0.1", port))
        listener.setblocking(False)
        served = asyncio.create_task(
            accept(World(1, ranks[1].endpoints, SECRET, listener), lambda rank, frame, blob: received.append(frame))
        )
        link.reopen()
        link.put(b"4", memoryview(b""), taken.append)
        await until(lambda: received)
        assert (received, taken) == ([b"4"], [False] * 3 + [True])
        served.cancel()
        listener.close()


async def test_a_stream_that_broke_in_the_middle_carries_nothing_more_until_reopened() -> None:
    async with serving() as (ranks, received):
        broken, taken = list[int](), list[bool]()
        link = Outgoing(ranks[0], 1, broken.append)
        link.put(b"1", memoryview(b""), taken.append)
        await until(lambda: received)
        assert link._socket is not None
        link._socket.shutdown(socket.SHUT_RDWR)
        link.put(b"2", memoryview(b""), taken.append)
        await until(lambda: broken)
        link.put(b"3", memoryview(b""), taken.append)
        link.reopen()
        link.put(b"4", memoryview(b""), taken.append)
        await until(lambda: len(received) == 2)
        assert ([frame for _, frame, _ in received], taken) == ([b"1", b"4"], [True, False, False, True])


async def test_a_rank_stays_unreachable_after_it_is_tried_again_until_it_is_remembered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mesh_module, "SETTLE_S", 0.0)

    async with serving() as (ranks, received):
        mesh, taken = Mesh(ranks[0], lambda *_: None), list[bool]()
        mesh.send(1, RankLost(1), b"", taken.append)
        await until(lambda: received)
        stream = mesh._links[1]._socket
        assert stream is not None
        stream.shutdown(socket.SHUT_RDWR)
        mesh.send(1, RankLost(2), b"", taken.append)
        await until(mesh.unreachable)
        mesh.reopen(1)
        mesh.send(1, RankLost(3), b"", taken.append)
        await until(lambda: len(received) == 2)
        assert (mesh.unreachable(), taken) == ((1,), [True, False, True]), "what was lost is still to be reported"
        mesh.remember(1)
        assert mesh.unreachable() == ()
