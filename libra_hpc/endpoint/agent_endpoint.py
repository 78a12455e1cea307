"""The HTTP server of a host: every episode is an endpoint of its own, found by its key.

The key comes as a bearer token, ``x-api-key``, ``X-Session-ID``, or first in the path. Equal bodies in flight get one
answer, and so does the retry of a request whose client had gone. A client waits as long as its turn takes; a stream
gets a comment every `KEEP_ALIVE_S`. An unknown or ended key is 410.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import tempfile
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any

from aiohttp import web
from msgspec.structs import replace

from .agent_request import REFUSED, AgentRequest, Answer, RequestRefused
from .apis import APIS, COUNT_PATH, Api
from .fields import Histories

Ask = Callable[[AgentRequest], Awaitable[Answer]]
"""Gets a request and returns its turn; raises `RequestRefused`."""

KEEP_ALIVE_S = 10.0
"""Seconds between two signs of life of a stream that waits."""
LARGEST = 1 << 28
"""Bytes of a body."""
RETRY = "x-stainless-retry-count"
"""Header in which the SDKs of OpenAI and Anthropic count their retries."""
MODELS_PATH = "/v1/models"
PATHS = ", ".join([*(f"POST {path}" for path in APIS), f"GET {MODELS_PATH}"])
MODELS = {"object": "list", "data": [{"id": "policy", "object": "model", "created": 0, "owned_by": "libra-hpc"}]}


class _Session:
    """One episode's requests, by a digest of their bodies: those in flight, and those nobody has read."""

    def __init__(self, ask: Ask) -> None:
        self._ask = ask
        self.before = defaultdict[str, Histories](Histories)
        """By the path: each API reads items in its own way."""
        self._made: dict[bytes, asyncio.Future[Answer]] = {}
        self.numbers = Counter[str]()
        """The trajectory's numbers of its requests."""
        self._delivered: bytes = b""
        """The request that was answered last, for its retries."""

    def made(self, digest: bytes, request: AgentRequest, retry: bool) -> asyncio.Future[Answer]:
        known = self._made.get(digest)
        if known is not None and (retry or digest != self._delivered):
            return known
        made = self._made[digest] = asyncio.ensure_future(self._ask(request))
        # An answer that nobody reads any more is no error.
        made.add_done_callback(lambda one: one.cancelled() or one.exception())
        return made

    def delivered(self, digest: bytes) -> None:
        if self._delivered != digest:
            self._made.pop(self._delivered, None)
        self._delivered = digest

    def refused(self, digest: bytes, why: BaseException) -> None:
        self._made.pop(digest, None)
        self.numbers["refused_requests"] += isinstance(why, RequestRefused) and why.code == REFUSED


class AgentEndpoint:
    """``url``: the address of all episodes, once `start` has returned."""

    def __init__(self) -> None:
        self.url = ""
        self.socket = Path(tempfile.gettempdir(), f"endpoint-{secrets.token_hex(4)}.sock")
        """The same for boxes without network."""
        self._sessions: dict[str, _Session] = {}
        self._runner: web.ServerRunner | None = None
        self._starting = asyncio.Lock()

    async def start(self) -> None:
        """Listen on a free port of this node; once, whoever calls."""
        async with self._starting:
            if not self.url:
                await self._start()

    async def _start(self) -> None:
        request = partial(web.BaseRequest, loop=asyncio.get_running_loop(), client_max_size=LARGEST)
        # Without aiohttp's applications, whose routes and signals take a tenth of a request.
        self._runner = web.ServerRunner(web.Server(self._handle, request_factory=request, access_log=None))
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        await web.UnixSite(self._runner, str(self.socket)).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self.socket.unlink(missing_ok=True)

    def open(self, key: str, ask: Ask) -> Counter[str]:
        """Open an episode; returns numbers of its requests, which grow."""
        self._sessions[key] = _Session(ask)
        return self._sessions[key].numbers

    def close(self, key: str) -> None:
        self._sessions.pop(key, None)

    async def _handle(self, http: web.BaseRequest) -> web.StreamResponse:
        key, mark, rest = http.path.partition("/v1/")
        path = mark + rest
        if (http.method, path) == ("GET", MODELS_PATH):
            return web.json_response(MODELS)
        # Whoever asks for a path that is not there with Anthropic's version is answered in its form.
        api = APIS.get(path) or APIS["/v1/messages" if "anthropic-version" in http.headers else "/v1/chat/completions"]
        try:
            if path not in APIS or http.method != "POST":
                raise RequestRefused(404, "not_found", f"{http.method} {http.path:.200}: no such path; valid: {PATHS}.")
            return await self._answered(api, key[1:] or _key(http), http)
        except RequestRefused as why:
            return web.json_response(api.error(why), status=why.status)

    async def _answered(self, api: Api, key: str, http: web.BaseRequest) -> web.StreamResponse:
        if http.headers.get("Expect", "").lower() == "100-continue":
            # curl waits a second for it, other clients for ever.
            await http.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        raw = await http.read() if key in self._sessions else b""
        session = self._sessions.get(key)  # it may have ended meanwhile, and nobody would answer
        if session is None:
            raise RequestRefused(410, "gone", "There is no such episode, or it has ended.")
        digest = blake2b(raw, digest_size=16, person=http.path[-16:].encode()).digest()
        try:
            request = api.read(_object(raw), session.before[http.path])
            if http.path.endswith(COUNT_PATH):
                request = replace(request, counts=True, stream=False)
            made = session.made(digest, request, http.headers.get(RETRY, "0") != "0")
            sent = await (_streamed if request.stream else _whole)(api, request, made, http)
        except RequestRefused as why:
            session.refused(digest, why)
            raise
        except ConnectionResetError:
            return web.Response()  # to nobody: the client has gone, and its retry gets the answer
        session.delivered(digest)
        if late := made.exception():
            session.refused(digest, late)  # in a stream, as its last event
        return sent


def _key(http: web.BaseRequest) -> str:
    given = http.headers
    bearer = given.get("Authorization", "").removeprefix("Bearer ")
    return given.get("X-Session-ID") or given.get("x-api-key") or bearer


def _object(raw: bytes) -> dict[str, Any]:
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise RequestRefused(400, "invalid_request_error", f"The body is no JSON ({error}).") from error
    if not isinstance(body, dict):
        raise RequestRefused(400, "invalid_request_error", "The body is no JSON object.")
    return body


async def _whole(
    api: Api, request: AgentRequest, made: asyncio.Future[Answer], http: web.BaseRequest
) -> web.StreamResponse:
    response = web.json_response(api.answer(request, await asyncio.shield(made)))
    await response.prepare(http)
    await response.write_eof()
    return response


async def _streamed(
    api: Api, request: AgentRequest, made: asyncio.Future[Answer], http: web.BaseRequest
) -> web.StreamResponse:
    """Send the turn as events. What is refused at once has its HTTP status; later it is an event."""
    await asyncio.wait({made}, timeout=KEEP_ALIVE_S)
    if made.done():
        made.result()
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await response.prepare(http)
    while not made.done():
        await response.write(b": waiting\n\n")
        await asyncio.wait({made}, timeout=KEEP_ALIVE_S)
    try:
        events = [*api.events(request, made.result())]
    except RequestRefused as why:
        events = [("error", api.error(why))]
    text = "".join((f"event: {name}\n" if name else "") + f"data: {json.dumps(data)}\n\n" for name, data in events)
    await response.write((text + (f"data: {api.LAST}\n\n" if api.LAST else "")).encode())
    await response.write_eof()
    return response
