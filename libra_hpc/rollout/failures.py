"""Failed attempts: how long a trajectory waits for its next one, when admission pauses, and when the run ends.

- Attempt failed -> wait 1, 2, 4, ... s, at most `LONGEST_S`.
- More than ``max_share`` of the open trajectories failed `AGAIN` times since anything went well, in more than one
  prompt -> pause: admit no prompt, begin one attempt at a time (a *probe*).
- Attempt whose last turn was sent in the pause went well -> resume.
- Paused for ``patience_s`` -> fail the run; time in which another trajectory advances does not count.
- `TRIES` failures before a pause -> give the trajectory up, if something sent later went well or no other prompt
  fails; else at twice as many.

Times: seconds of any monotonic clock.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

TRIES = 3
"""One failure may be an accident, three are the trajectory's own fault."""
AGAIN = 2
"""Where 30 % of all attempts fail, one failure is 30 % of the trajectories, two in a row are 9 %."""
FIRST_S, LONGEST_S = 1.0, 60.0
"""Back-off: an outage of 15 s ends within two probes, one of an hour costs a probe a minute."""
TEXT_CHARS = 200
"""Characters of an error in a sentence."""

Key = tuple[int, int]
"""(index of the prompt, sample)"""


class AdmissionChange(NamedTuple):
    """A decision for the whole run, with its reason as a sentence."""

    action: Literal["pause", "resume", "fail"]
    reason: str


class FailureBook:
    """Records how attempts end; `evaluate` decides."""

    def __init__(self, max_share: float, patience_s: float) -> None:
        self._max_share, self._patience_s = max_share, patience_s
        self._kinds: dict[str, tuple[int, str]] = {}
        """Failures so far and the last error, by kind."""
        self._failed: dict[Key, list[float]] = {}
        """When the attempts of an open trajectory failed."""
        self._prompts: dict[int, float] = {}
        """When an attempt of a prompt last failed; none that anything went well after."""
        self._sound_at = float("-inf")
        """When the last turn of an attempt that went well was sent, the latest one."""
        self.paused = self._why = ""
        """Why no prompt is admitted; empty while prompts are."""
        self.probe: Key | None = None
        """The attempt that was begun as a probe and has not ended."""
        self._probe_at = self._delay_s = self._paused_at = self._paused_s = self._counted_at = 0.0
        self._over = False

    def failed(self, key: Key, kind: str, error: str, now: float) -> float | None:
        """Record a failure; seconds until the next attempt of this trajectory, None when it is given up.

        ``kind``: ``raised`` | ``environment`` | ``timeout`` | ``reward`` | ``answer`` | ``engine`` | ``logprobs``
        """
        count, _ = self._kinds.get(kind, (0, ""))
        self._kinds[kind] = (count + 1, error[:TEXT_CHARS])
        self._prompts[key[0]] = now
        if key == self.probe:
            self.probe, self._delay_s = None, min(LONGEST_S, 2.0 * self._delay_s)
            self._probe_at = now + self._delay_s
        times = self._failed.setdefault(key, [])
        times.append(now)
        known = self._sound_at > times[0] or len(self._prompts) == 1
        if not self.paused and len(times) >= (TRIES if known else 2 * TRIES):
            del self._failed[key]
            return None
        return min(LONGEST_S, FIRST_S * 2.0 ** min(len(times) - 1, 6))

    def succeeded(self, key: Key, sent_at: float) -> None:
        """Record a success; the last turn of the attempt went to the environment at ``sent_at``."""
        self._sound_at = max(self._sound_at, sent_at)
        self._prompts = {index: at for index, at in self._prompts.items() if at > self._sound_at}
        self._failed.pop(key, None)
        if key == self.probe:
            self.probe = None

    def advanced(self, key: Key) -> None:
        """Record that an environment opened an episode, or answered a turn and expects the next."""
        # An attempt that always fails at its last step advances every time before.
        if key != self.probe and key not in self._failed:
            self._paused_s = 0.0

    def may_probe(self, now: float) -> bool:
        return bool(self.paused) and not self._over and self.probe is None and now >= self._probe_at

    def evaluate(self, running: int, waiting: int, now: float) -> AdmissionChange | None:
        """Decide; None: go on.  ``running`` trajectories are tried, ``waiting`` wait for their next attempt."""
        if not self.paused:
            failing = sum(times[-AGAIN:][0] > self._sound_at for times in self._failed.values() if len(times) >= AGAIN)
            if failing <= self._max_share * (running + waiting) or len(self._prompts) == 1:
                return None
            share = f"{failing} of {running + waiting} open trajectories fail again and again ([task] max_failed_share"
            return self._pause(f"{share} = {self._max_share:g})", now)
        self._paused_s += now - self._counted_at
        self._counted_at = now
        if self._sound_at > self._paused_at:
            self.paused, self.probe = "", None
            return AdmissionChange("resume", f"An attempt succeeded after a pause of {now - self._paused_at:.0f} s.")
        if waiting and self.probe is None and not self._over and self._paused_s > self._patience_s:
            self._over = True
            limit = f"[task] failed_patience_s = {self._patience_s:g}"
            return AdmissionChange("fail", f"{self._why} Admission was paused for {self._paused_s:.0f} s ({limit}).")
        return None

    def _pause(self, share: str, now: float) -> AdmissionChange:
        kind, count, error = self.counts[0]
        self._why = f"{share}; the most frequent error ({kind}, {count} times): {error.rstrip('.')}."
        self.paused = f"{self._why} One attempt at a time goes on until one succeeds."
        self._delay_s, self._probe_at = FIRST_S, now + FIRST_S
        self._paused_at = self._counted_at = now
        self._paused_s = 0.0
        return AdmissionChange("pause", self.paused)

    def unable(self, now: float) -> None:
        """Do not count the time since the last call of this or `evaluate` as patience: no probe could run."""
        self._counted_at = now

    def discount(self, seconds: float) -> None:
        """Do not count a stall of this process as pause."""
        self._counted_at += seconds
        self._probe_at += seconds

    @property
    def counts(self) -> tuple[tuple[str, int, str], ...]:
        """(kind, failures, last error), the most frequent first."""
        found = [(kind, count, error) for kind, (count, error) in self._kinds.items()]
        return tuple(sorted(found, key=lambda entry: (-entry[1], entry[0])))
