"""Failed attempts: how long a trajectory waits for its next one, when admission pauses, and when the run ends.

- Attempt failed -> wait 1, 2, 4, ... s (at most `LONGEST_S`); at the `MAX_STRIKES`-th failure give the trajectory up.
- More than ``max_share`` of the window failed -> pause: admit no prompt, begin one attempt at a time (a *probe*).
- Probe failed -> twice the time until the next one, of another prompt where one waits.
- Failure before or in a pause -> does not count against its trajectory, except of a probe.
- Probe succeeded, or an attempt whose last turn was sent after the last failure -> resume.
- Failures are at most ``max_share`` of failed attempts and those that advanced since -> resume.
- Paused for ``patience_s`` in all, with no sound window and no advanced attempt in between -> fail.

The window has one entry per trajectory, how its newest attempt ended: as many as are open, `LEAST` to `WINDOW`. It is
evaluated from `ENOUGH` entries on, or when every open trajectory waits. Attempts that advanced since the last failure
count as well: fast failures must not outweigh slow successes. Times: seconds of any monotonic clock.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import Literal, NamedTuple

MAX_STRIKES = 3
"""One failure may be an accident, three are the trajectory's own fault."""
LEAST, WINDOW = 16, 64
"""Entries of the window. Half: some accidents pass for an outage; double: an outage costs twice the attempts."""
ENOUGH = 8
"""Fewest entries whose failed share is evaluated."""
PROMPTS = 2
"""Fewest prompts whose failures make an outage."""
FIRST_S, LONGEST_S = 1.0, 60.0
"""Back-off: an outage of 15 s ends within two probes, one of an hour costs a probe a minute."""
TEXTS, TEXT_CHARS = 256, 200
"""Most different error texts, and their characters: a text may contain a number that never repeats."""

Key = tuple[int, int]
"""(index of the prompt, sample)"""


class Failure(NamedTuple):
    kind: str
    """``raised`` | ``timeout`` | ``reward`` | ``answer`` | ``engine`` | ``logprobs``"""
    task: str
    prompt: str
    error: str


class AdmissionChange(NamedTuple):
    """A decision for the whole run, with its reason as a sentence."""

    action: Literal["pause", "resume", "fail"]
    reason: str


class FailureBook:
    """Records how attempts end; `evaluate` decides."""

    def __init__(self, max_share: float, patience_s: float) -> None:
        self._max_share, self._patience_s = max_share, patience_s
        self.last: dict[str, tuple[int, Failure]] = {}
        """Failures so far and the last one, by kind."""
        self._texts: Counter[tuple[str, str]] = Counter()
        self._window: OrderedDict[Key, bool] = OrderedDict()
        self._strikes: Counter[Key] = Counter()
        self.paused = ""
        """Why no prompt is admitted; empty while prompts are."""
        self.probe: Key | None = None
        """The attempt that was begun as a probe and has not ended."""
        self._probed: Counter[int] = Counter()
        """Probes of this pause that failed, by prompt."""
        self._advanced: set[Key] = set()
        """Running attempts that advanced since the last failure; without probes and what failed before."""
        self._probe_at = self._paused_at = self._paused_s = self._counted_at = 0.0
        self._delay_s = FIRST_S
        self._failed_at = float("-inf")
        self._resume = self._over = False

    # --- records
    # ----------------------------------------------------------------------------------------------

    def failed(self, key: Key, failure: Failure, now: float) -> float | None:
        """Record a failure; seconds until the next attempt of this trajectory, None when it is given up."""
        count = self.last[failure.kind][0] if failure.kind in self.last else 0
        self.last[failure.kind] = (count + 1, failure)
        text = (failure.kind, failure.error[:TEXT_CHARS])
        if text in self._texts or len(self._texts) < TEXTS:
            self._texts[text] += 1
        self._ended(key, False)
        self._advanced.clear()
        self._failed_at = now
        if self.paused and key != self.probe:
            return FIRST_S
        if self.paused:
            self.probe = None
            self._probed[key[0]] += 1
            self._delay_s = min(LONGEST_S, 2.0 * self._delay_s)
            self._probe_at = now + self._delay_s
        self._strikes[key] += 1
        if self._strikes[key] >= MAX_STRIKES:
            del self._strikes[key]
            return None
        return min(LONGEST_S, FIRST_S * 2.0 ** (self._strikes[key] - 1))

    def succeeded(self, key: Key, sent_at: float) -> None:
        """Record a success; the last turn of the attempt went to the environment at ``sent_at``."""
        self._ended(key, True)
        self._strikes.pop(key, None)
        if self.paused and (key == self.probe or sent_at > self._failed_at):
            self._resume = True
        if key == self.probe:
            self.probe = None

    def advanced(self, key: Key) -> None:
        """Record that an environment opened an episode, or answered a turn and expects the next."""
        if key == self.probe or not self._window.get(key, True):
            return  # an attempt that always fails at its last step advances every time before
        self._advanced.add(key)
        if self.paused:
            self._paused_s = 0.0

    def settled(self, index: int) -> None:
        """Remove a given-up prompt from the window."""
        for key in [key for key in self._window if key[0] == index]:
            del self._window[key]

    def probing(self, key: Key) -> None:
        self.probe = key

    def probed(self, key: Key) -> int:
        """How often its prompt failed as a probe in this pause."""
        return self._probed[key[0]]

    def may_probe(self, now: float) -> bool:
        return bool(self.paused) and not self._over and self.probe is None and now >= self._probe_at

    def _ended(self, key: Key, well: bool) -> None:
        self._advanced.discard(key)
        self._window[key] = well
        self._window.move_to_end(key)
        if len(self._window) > WINDOW:
            self._window.popitem(last=False)

    # --- decisions
    # ----------------------------------------------------------------------------------------------

    def evaluate(self, running: int, waiting: int, now: float) -> AdmissionChange | None:
        """Decide; None: go on. ``running`` attempts are open, ``waiting`` trajectories wait for their next one."""
        if not self.paused:
            recent = list(self._window.items())[-max(LEAST, running + waiting) :]
            return self._pause(recent, now) if self._outage(recent, running, waiting) else None
        self._paused_s += now - self._counted_at
        self._counted_at = now
        if self._resume:
            return self._resumed(now, "An attempt succeeded")
        if self._sound():
            return self._resumed(now, f"{len(self._advanced)} attempts advanced since the last failure")
        if waiting and self.probe is None and not self._over and self._paused_s > self._patience_s:
            self._over = True
            sentence = self._sentence(list(self._window.items()))
            return AdmissionChange(
                "fail",
                f"{sentence} Admission was paused for {self._paused_s:.0f} s ([task] failed_patience_s ="
                f" {self._patience_s:g}).",
            )
        return None

    def unable(self, now: float) -> None:
        """Do not count the time since the last call of this or `evaluate` as patience: no probe could run."""
        self._counted_at = now

    def discount(self, seconds: float) -> None:
        """Do not count a stall of this process as pause."""
        self._paused_at += seconds
        self._counted_at += seconds
        self._probe_at += seconds

    def _sound(self) -> bool:
        """Whether advanced attempts outweigh the failed ones."""
        failed, advanced = sum(not well for well in self._window.values()), len(self._advanced)
        return advanced >= ENOUGH and failed <= self._max_share * (failed + advanced)

    def _outage(self, recent: list[tuple[Key, bool]], running: int, waiting: int) -> bool:
        failed, entries = [key for key, well in recent if not well], len(recent) + len(self._advanced)
        if entries < ENOUGH:
            return bool(waiting) and running == 0 and len(failed) == entries > 0
        if len(failed) <= self._max_share * entries:
            self._paused_s, self._delay_s = 0.0, FIRST_S
            return False
        return len({index for index, _ in failed}) >= PROMPTS or len(failed) == entries

    def _pause(self, recent: list[tuple[Key, bool]], now: float) -> AdmissionChange:
        self.paused = f"{self._sentence(recent)} One attempt at a time goes on until one succeeds."
        self._strikes.clear()
        self._probed.clear()
        self._paused_at, self._counted_at, self._probe_at, self.probe, self._resume = (
            now,
            now,
            now + self._delay_s,
            None,
            False,
        )
        return AdmissionChange("pause", self.paused)

    def _resumed(self, now: float, why: str) -> AdmissionChange:
        seconds = now - self._paused_at
        self.paused, self.probe, self._resume = "", None, False
        # Earlier failures count no more; earlier successes still show that one prompt's failures are its own.
        self._window = OrderedDict((key, well) for key, well in self._window.items() if well)
        return AdmissionChange("resume", f"{why} after a pause of {seconds:.0f} s.")

    def _sentence(self, recent: list[tuple[Key, bool]]) -> str:
        failed, ended = sum(not well for _, well in recent), len(recent)
        (kind, text), count = self._texts.most_common(1)[0]
        share = f"{failed} of the last {ended} trajectories failed ([task] max_failed_share = {self._max_share:g})"
        return f"{share}; the most frequent error ({kind}, {count} times): {text.rstrip('.')}."

    @property
    def counts(self) -> tuple[tuple[str, int, str], ...]:
        """(kind, failures, last error), the most frequent first."""
        found = [(kind, count, failure.error[:TEXT_CHARS]) for kind, (count, failure) in self.last.items()]
        return tuple(sorted(found, key=lambda entry: (-entry[1], entry[0])))
