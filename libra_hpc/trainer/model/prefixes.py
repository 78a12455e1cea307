"""Sequences with equal beginnings, whose common tokens a pack computes once: pure.

Samples of a trajectory whose agent rewrites its history, and siblings of a group, begin alike. In the order of their
tokens, no sequence has more in common with an earlier one than with the one before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

SHORTEST = 64
"""Fewest common tokens that are shared. Half: a kernel call of its own for what costs less. Double: system prompts of
a few sentences are computed again for each sample."""


class FamilyMember(NamedTuple):
    """A sequence of a family."""

    place: int
    """Place in the argument of `families`."""
    shared: int
    """Tokens at its beginning that it has in common with the member before it; 0: none are shared."""


def families(tokens: Sequence[npt.NDArray[np.int32]]) -> list[list[FamilyMember]]:
    """Every sequence, int32[n], in one family, in which all but the first share a beginning with the one before."""
    found: list[list[FamilyMember]] = []
    before: npt.NDArray[np.int32] | None = None
    # Big-endian bytes have the order of the tokens; equal sequences keep theirs.
    for place in sorted(range(len(tokens)), key=lambda place: tokens[place].astype(">i4").tobytes()):
        own = tokens[place]
        shared = 0 if before is None else _common(before, own)
        if shared >= SHORTEST:
            found[-1].append(FamilyMember(place, shared))
        else:
            found.append([FamilyMember(place, 0)])
        before = own
    return found


def _common(one: npt.NDArray[np.int32], other: npt.NDArray[np.int32]) -> int:
    """Equal tokens at both beginnings; the last one of ``other`` is always its own."""
    count = min(len(one), len(other) - 1)
    differ = one[:count] != other[:count]
    return int(differ.argmax()) if differ.any() else count
