"""The warm-up profile: an engine measures its own steps before it accepts turns.

The scheduler prices a TP class by the measured steps of its engines (`scheduling.costs`). Without them it assumes
that more devices are faster. Where that is wrong, the class gets no turns, and the guess is never corrected.

One decode and one prompt give a report each, after a first decode that includes what vLLM builds on its first steps.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable

from libra_hpc.protocol.engine import Generate, Generated
from libra_hpc.protocol.engine_state import EngineStats

DECODES = 16
"""Tokens of the decode: with the prompt a third of a second where a step takes 20 ms."""
PROMPT = 256
"""Tokens of the prompt."""


def lengths(room: int) -> tuple[int, int]:
    """(tokens to decode, tokens of the prompt) for a context of ``room`` tokens."""
    return max(1, min(DECODES, room // 4)), max(1, min(PROMPT, room // 2))


def profile(
    submit: Callable[[Generate], Generated | None],
    step: Callable[[], list[Generated]],
    stats: Callable[[], EngineStats],
    room: int,
) -> tuple[EngineStats, ...]:
    """Run the requests on an idle engine with a context of ``room`` tokens (at least 2); returns its reports, oldest
    first."""
    decodes, prompt = lengths(room)
    _run(submit, step, 1, decodes)
    reports = [stats()]
    for tokens, wanted in ((1, decodes), (prompt, 1)):
        _run(submit, step, tokens, wanted)
        reports.append(stats())
    return tuple(reports)


def _run(
    submit: Callable[[Generate], Generated | None], step: Callable[[], list[Generated]], prompt: int, decodes: int
) -> None:
    refused = submit(Generate("warm-up", array("i", bytes(4 * prompt)).tobytes(), decodes))
    assert refused is None, refused
    while not step():
        pass
