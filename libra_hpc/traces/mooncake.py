"""Mooncake trace: one JSON request a line (``timestamp`` ms, ``input_length``, ``output_length``, ``hash_ids``).

Format: https://github.com/kvcache-ai/Mooncake (FAST'25 traces).  Equal ids mean equal prefixes: ``hash_ids[i]`` is the
hash of blocks 0 to i.  Sessions are recovered: request B is the next turn of request A if all of this holds:

* B's prompt contains A's last whole block, and A was the first request with that block (else: a system prompt).
* B's prompt is at least as long as A's prompt and answer.
* No earlier request continued A.

Every other request starts a trajectory.  Identical prompts are samples of one prompt.  The gap between two turns
becomes the tool ``gap``, at most `MAX_GAP_S`; it contains A's service time, which the trace does not have.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from libra_hpc.protocol.trace import TrajectoryRecord, TurnRecord

from .record import Bad, at_least, gap_s, trajectory, why

BLOCK = 512
"""Tokens of a block, fixed by the format."""


class MooncakeRequest(msgspec.Struct, gc=False):
    """One line; other fields (``session_id``, ``delay``) are ignored."""

    input_length: int
    output_length: int
    timestamp: float = 0.0
    hash_ids: tuple[int, ...] = ()


class _Session:
    __slots__ = ("context", "last", "number", "prompt", "prompt_tokens", "seen", "turns")

    def __init__(self, number: int, first: MooncakeRequest) -> None:
        self.number = number
        self.prompt = first.hash_ids
        self.prompt_tokens = first.input_length
        self.turns: list[TurnRecord] = []
        self.last, self.context, self.seen = first, 0, first.timestamp

    def add(self, request: MooncakeRequest) -> None:
        if self.turns:
            self.turns[-1] = msgspec.structs.replace(
                self.turns[-1], tool="gap", tool_s=gap_s((request.timestamp - self.seen) / 1000)
            )
        self.turns.append(TurnRecord(request.input_length - self.context if self.turns else 0, request.output_length))
        self.last, self.seen = request, request.timestamp
        self.context = request.input_length + request.output_length


_decoder = msgspec.json.Decoder(MooncakeRequest)


def read(lines: Iterable[tuple[int, bytes]], bad: Bad) -> Iterator[TrajectoryRecord]:
    """Read numbered lines; yields trajectories in the order of their first requests, after the last line."""
    sessions: list[_Session] = []
    head: dict[int, _Session] = {}
    known: set[int] = set()
    for number, line in lines:
        try:
            request = _decoder.decode(line)
            at_least("input_length", request.input_length, 0)
            at_least("output_length", request.output_length, 1)
        except (ValueError, RecursionError) as error:
            bad(number, why(error))
            continue
        session = _continued(request, head)
        own = _last_whole_block(request)
        if session is None:
            session = _Session(number, request)
            sessions.append(session)
            if own is not None and own not in known:
                head[own] = session
        else:
            previous = _last_whole_block(session.last)
            if previous is not None:
                del head[previous]
            if own is not None and (own == previous or own not in known):
                head[own] = session
        session.add(request)
        known.update(request.hash_ids)
    samples: dict[tuple[tuple[int, ...], int], tuple[str, int]] = {}
    for session in sessions:
        key = (session.prompt or (-session.number,), session.prompt_tokens)
        prompt_id, sample = samples.get(key, (f"mooncake/{session.number}", 0))
        samples[key] = (prompt_id, sample + 1)
        yield trajectory(prompt_id, sample, session.prompt_tokens, session.turns)


def _last_whole_block(request: MooncakeRequest) -> int | None:
    whole = min(request.input_length // BLOCK, len(request.hash_ids))
    return request.hash_ids[whole - 1] if whole else None


def _continued(request: MooncakeRequest, head: dict[int, _Session]) -> _Session | None:
    """The session whose context is the longest prefix of this prompt."""
    for block in reversed(request.hash_ids):
        session = head.get(block)
        if session is not None and request.input_length >= session.context:
            return session
    return None
