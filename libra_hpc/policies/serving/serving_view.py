"""What a server on a shared device does, at one moment."""

from __future__ import annotations

from math import inf
from typing import NamedTuple


class ServingView(NamedTuple):
    """All processes of the server together; times are seconds of the clock that ``now`` is read from."""

    closed: bool = False
    """The owner gives nothing now."""
    written: float = -inf
    """When the process that has been silent longest wrote last; -inf: none has written yet."""
    served: int = 0
    """Requests in flight."""
    alone_s: float = 0.0
    """99 % quantile of its latest first tokens without a guest's step, at the loads of those with one; 0: unknown."""
    beside_s: float = 0.0
    """The same of those with one."""
