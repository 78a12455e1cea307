"""Token ids of a dry run: no text, only what a simulated engine needs to time a turn.

* A prompt begins with `HEADER` ids: number of the prompt, its length, number of the sample.  They replace the hashes of
  a prefix cache: contexts of equal prompt, or of equal prompt and sample, begin alike.
* The last id before a turn is a *mark*: `MARK` + the number of tokens the policy generates in this turn.
* A turn is `BODY` ids and one `STOP`.  After an abort it continues: the ids after the mark are the part done.
* All other ids are `FILLER`.
"""

from __future__ import annotations

from array import array

import msgspec

FILLER, BODY, STOP, MARK = 0, 1, 2, 16
HEADER = 3
LEAST_PROMPT = HEADER + 1
"""Ids of the shortest prompt: header and mark."""


class Unreadable(ValueError):
    """A context that does not follow the format of the module; the message is one sentence."""


class SimulatedContext(msgspec.Struct, frozen=True):
    """The content of a context, as `read` returns it."""

    prompt: int
    prompt_tokens: int
    sample: int
    tokens: int
    left: int
    """Tokens of the turn still to generate, `STOP` included."""


def prompt(number: int, sample: int, tokens: int, turn: int) -> list[int]:
    """A prompt of ``tokens`` ids (at least `LEAST_PROMPT`) before a turn of ``turn`` generated ones."""
    tokens = max(tokens, LEAST_PROMPT)
    return [number, tokens, sample, *[FILLER] * (tokens - LEAST_PROMPT), MARK + turn]


def answer(tokens: int, turn: int) -> list[int]:
    """A tool's answer of ``tokens`` ids (at least 1) before a turn of ``turn`` generated ones."""
    return [*[FILLER] * (tokens - 1), MARK + turn]


def generated(count: int, complete: bool) -> bytes:
    """``count`` ids of a turn as int32 bytes; ``complete``: the last is the turn's `STOP`."""
    ids = array("i", [BODY]) * count
    if complete and count:
        ids[-1] = STOP
    return ids.tobytes()


def read(context: bytes) -> SimulatedContext:
    """Read a context (int32 bytes); raises `Unreadable`."""
    if len(context) % 4 or len(context) < 4 * LEAST_PROMPT:
        raise Unreadable(f"prompt: {len(context)} bytes are no context of a dry run.")
    ids = memoryview(context).cast("i")
    last = len(ids) - 1
    while last >= HEADER and ids[last] == BODY:
        last -= 1
    done = len(ids) - 1 - last
    left = ids[last] - MARK - done
    number, tokens, sample = ids[0], ids[1], ids[2]
    if last < HEADER or left < 1 or number < 0 or sample < 0 or not LEAST_PROMPT <= tokens <= last + 1:
        raise Unreadable(f"prompt: the {len(ids)} ids do not encode how long the turn is.")
    return SimulatedContext(prompt=number, prompt_tokens=tokens, sample=sample, tokens=len(ids), left=left)
