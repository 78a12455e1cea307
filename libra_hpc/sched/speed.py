"""Measured speed of one engine: seconds per step and per prefilled token, from its own counters.

A least-squares fit of busy seconds = a * steps + b * prefilled tokens over a decayed window of `EngineStats`
differences.  A step decodes one token of every running sequence, so ``a`` is the decode time per token.
"""

from __future__ import annotations

from typing import Final

from libra_hpc.protocol.rollout import EngineStats

HALF_LIFE_S: Final = 5.0
"""Busy seconds: half follows noise of single batches, double lags behind a changed batch size."""


class SpeedEstimate:
    """Give every `EngineStats` to `update`; read `decode_s` and `prefill_s`, 0.0 while unknown."""

    def __init__(self) -> None:
        self._last: EngineStats | None = None
        self._ss = self._sp = self._pp = self._sb = self._pb = 0.0
        self.decode_s = 0.0
        self.prefill_s = 0.0

    def update(self, stats: EngineStats) -> None:
        """Add the difference to the previous counters; a rebuilt engine's counters restart the difference."""
        last, self._last = self._last, stats
        if last is None or stats.steps <= last.steps:
            return
        steps = float(stats.steps - last.steps)
        prefill = float(stats.prefill_tokens - last.prefill_tokens)
        busy = stats.stepping_s - last.stepping_s
        decay = 0.5 ** (busy / HALF_LIFE_S)
        self._ss = decay * self._ss + steps * steps
        self._sp = decay * self._sp + steps * prefill
        self._pp = decay * self._pp + prefill * prefill
        self._sb = decay * self._sb + steps * busy
        self._pb = decay * self._pb + prefill * busy
        determinant = self._ss * self._pp - self._sp * self._sp
        decode = prefill_s = -1.0
        if determinant > 1e-6 * self._ss * self._pp:
            decode = (self._sb * self._pp - self._pb * self._sp) / determinant
            prefill_s = (self._ss * self._pb - self._sp * self._sb) / determinant
        if decode <= 0.0 or prefill_s < 0.0:
            # The windows are too alike to separate the two: the step gets all seconds.
            decode, prefill_s = self._sb / self._ss, 0.0
        self.decode_s, self.prefill_s = decode, prefill_s
