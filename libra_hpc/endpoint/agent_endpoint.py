"""The HTTP server of a host: every episode is an endpoint of its own, found by its key; and the APIs that agents speak.

The key comes as a bearer token, ``x-api-key``, ``X-Session-ID``, or first in the path. An unknown or ended key is 410.

- Each request is a turn. One marked as a retry, or equal to one whose client has gone, joins that one.
- The client of a turn has gone for `RETRY_S` -> the turn is given up.
- A client waits as long as its turn takes; a stream gets a comment every `KEEP_ALIVE_S`.
- A body that no context has room for is 413; one beyond `LONG` is read in a thread.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any, Protocol, TypeVar

from aiohttp import web
from msgspec.structs import replace

from . import anthropic_messages, chat_completions, responses
from .agent_request import REFUSED, AgentRequest, Answer, Histories, RequestRefused


class Api(Protocol):
    """How bodies are read, answered and streamed; ``LAST``: data of a stream's last event, empty for none."""

    LAST: str

    def read(self, body: Mapping[str, Any], before: Histories) -> AgentRequest:
        """Raises `RequestRefused` naming the field."""

    def answer(self, asked: AgentRequest, made: Answer) -> dict[str, Any]: ...

    def events(self, asked: AgentRequest, made: Answer) -> Iterator[tuple[str, dict[str, Any]]]:
        """Names of server-sent events, empty for one without, and their data."""

    def error(self, why: RequestRefused) -> dict[str, Any]: ...


COUNT_PATH = "/v1/messages/count_tokens"
"""Answers with the tokens of the context that a turn would have, without one."""
APIS: dict[str, Api] = {
    "/v1/chat/completions": chat_completions,
    "/v1/responses": responses,
    "/v1/messages": anthropic_messages,
    COUNT_PATH: anthropic_messages,
}


KEEP_ALIVE_S = 10.0
"""Seconds between two signs of life of a stream that waits."""
RETRY_S = 10.0
"""Seconds for the retry of a request whose client has gone. Half: SDKs wait up to 8 s; double: engines work longer for
nobody."""
LONG, LEAST = 1 << 16, 1 << 20
"""Bytes of a body from which on a thread reads it; bytes that are read whatever the context is."""
RETRY, IDEMPOTENT = "x-stainless-retry-count", "Idempotency-Key"
"""Headers in which the SDKs of OpenAI and Anthropic count their retries, and in which others name a request."""
MODELS_PATH = "/v1/models"
PATHS = ", ".join([*(f"POST {path}" for path in APIS), f"GET {MODELS_PATH}"])
MODELS = {"object": "list", "data": [{"id": "policy", "object": "model", "created": 0, "owned_by": "libra-hpc"}]}


SERVED = dict[Any, asyncio.AbstractEventLoop]()
"""Loops that serve, by their addresses."""
T = TypeVar("T")


class SynchronousClient(BaseException):
    """A client in the thread of the loop, which waits for itself. After an `Exception` clients try again."""


def _refuse_synchronous_client(event: str, given: tuple[Any, ...]) -> None:
    if (
        event == "socket.connect"
        and given[0].gettimeout() != 0.0
        and (loop := SERVED.get(given[1])) is not None
        and loop is asyncio._get_running_loop()
    ):
        raise SynchronousClient(
            "it asks the policy by a synchronous client, which stops all episodes of its host; valid: AsyncOpenAI,"
            " AsyncAnthropic, or asyncio.to_thread around the call"
        )


sys.addaudithook(_refuse_synchronous_client)


class Asked:
    """A request in line for a turn."""

    def __init__(self, request: AgentRequest, body: bytes, key: str = "") -> None:
        self.request, self.key, self.size = request, key, len(body)
        self.digest = blake2b(body, digest_size=16).digest()
        self.answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        """Cancelled when it is given up, refused when the episode ends."""
        self.clients, self.read = 0, False
        """Clients that wait for it; whether one has got it."""

    @property
    def left(self) -> bool:
        """Whether its clients have gone without it."""
        return not (self.clients or self.read)


class _Session:
    """One episode's requests: those in line, those that nobody has read, and the one that was read last."""

    def __init__(self, ask: Callable[[Asked], object], waits: Callable[[bool], object]) -> None:
        self._ask, self._waits = ask, waits
        self.before = defaultdict[str, Histories](Histories)
        """By the path: each API reads items in its own way."""
        self.known: list[Asked] = []
        self.numbers = Counter[str]()
        """The trajectory's numbers of its requests."""

    def join(self, new: Asked, retry: bool) -> Asked:
        """The request that this one repeats, or else itself."""
        same = [
            one
            for one in self.known
            if one.digest == new.digest and (one.left or (one.key == new.key if new.key else retry))
        ]
        if same:
            return min(same, key=lambda one: (one.key != new.key, not one.left))
        self.known.append(new)
        # What nobody reads any more is no error.
        new.answer.add_done_callback(lambda one: self.changed(one.cancelled() or one.exception()))
        self._ask(new)
        return new

    @contextmanager
    def client(self, asked: Asked) -> Iterator[None]:
        """Context of a client of a request: left without an exception, it has read the answer."""
        asked.clients += 1
        self.changed()
        try:
            yield
            self.known = [one for one in self.known if not one.read or one is asked]
            asked.read = True
        finally:
            asked.clients -= 1
            if asked.left:
                asyncio.get_running_loop().call_later(RETRY_S, self._give_up, asked)
            self.changed()

    def _give_up(self, asked: Asked) -> None:
        if asked.left:
            asked.answer.cancel()
            self.known = [one for one in self.known if one is not asked]

    def changed(self, why: object = None) -> None:
        """Who waits may have changed, or a request was refused."""
        self.numbers["refused_requests"] += isinstance(why, RequestRefused) and why.code == REFUSED
        self._waits(any(one.clients for one in self.known))


class AgentEndpoint:
    """``url``: the address of all episodes, once `start` has returned.

    A body has at most ``longest`` bytes for each of the ``context`` tokens, and may have `LEAST`.
    """

    def __init__(self, context: int = 0, longest: int = 0) -> None:
        self.url = ""
        self._context, self.largest = context, max(LEAST, context * longest)
        self._thread = ThreadPoolExecutor(1, "bodies")
        """One, so that long bodies take the memory of one."""
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
        request = partial(web.BaseRequest, loop=asyncio.get_running_loop(), client_max_size=self.largest)
        # Without aiohttp's applications, whose routes and signals take a tenth of a request.
        self._runner = web.ServerRunner(
            web.Server(self._handle, request_factory=request, access_log=None, handler_cancellation=True)
        )
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        await web.UnixSite(self._runner, str(self.socket)).start()
        SERVED[self._runner.addresses[0]] = asyncio.get_running_loop()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def stop(self) -> None:
        if self._runner is not None:
            # Whoever listens there next may have synchronous clients.
            SERVED.pop(self._runner.addresses[0], None)
            await self._runner.cleanup()
            self.socket.unlink(missing_ok=True)

    def open(self, key: str, ask: Callable[[Asked], object], waits: Callable[[bool], object]) -> Counter[str]:
        """Open an episode; returns numbers of its requests, which grow.

        ``ask`` gets each request; ``waits`` whether a client waits for an answer, whenever that may have changed.
        """
        self._sessions[key] = _Session(ask, waits)
        return self._sessions[key].numbers

    def close(self, key: str) -> None:
        """No turn can be asked any more, and those in line are refused."""
        session = self._sessions.pop(key, None)
        for one in session.known if session is not None else ():
            if not one.answer.done():
                one.answer.set_exception(RequestRefused(410, "gone", "The episode has ended."))

    async def apart(self, size: int, work: Callable[[], T]) -> T:
        """The result of what a body of so many bytes needs, which holds up no other episode."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work) if size > LONG else work()

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
        session = self._sessions.get(key)
        asked = await self._read(api, session, http) if session is not None else None
        if session is None or asked is None or self._sessions.get(key) is not session:  # it may have ended meanwhile
            raise RequestRefused(410, "gone", "There is no such episode, or it has ended.")
        request, asked = asked.request, session.join(asked, http.headers.get(RETRY, "0") != "0")
        try:
            with session.client(asked):
                return await (_streamed if request.stream else _whole)(api, request, asked.answer, http)
        except ConnectionResetError:
            return web.Response()  # to nobody: the client has gone, and its retry gets the answer

    async def _read(self, api: Api, session: _Session, http: web.BaseRequest) -> Asked:
        if http.headers.get("Expect", "").lower() == "100-continue":
            # curl waits a second for it, other clients for ever.
            await http.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        try:
            raw = await http.read()
            request = await self.apart(len(raw), lambda: api.read(_object(raw), session.before[http.path]))
        except web.HTTPRequestEntityTooLarge as error:
            why = f"more than {self.largest:,} bytes, and no context of {self._context:,} tokens has room for that"
            raise RequestRefused(413, "request_too_large", f"The body has {why}.") from error
        except RequestRefused as refused:
            session.changed(refused)
            raise
        if http.path.endswith(COUNT_PATH):
            request = replace(request, counts=True, stream=False)
        return Asked(request, http.path.encode() + raw, http.headers.get(IDEMPOTENT, ""))


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
