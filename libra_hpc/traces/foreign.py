"""Public traces of other projects as trajectories, for `libra-hpc trace convert`; one reader for each format.

- ``azure`` (github.com/Azure/AzurePublicDataset, CSV): each row is a trajectory of one turn with its own prompt.
- ``mooncake`` (github.com/kvcache-ai/Mooncake, a JSON request a line): ``hash_ids[i]`` is the hash of blocks 0 to i.
  A prompt that contains the last whole block of a request that was the first with it, and is at least as long as its
  prompt and answer -> the session's next turn.  Other prompts begin a trajectory; equal ones are samples of one prompt.
- ``kv-cache-tester`` (github.com/callanjfox/kv-cache-tester, a JSON document a session): sub-agents and calls of
  another model or first block are threads of their own.  A person's message or a shrunken context -> a new trajectory.

Turns gain what a context has beyond the one before and its answer.  Tools are the gaps between two requests.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Union

import msgspec

from libra_hpc.errors import UserError, invalid
from libra_hpc.protocol.trace import TrajectoryRecord, TurnRecord

from .read import content
from .record import trajectory, why

BLOCK = 512
"""Tokens of a block, fixed by Mooncake's format."""
MAX_GAP_S = 60.0
"""Seconds; a longer gap is an absent person, not a tool.  The replay of kv-cache-tester has the same bound."""

Count = Annotated[int, msgspec.Meta(ge=0)]
Generated = Annotated[int, msgspec.Meta(ge=1)]


class AzureRow(msgspec.Struct):
    context: Count = msgspec.field(name="ContextTokens")
    generated: Generated = msgspec.field(name="GeneratedTokens")


_azure_row = msgspec.json.Decoder(AzureRow)
"""Makes the type whole, for `msgspec.convert`."""


class MooncakeRequest(msgspec.Struct, gc=False):
    input_length: Count
    output_length: Generated
    timestamp: float = 0.0
    """Milliseconds."""
    hash_ids: tuple[int, ...] = ()


class KvCacheRequest(msgspec.Struct):
    """One call, or a sub-agent, of which only ``requests`` are used."""

    t: float = 0.0
    type: str = ""
    model: str = ""
    context: Count = msgspec.field(default=0, name="in")
    out: Count = 0
    hash_ids: tuple[int, ...] = ()
    input_types: tuple[str, ...] = ()
    api_time: float | None = None
    think_time: float | None = None
    requests: tuple[KvCacheRequest, ...] = ()


class Session(msgspec.Struct):
    requests: tuple[KvCacheRequest, ...]
    id: str = ""


class Lines:
    """The lines that are not blank; ``number`` is that of the last one taken."""

    def __init__(self, data: bytes) -> None:
        self.data, self.number = data, 1

    def __iter__(self) -> Iterator[bytes]:
        for number, line in enumerate(self.data.split(b"\n"), 1):
            self.number = number
            if line.strip():
                yield line


_mooncake_request = msgspec.json.Decoder(MooncakeRequest)
_document = msgspec.json.Decoder(Union[Session, list[Session]])


def read_foreign(path: Path, format: str) -> list[TrajectoryRecord]:
    """The trajectories of a file, gzip or not, or of a folder of ``*.json`` or ``*.json.gz``.

    Raises `UserError` for a file that is unreadable or of another format.
    """
    if format not in FORMATS:
        raise invalid("--from", format, "unknown format", FORMATS)
    found: list[TrajectoryRecord] = []
    for file in sorted(path.glob("*.json*")) if path.is_dir() else [path]:
        lines = Lines(content(file))
        try:
            found += FORMATS[format](lines)
        except (ValueError, RecursionError, csv.Error) as error:
            raise UserError(f"{file}, line {lines.number}: {why(error)}.") from None
    if not found:
        raise UserError(f"{path}: the trace has no trajectory.")
    return found


def _azure(lines: Lines) -> Iterator[TrajectoryRecord]:
    for row in csv.DictReader((line.decode("utf-8-sig") for line in lines), restkey="more"):
        one = msgspec.convert(row, AzureRow, strict=False)
        yield trajectory(f"azure/{lines.number}", 0, one.context, (TurnRecord(0, one.generated),))


def _mooncake(lines: Lines) -> Iterator[TrajectoryRecord]:
    sessions: dict[int, list[MooncakeRequest]] = {}
    heads: dict[int, list[MooncakeRequest]] = {}
    """Sessions that may go on, by the last whole block of their last request."""
    known: set[int] = set()
    for request in map(_mooncake_request.decode, lines):
        blocks, whole = request.hash_ids, request.input_length // BLOCK
        continues = (block for block in reversed(blocks) if block in heads and _fits(request, heads[block][-1]))
        found = next(continues, None)
        session = sessions.setdefault(lines.number, []) if found is None else heads.pop(found)
        for last in blocks[:whole][-1:]:
            if last == found or last not in known:
                heads[last] = session
        session.append(request)
        known.update(blocks)
    samples: dict[tuple[tuple[int, ...], int], list[int]] = {}
    for number, session in sessions.items():
        same = samples.setdefault((session[0].hash_ids or (-number,), session[0].input_length), [])
        same.append(number)
        calls = [(request.input_length, request.output_length) for request in session]
        gaps = [(after.timestamp - before.timestamp) / 1000 for before, after in pairwise(session)]
        yield _trajectory(f"mooncake/{same[0]}", calls, gaps, "gap", len(same) - 1)


def _fits(request: MooncakeRequest, before: MooncakeRequest) -> bool:
    return request.input_length >= before.input_length + before.output_length


def _kv_cache_tester(lines: Lines) -> Iterator[TrajectoryRecord]:
    try:
        documents: Iterator[Session | list[Session]] = iter((_document.decode(lines.data),))
    except msgspec.ValidationError:
        raise
    except msgspec.DecodeError:
        # Not one document, so one a line.
        documents = map(_document.decode, lines)
    for document in documents:
        for session in document if isinstance(document, list) else [document]:
            for index, thread in enumerate(_threads(session.requests)):
                for episode, requests in enumerate(_episodes(thread)):
                    calls = [(request.context, request.out) for request in requests]
                    name = f"{session.id or f'session/{lines.number}'}/{index}/{episode}"
                    yield _trajectory(name, calls, [_gap_s(*pair) for pair in pairwise(requests)], "tool")


def _threads(requests: Sequence[KvCacheRequest]) -> Iterator[list[KvCacheRequest]]:
    """Calls by thread: threads of the session in the order of their first call, then those of sub-agents."""
    threads: dict[tuple[str, tuple[int, ...]], list[KvCacheRequest]] = {}
    for request in requests:
        if request.type != "subagent" and request.out:  # a call that failed generated nothing
            threads.setdefault((request.model, request.hash_ids[:1]), []).append(request)
    yield from threads.values()
    for request in requests:
        if request.type == "subagent":
            yield from _threads(request.requests)


def _episodes(thread: Sequence[KvCacheRequest]) -> Iterator[list[KvCacheRequest]]:
    episode = [thread[0]]
    for before, request in pairwise(thread):
        spoken = bool(request.input_types) and "tool_result" not in request.input_types
        if (request.context, request.hash_ids) == (before.context, before.hash_ids):
            # A streaming and a non-streaming call: the second replaces the first.
            episode.pop()
        elif spoken or request.context < before.context:
            yield episode
            episode = []
        episode.append(request)
    yield episode


def _gap_s(request: KvCacheRequest, following: KvCacheRequest) -> float:
    if request.api_time is None and following.think_time is not None:
        return following.think_time
    return following.t - request.t - (request.api_time or 0.0)


def _trajectory(
    prompt_id: str, calls: Sequence[tuple[int, int]], gaps: Sequence[float], tool: str, sample: int = 0
) -> TrajectoryRecord:
    """A trajectory of calls as (context, generated tokens)."""
    new = (0, *(max(after - context - generated, 0) for (context, generated), (after, _) in pairwise(calls)))
    turns = [
        TurnRecord(tokens, generated, tool, tool_s=min(max(gap, 0.0), MAX_GAP_S))
        for tokens, (_, generated), gap in zip(new, calls, (*gaps, 0.0), strict=True)
    ]
    return trajectory(prompt_id, sample, calls[0][0], turns)


FORMATS: dict[str, Callable[[Lines], Iterator[TrajectoryRecord]]] = {
    "azure": _azure,
    "mooncake": _mooncake,
    "kv-cache-tester": _kv_cache_tester,
}
