"""Loops over bits and gaps as machine code, which numpy has no call for."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any


@cache
def compiled(function: Callable[..., Any]) -> Any:
    """``function`` as machine code, without the interpreter's lock; compiled at its first call."""
    # Its import takes 0.7 s, and only a process that has sparse pieces needs it.
    from numba import njit

    try:
        return njit(cache=True, nogil=True)(function)
    except RuntimeError:
        # No folder for the compiled function can be written.
        return njit(nogil=True)(function)
