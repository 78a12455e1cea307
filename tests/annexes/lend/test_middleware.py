"""The middleware around a real ASGI app: what its page has while requests are open, and while engines run some."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from libra_hpc.annexes.lend.beside_server import libra_hpc_serving as serving
from libra_hpc.annexes.lend.beside_server.libra_hpc_serving import Watch
from libra_hpc.gate import page as layout
from libra_hpc.gate.page import Page
from tests.stage.waiting import until

httpx = pytest.importorskip("httpx")


PLUGIN = """
import asyncio, sys
from vllm.v1.metrics.loggers import load_stat_logger_plugin_factories
from vllm.v1.metrics.stats import IterationStats, SchedulerStats
import libra_hpc_serving
(kind,) = [one for one in load_stat_logger_plugin_factories() if one.__name__ == "EngineCounts"]
engines = [kind(None, number) for number in range(2)]
async def serve():
    libra_hpc_serving.Watch(None).begin()
    while line := await asyncio.to_thread(sys.stdin.readline):
        for number, (running, waiting, deferred, used) in enumerate(eval(line)):
            stats, tokens = SchedulerStats(running, waiting, deferred), IterationStats()
            tokens.time_to_first_tokens_iter += 20 * [used]
            engines[number].record(stats, tokens, engine_idx=number)
            engines[number].record(None, None, engine_idx=number)
asyncio.run(serve())
"""


@pytest.mark.nightly
def test_the_page_has_what_the_engines_of_vllm_run(tmp_path: Path) -> None:
    page = layout.Page.create(tmp_path / "page")
    beside = str(Path(serving.__file__).parent)
    environment = {**os.environ, serving.VARIABLE: str(tmp_path / "page"), "PYTHONPATH": beside}
    command = [sys.executable, "-c", PLUGIN]
    with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, text=True, bufsize=1) as server:
        assert server.stdin is not None
        for line, expected in (
            ("((2, 1, 0, 0.25), (0, 0, 1, 0.625))", (4, 0.625, 0.0)),
            ("((0, 0, 0, 0.0), (0, 1, 0, 0.125))", (1, 0.625, 0.0)),
            ("((0, 0, 0, 0.0), (0, 0, 0, 0.0))", (0, 0.625, 0.0)),
        ):
            server.stdin.write(line + "\n")
            while (view := page.read())[2:] != expected:
                assert server.poll() is None, view
                time.sleep(0.05)
        server.communicate()
    assert server.returncode == 0


def test_both_sides_have_the_same_layout() -> None:
    for name in ("MAGIC", "FORMAT", "PAGE_BYTES", "SLOT_BYTES", "SLOTS"):
        assert getattr(layout, name) == getattr(serving, name)
    assert (layout.HEAD.format, layout.SLOT.format) == (serving.HEAD.format, serving.SLOT.format)


class Server:
    """An app whose streams go on when a test lets them."""

    def __init__(self) -> None:
        self.go: asyncio.Queue[str] = asyncio.Queue()
        transport = httpx.ASGITransport(app=Watch(self.answer))
        self.client = httpx.AsyncClient(transport=transport, base_url="http://server")

    async def answer(self, scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while scope["path"] != "/health" and (part := await self.go.get()):
            if part == "fail":
                raise RuntimeError("of the server")
            await send({"type": "http.response.body", "body": part.encode(), "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    def begin(self, path: str = "/v1/completions") -> asyncio.Task[Any]:
        return asyncio.ensure_future(self.client.post(path, content=b"x" * 100))


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Page:
    monkeypatch.setenv(serving.VARIABLE, str(tmp_path / "page"))
    return Page.create(tmp_path / "page")


async def serves(page: Page, count: int) -> None:
    await until(lambda: page.read().served == count)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/audio/transcriptions", "/invocations", "/of/tomorrow/"])
async def test_a_post_is_served_until_it_ends_whatever_its_path(path: str, page: Page) -> None:
    server = Server()
    assert (await server.client.get("/health")).status_code == 200
    await serves(page, 0)
    first, second = server.begin(path), server.begin(path)
    await serves(page, 2)
    await server.go.put("a")
    await server.go.put("")
    await serves(page, 1)
    await server.go.put("")
    assert {(await first).text, (await second).text} == {"a", ""}
    await serves(page, 0)


async def test_a_websocket_is_served_until_it_closes(page: Page) -> None:
    closed = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await closed.wait()

    task = asyncio.ensure_future(Watch(app)({"type": "websocket", "path": "/v1/realtime"}, None, None))  # type: ignore[arg-type]
    await serves(page, 1)
    closed.set()
    await task
    await serves(page, 0)


async def test_what_an_engine_runs_after_its_post_is_served_until_its_counts_are_old(
    page: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "ENGINES", {0: (time.monotonic(), 2)})
    server = Server()
    request = server.begin()
    await serves(page, 2)
    await server.go.put("")
    await request
    assert page.read().served == 2
    serving.ENGINES[0] = time.monotonic() - serving.COUNTED_S, 2
    await serves(page, 0)


async def test_first_tokens_count_as_beside_the_guest_once_a_step_of_it_ended_among_its_users(page: Page) -> None:
    server = Server()
    for steps_in, seconds in ((False, 0.125), (True, 0.5), (False, 0.25)):
        page.stepped()
        request = server.begin()
        await serves(page, 1)
        if steps_in:
            page.stepped()
        serving.FIRST.extend(serving.LEAST * [seconds])
        await server.go.put("")
        await request
        await serves(page, 0)
    while (found := page.read()[3:]) != (0.25, 0.5):
        assert found in ((0.125, 0.0), (0.125, 0.5), (0.0, 0.0))
        await asyncio.sleep(0.05)


def test_the_quantile_alone_is_at_the_loads_of_those_beside() -> None:
    first = serving.FirstTokens()
    for served, seconds in ((1, 0.1), (8, 0.9)):
        for number in range(100):
            first.add(seconds + number / 1e6, served, beside=False)
    assert first.p99() == (pytest.approx(0.9, abs=1e-3), 0.0)
    for number in range(100):
        first.add(0.2 + number / 1e6, 1, beside=True)
    assert first.p99() == (pytest.approx(0.1, abs=1e-3), pytest.approx(0.2, abs=1e-3))


async def test_an_answer_that_fails_is_not_counted_for_ever(page: Page) -> None:
    server = Server()
    request = server.begin()
    await serves(page, 1)
    await server.go.put("fail")
    with pytest.raises(RuntimeError, match="of the server"):
        await request
    await serves(page, 0)


async def test_the_slot_is_written_while_nobody_asks(page: Page) -> None:
    server = Server()
    await server.client.get("/health")
    written = page.read().written
    while page.read().written == written:
        await asyncio.sleep(0.05)


@pytest.mark.parametrize("content", [None, b"", b"x" * 4096])
async def test_a_server_without_a_good_page_serves_on_and_says_so_once(
    content: bytes | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(serving.VARIABLE, str(tmp_path / "page"))
    if content is not None:
        (tmp_path / "page").write_bytes(content)
    server = Server()
    for _ in range(3):
        await server.go.put("a")
        await server.go.put("")
        assert (await server.begin()).text == "a"
    assert capsys.readouterr().err.count("libra_hpc_serving: no request is counted here") == 1


async def test_two_processes_of_a_server_have_a_slot_each(page: Page) -> None:
    servers = [Server(), Server()]
    for server in servers:
        await server.client.get("/health")
    one, two = servers[0].begin(), servers[1].begin()
    await serves(page, 2)
    for server in servers:
        await server.go.put("")
    await asyncio.gather(one, two)
    await serves(page, 0)
