"""Seconds that a server takes for its waiting prompts and for its next tokens, learned from what it writes.

- The oldest last token moves on, and no rollout step ran meanwhile -> one step of the server.
- Fewer requests wait than before -> a prefill: since their arrival, or since the last rollout step, if that is later.
- The views are more than `SEEN_S` apart -> nothing is learned: much may have happened between them.
- Nothing measured yet -> infinite: with slack, nothing runs beside such requests.
"""

from __future__ import annotations

from math import inf
from typing import Final

from .serving_view import ServingView
from .step_cost import HighQuantile

SEEN_S: Final = 0.05
"""Seconds; a closed gate reads the page every millisecond or two."""
LEAST_BYTES: Final = 64
"""Fewest bytes of a prompt that shows what a byte costs."""


class ServerPace:
    def __init__(self) -> None:
        self._decode = HighQuantile()
        self._byte = HighQuantile()
        self._last = ServingView()
        self._own_end = self._at = -inf

    def stepped(self, now: float) -> None:
        """A rollout step has ended: what the server did meanwhile was slower than alone."""
        self._own_end = now

    def observe(self, view: ServingView, now: float) -> None:
        """Learn from the difference to the last view."""
        last, self._last = self._last, view
        at, self._at = self._at, now
        if now - at > SEEN_S:
            return
        if last.last_token < view.last_token < inf and last.last_token > self._own_end:
            self._decode.add(view.last_token - last.last_token)
        if last.waiting > view.waiting and last.waiting_bytes >= LEAST_BYTES:
            took = now - max(last.arrival, self._own_end)
            step = self._decode.value if self._decode.value < inf else 0.0
            self._byte.add(max(0.1 * took, took - step) / last.waiting_bytes)

    def prefill_s(self, view: ServingView) -> float:
        """Until the waiting have their first tokens, if nothing else runs."""
        return self._byte.value * view.waiting_bytes + self.decode_s if view.waiting else 0.0

    @property
    def decode_s(self) -> float:
        return self._decode.value
