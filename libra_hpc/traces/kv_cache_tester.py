"""kv-cache-tester trace: a JSON document per coding session, one a file, one a line, or a list.

Format: https://github.com/callanjfox/kv-cache-tester (docs/trace_replay_tester.md).

* Sub-agents, and calls of another model or with another first block, are separate threads.
* A request with ``in`` and ``hash_ids`` of the one before (a streaming and non-streaming pair) replaces it.
* A person's message (``input_types`` without ``tool_result``) or a shrunken context -> a new trajectory, the only
  sample of its prompt.
* ``new_tokens`` = ``in`` - previous ``in`` - previous ``out``, at least 0: a session may drop parts of an answer.
* ``tool_s`` = time between the requests - ``api_time``; without ``api_time``: ``think_time``, else the whole time.
* The tool is always ``tool``, the outcome null: the trace has neither.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Union

import msgspec

from libra_hpc.protocol.trace import TrajectoryRecord, TurnRecord

from .record import Bad, gap_s, trajectory, why


class KvCacheRequest(msgspec.Struct):
    """One call, or a sub-agent, of which only ``t`` and ``requests`` are used."""

    t: float = 0.0
    type: str = ""
    model: str = ""
    context: int | None = msgspec.field(default=None, name="in")
    out: int = 0
    hash_ids: msgspec.Raw = msgspec.field(default_factory=lambda: msgspec.Raw(b"[]"))
    input_types: tuple[str, ...] = ()
    api_time: float | None = None
    think_time: float | None = None
    requests: tuple[KvCacheRequest, ...] = ()


class Session(msgspec.Struct):
    requests: tuple[KvCacheRequest, ...]
    id: str = ""


_document = msgspec.json.Decoder(Union[Session, list[Session]])
_hashes = msgspec.json.Decoder(tuple[int, ...])


def read(lines: Iterable[tuple[int, bytes]], bad: Bad) -> Iterator[TrajectoryRecord]:
    """Read numbered lines: all of them are one document (pretty-printed or not), or each line is one."""
    numbered = list(lines)
    try:
        documents: list[tuple[int, bytes]] = (
            [(numbered[0][0], b"\n".join(line for _, line in numbered))] if numbered else []
        )
        for _, document in documents:
            msgspec.json.decode(document, type=msgspec.Raw)
    except (msgspec.DecodeError, RecursionError):
        documents = numbered
    for number, document in documents:
        try:
            found = _document.decode(document)
            sessions = found if isinstance(found, list) else [found]
            trajectories = [one for session in sessions for one in _session(session, number)]
        except (ValueError, RecursionError) as error:
            bad(number, why(error))
        else:
            yield from trajectories


def _session(session: Session, number: int) -> Iterator[TrajectoryRecord]:
    name = session.id or f"session/{number}"
    if not session.requests:
        raise ValueError("requests = []: no requests; valid: at least one request")
    for index, thread in enumerate(_threads(session.requests)):
        for episode, requests in enumerate(_episodes(thread)):
            yield _trajectory(f"{name}/{index}/{episode}", requests)


def _threads(requests: Sequence[KvCacheRequest]) -> Iterator[list[KvCacheRequest]]:
    """Calls by thread: threads of the session in the order of their first call, then those of sub-agents."""
    threads: dict[tuple[str, int | None], list[KvCacheRequest]] = {}
    for request in requests:
        if request.type == "subagent":
            continue
        if request.context is None:
            raise ValueError("requests[].in: missing; valid: an integer >= 0")
        if request.out < 0 or request.context < 0:
            raise ValueError(f"requests[].in = {request.context}, out = {request.out}: negative; valid: integers >= 0")
        if request.out:  # a call that failed generated nothing
            hashes = _hashes.decode(request.hash_ids)
            threads.setdefault((request.model, hashes[0] if hashes else None), []).append(request)
    yield from threads.values()
    for request in requests:
        if request.type == "subagent":
            yield from _threads(request.requests)


def _episodes(thread: Sequence[KvCacheRequest]) -> Iterator[list[KvCacheRequest]]:
    episode: list[KvCacheRequest] = []
    for request in thread:
        before = episode[-1] if episode else None
        if (
            before is not None
            and request.context == before.context
            and bytes(request.hash_ids) == bytes(before.hash_ids)
        ):
            episode[-1] = request
            continue
        spoken = bool(request.input_types) and "tool_result" not in request.input_types
        if before is not None and (spoken or _context(request) < _context(before)):
            yield episode
            episode = []
        episode.append(request)
    yield episode


def _trajectory(prompt_id: str, requests: Sequence[KvCacheRequest]) -> TrajectoryRecord:
    turns: list[TurnRecord] = []
    for index, request in enumerate(requests):
        new = max(_context(request) - _context(requests[index - 1]) - requests[index - 1].out, 0) if index else 0
        if index + 1 < len(requests):
            turns.append(TurnRecord(new, request.out, tool="tool", tool_s=_gap(request, requests[index + 1])))
        else:
            turns.append(TurnRecord(new, request.out))
    return trajectory(prompt_id, 0, _context(requests[0]), turns)


def _gap(request: KvCacheRequest, following: KvCacheRequest) -> float:
    seconds = following.t - request.t - (request.api_time or 0.0)
    if request.api_time is None and following.think_time is not None:
        seconds = following.think_time
    return gap_s(seconds)


def _context(request: KvCacheRequest) -> int:
    return request.context or 0
