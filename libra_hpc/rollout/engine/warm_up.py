"""The warm-up profile: an engine measures its own steps before it is announced, so that nobody has to guess what they
cost.

The scheduler prices a TP class by the measured steps of its engines (`libra_hpc.sched.costs`).  A class that has run
nothing yet would be priced by the rule that more devices are faster; where that is wrong, and it is on a machine with
fewer cores than workers, the guess keeps turns away from the class and so is never corrected.  `DECODES` = 16 tokens of
one request and a prompt of `PROMPT` = 256 tokens give one report each, a third of a second together where a step takes
20 ms.  A first decode is not counted: it pays for what vLLM builds on its first steps.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable

from libra_hpc.protocol.rollout import EngineStats, Generate, Generated

DECODES = 16
PROMPT = 256


def lengths(room: int) -> tuple[int, int]:
    """Tokens decoded and tokens of the prompt, where a context holds ``room`` tokens."""
    return max(1, min(DECODES, room // 4)), max(1, min(PROMPT, room // 2))


def profile(
    submit: Callable[[Generate], Generated | None],
    step: Callable[[], list[Generated]],
    stats: Callable[[], EngineStats],
    room: int,
) -> tuple[EngineStats, ...]:
    """Run the requests on an engine that is idle and whose context holds ``room`` tokens (at least 2); returns the
    reports between them, oldest first."""
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
