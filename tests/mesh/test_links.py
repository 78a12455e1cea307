"""Streams between agents, in one process: strangers, connections that break, and what follows."""

from __future__ import annotations

import asyncio
import secrets
import socket
import tracemalloc
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from libra_hpc.mesh import links
from libra_hpc.mesh import mesh as mesh_module
from libra_hpc.mesh.links import HEADER, MAX_FRAME_BYTES, Outgoing, accept
from libra_hpc.mesh.mesh import Mesh
from libra_hpc.mesh.world import Endpoint, World
from libra_hpc.protocol.agents import StopAgent
from libra_hpc.protocol.agents import mesh as codec
from libra_hpc.protocol.callers import NONCE_BYTES, PROOF_BYTES, PROVE_S
from tests.stage.waiting import until

SECRET = secrets.token_bytes(32)


def worlds(size: int = 2) -> list[World]:
    """Ranks of one run, all in this process."""
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(size)]
    for listener in listeners:
        listener.setblocking(False)
    endpoints = tuple(Endpoint("here", ("127.0.0.1",), listener.getsockname()[1]) for listener in listeners)
    return [World(rank, endpoints, SECRET, listener) for rank, listener in enumerate(listeners)]


@asynccontextmanager
async def serving() -> AsyncIterator[tuple[list[World], list[tuple[int, bytes]]]]:
    """Two ranks, and what the second one has received: (rank, frame)."""
    ranks, received = worlds(), list[tuple[int, bytes]]()
    task = asyncio.create_task(accept(ranks[1], lambda rank, frame: received.append((rank, frame))))
    async with asyncio.timeout(30.0):
        yield ranks, received
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    for world in ranks:
        world.listener.close()


async def test_frames_of_every_size_arrive_in_order() -> None:
    sent = [bytes([i]) * size for i, size in enumerate((1, 70_000, 3, 9_000_000, 200, 0, 65_536, 65_536))]

    async with serving() as (ranks, received):
        link = Outgoing(ranks[0], 1, lambda rank: None)
        for frame in sent:
            link.put(frame)
        assert link.pending == sum(map(len, sent))
        await until(lambda: len(received) == len(sent) and not link.pending)
        assert received == [(0, frame) for frame in sent]


async def test_a_caller_without_the_secret_is_turned_away_and_harms_nobody() -> None:
    async with serving() as (ranks, received):
        broken: list[int] = []
        stranger = World(0, ranks[0].endpoints, secrets.token_bytes(32), ranks[0].listener)
        Outgoing(stranger, 1, broken.append).put(b"evil")
        for junk in (b"", b"GET / HTTP/1.1\r\n\r\n" * 10, bytes(300)):
            _, writer = await asyncio.open_connection("127.0.0.1", ranks[1].endpoints[1].port)
            writer.write(junk)
            writer.close()
        await until(lambda: broken)
        Outgoing(ranks[0], 1, broken.append).put(b"good")
        await until(lambda: received)
        assert (received, broken) == ([(0, b"good")], [1])


async def test_a_frame_beyond_all_sizes_ends_the_connection() -> None:
    async with serving() as (ranks, _):
        stream, _ = await links._connect(ranks[0], 1)
        await asyncio.get_running_loop().sock_sendall(stream, HEADER.pack((1 << 32) - 1))
        assert await asyncio.get_running_loop().sock_recv(stream, 1) == b""
        stream.close()


async def test_memory_is_taken_for_what_has_come_and_not_for_what_is_announced() -> None:
    async with serving() as (ranks, _):
        stream, _ = await links._connect(ranks[0], 1)
        tracemalloc.start()
        await asyncio.get_running_loop().sock_sendall(stream, HEADER.pack(MAX_FRAME_BYTES) + bytes(1 << 20))
        await asyncio.sleep(0.2)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert 1 << 20 < peak < 32 << 20
        stream.close()


Units = list[bytes]
"""Frames as they travel."""
FRAMES = [b"first", b"other", b"third", b"final"]
UNIT = HEADER.size + len(FRAMES[0]) + PROOF_BYTES
RELAYED: dict[str, tuple[Callable[[Units, Units], Units], int]] = {
    "as they are": (lambda units, before: units, 4),
    "one put in": (lambda units, before: [*units[:2], HEADER.pack(5) + b"wrong" + bytes(PROOF_BYTES), *units[2:]], 2),
    "one put in at the end": (lambda units, before: [*units, HEADER.pack(0) + bytes(PROOF_BYTES)], 4),
    "one changed": (lambda units, before: [units[0], units[1].replace(b"other", b"Other"), *units[2:]], 1),
    "a tag changed": (lambda units, before: [units[0][:-1] + bytes([units[0][-1] ^ 1]), *units[1:]], 0),
    "a length changed": (lambda units, before: [units[0], HEADER.pack(4) + units[1][4:], *units[2:]], 1),
    "two merged": (lambda units, before: [HEADER.pack(UNIT + 5), *units], 0),
    "exchanged": (lambda units, before: [units[0], units[2], units[1], units[3]], 1),
    "one repeated": (lambda units, before: [units[0], *units], 1),
    "one left out": (lambda units, before: [units[0], *units[2:]], 1),
    "the first left out": (lambda units, before: units[1:], 0),
    "those of the stream before": (lambda units, before: before, 0),
    "one of the stream before": (lambda units, before: [units[0], before[1], *units[2:]], 1),
    "sent back": (lambda units, before: [units[0], *reversed(units)], 1),
}


@pytest.mark.parametrize("change", RELAYED)
async def test_who_carries_a_stream_cannot_change_what_it_says(change: str) -> None:
    altered, arrive = RELAYED[change]
    async with serving() as (ranks, received):
        streams = list[Units]()
        for _ in range(2):
            stream, seal = await links._connect(ranks[0], 1)
            streams.append([])
            for frame in FRAMES:
                await seal.put(unit := bytearray(), frame)
                streams[-1].append(bytes(unit))
        await asyncio.get_running_loop().sock_sendall(stream, b"".join(altered(streams[1], streams[0])))
        stream.shutdown(socket.SHUT_WR)
        assert await asyncio.get_running_loop().sock_recv(stream, 1) == b""
        assert [frame for _, frame in received] == FRAMES[:arrive]


async def test_silent_callers_keep_no_rank_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "MOST_UNPROVEN", 8)
    async with serving() as (ranks, received):
        silent = [await asyncio.open_connection("127.0.0.1", ranks[1].endpoints[1].port) for _ in range(40)]
        Outgoing(ranks[0], 1, lambda rank: None).put(b"good")
        async with asyncio.timeout(PROVE_S / 2):
            await until(lambda: received)
            assert len(await silent[0][0].read()) == NONCE_BYTES, "the oldest is disconnected"


async def test_what_waits_for_a_rank_that_is_gone_is_dropped_and_a_new_one_is_reached_after_reopen() -> None:
    async with asyncio.timeout(30.0):
        ranks = worlds()
        port = ranks[1].endpoints[1].port
        ranks[1].listener.close()
        broken = list[int]()
        link = Outgoing(ranks[0], 1, broken.append)
        link.put(b"1" * 1000)
        link.put(b"2")
        await until(lambda: broken)
        link.put(b"3")
        assert (broken, link.pending) == ([1], 0)
        received: list[bytes] = []
        listener = socket.create_server(("127.0.0.1", port))
        listener.setblocking(False)
        served = asyncio.create_task(
            accept(World(1, ranks[1].endpoints, SECRET, listener), lambda rank, frame: received.append(frame))
        )
        link.reopen()
        link.put(b"4")
        await until(lambda: received)
        assert received == [b"4"]
        served.cancel()
        listener.close()


async def test_a_stream_that_is_closed_at_the_other_end_is_noticed_before_the_next_message() -> None:
    broken: list[int] = []
    async with serving() as (ranks, received):
        link = Outgoing(ranks[0], 1, broken.append)
        link.put(b"one")
        await until(lambda: received)
        assert link._socket is not None
        link._socket.shutdown(socket.SHUT_WR)  # the receiver closes what ended
        await until(lambda: broken)
        link.put(b"lost")
        link.reopen()
        link.put(b"two")
        await until(lambda: len(received) == 2)
    assert (received, broken) == ([(0, b"one"), (0, b"two")], [1])


async def test_a_rank_stays_unreachable_after_it_is_tried_again_until_it_is_remembered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mesh_module, "SETTLE_S", 0.0)

    async with serving() as (ranks, received):
        mesh = Mesh(ranks[0], lambda *_: None)
        mesh.send(1, StopAgent(str(1)))
        await until(lambda: received)
        stream = mesh._links[1]._socket
        assert stream is not None
        stream.shutdown(socket.SHUT_RDWR)
        mesh.send(1, StopAgent(str(2)))
        await until(mesh.unreachable)
        mesh.reopen(1)
        mesh.send(1, StopAgent(str(3)))
        await until(lambda: len(received) == 2)
        assert mesh.unreachable() == (1,), "what was lost is still to be reported"
        assert [codec.decode(frame) for _, frame in received] == [StopAgent(str(1)), StopAgent(str(3))]
        mesh.remember(1)
        assert mesh.unreachable() == ()
