"""Token ids of a dry run.  They carry no text, only what an engine must know to take the right time for a turn:

* The prompt begins with `HEADER` = 3 ids: the prompt's number, the prompt's length, and the sample's number.  They
  stand for what an engine's prefix cache sees in real ids: which contexts begin alike (siblings share the prompt, the
  turns of a trajectory the whole past), and how far.
* The last id the environment adds before a turn is a *mark*, `MARK` + the number of tokens the policy generates in it.
* A turn is `BODY` ids and one `STOP`.  A turn that was aborted half-way is continued: the ids after the mark say how
  much of it is done.

Everything between is `FILLER`.  So a prompt has at least `LEAST_PROMPT` ids and a tool's answer at least one.
"""

from __future__ import annotations

from array import array

import msgspec

FILLER, BODY, STOP, MARK = 0, 1, 2, 16
HEADER = 3
LEAST_PROMPT = HEADER + 1


class Unreadable(ValueError):
    """A context that is not of this id space; the message is one sentence."""


class SimulatedContext(msgspec.Struct, frozen=True):
    """What an engine reads off a context."""

    prompt: int
    prompt_tokens: int
    sample: int
    tokens: int
    left: int
    """Tokens of the turn that are still to be generated, `STOP` included."""


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
        raise Unreadable(f"prompt: the {len(ids)} ids do not say how long the turn is.")
    return SimulatedContext(number, tokens, sample, len(ids), left)
