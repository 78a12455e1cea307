"""Failed attempts: how long a trajectory waits for its next one, when admission pauses, and when the run ends.

- Attempt failed -> wait 1, 2, 4, ... s, at most `LONGEST_S`.
- `MAX_STRIKES` failures, and a turn sent after the first went well -> give the trajectory up; else at twice as many.
- Every open sample of a prompt failed since its last success -> the prompt *fails*: one witness for all its samples.
- More than ``max_share`` of the open prompts fail -> pause: admit no prompt, begin one attempt at a time (a *probe*).
- Probes alternate between prompts that fail and fresh ones; a probe failed -> twice the time until the next one.
- Failure before or in a pause -> does not count against its trajectory, except of a probe.
- A failing prompt succeeded as a probe -> resume.
- An attempt elsewhere whose last turn was sent in the pause succeeded -> resume: the failures are those prompts' own.
- Paused for ``patience_s`` in all, without `SOUND` successes or an attempt that advances in between -> fail.

Prompts that still run count too: fast failures must not outweigh slow successes. Times: seconds of any monotonic clock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Literal, NamedTuple

MAX_STRIKES = 3
"""One failure may be an accident, three are the trajectory's own fault."""
ENOUGH = 3
"""Attempts of a prompt in a row.  Where 30 % of all attempts fail, two in a row are 9 % of the time, three 3 %."""
PROMPTS = 2
"""Fewest prompts whose failures make an outage; one, where nothing went well yet."""
SOUND = 8
"""Successes after which earlier pauses are forgotten."""
NAMED = 8
"""Most prompts named in a sentence."""
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


class _Row:
    """Failures of one prompt since its last success."""

    def __init__(self) -> None:
        self.count = 0
        self.samples: set[int] = set()

    def fails(self, open_: int) -> bool:
        """Whether none of its ``open_`` samples may still go well at first try."""
        return self.count >= ENOUGH and 0 < open_ <= len(self.samples)


class FailureBook:
    """Records how attempts end; `evaluate` decides."""

    def __init__(self, max_share: float, patience_s: float) -> None:
        self._max_share, self._patience_s = max_share, patience_s
        self.last: dict[str, tuple[int, Failure]] = {}
        """Failures so far and the last one, by kind."""
        self._texts: Counter[tuple[str, str]] = Counter()
        self._rows: dict[int, _Row] = {}
        """By prompt; none after a success."""
        self._failing: set[int] = set()
        """Open prompts that fail."""
        self._proof = float("-inf")
        """When the last turn of an attempt that went well was sent, the latest one."""
        self._own: set[int] = set()
        """Prompts whose failures are their own."""
        self._strikes: dict[Key, tuple[int, float]] = {}
        """Failures that count against a trajectory, and when the first one was."""
        self.paused = ""
        """Why no prompt is admitted; empty while prompts are."""
        self.probe: Key | None = None
        """The attempt that was begun as a probe and has not ended."""
        self.fresh_next = True
        """Whether the next probe is of a prompt that does not fail."""
        self._probed: Counter[int] = Counter()
        """Probes of this pause that failed, by prompt."""
        self._probe_at = self._paused_at = self._paused_s = self._counted_at = 0.0
        self._delay_s = FIRST_S
        self._well = 0
        """Successes since the last failure that paused."""
        self._resume = ""
        """Why to resume; empty: there is no reason."""
        self._over = False

    # --- records
    # ----------------------------------------------------------------------------------------------

    def failed(self, key: Key, failure: Failure, now: float) -> float | None:
        """Record a failure; seconds until the next attempt of this trajectory, None when it is given up."""
        count = self.last[failure.kind][0] if failure.kind in self.last else 0
        self.last[failure.kind] = (count + 1, failure)
        text = (failure.kind, failure.error[:TEXT_CHARS])
        if text in self._texts or len(self._texts) < TEXTS:
            self._texts[text] += 1
        row = self._rows.setdefault(key[0], _Row())
        row.count += 1
        row.samples.add(key[1])
        if self.paused and key != self.probe:
            return FIRST_S
        if self.paused:
            self.probe = None
            self._probed[key[0]] += 1
            self._delay_s = min(LONGEST_S, 2.0 * self._delay_s)
            self._probe_at = now + self._delay_s
        strikes, since = self._strikes.get(key, (0, now))
        if strikes + 1 >= (MAX_STRIKES if self._proof >= since else 2 * MAX_STRIKES):
            self._strikes.pop(key, None)
            return None
        self._strikes[key] = (strikes + 1, since)
        return min(LONGEST_S, FIRST_S * 2.0**strikes)

    def succeeded(self, key: Key, sent_at: float) -> None:
        """Record a success; the last turn of the attempt went to the environment at ``sent_at``."""
        if self.paused and not self._resume and (key == self.probe or sent_at > self._paused_at):
            self._resume = "An attempt succeeded"
            if not self.failing(key[0]):
                self._own |= self._failing
        self.settled(key[0])
        self._proof = max(self._proof, sent_at)
        self._strikes.pop(key, None)
        self._well += 1
        if key == self.probe:
            self.probe = None

    def advanced(self, key: Key) -> None:
        """Record that an environment opened an episode, or answered a turn and expects the next."""
        # An attempt that always fails at its last step advances every time before.
        if self.paused and key != self.probe and key[0] not in self._rows:
            self._paused_s = 0.0

    def settled(self, index: int) -> None:
        """Forget the failures of a prompt."""
        self._rows.pop(index, None)
        self._failing.discard(index)
        self._own.discard(index)

    def failing(self, index: int) -> bool:
        """Whether a prompt fails, as last evaluated."""
        return index in self._failing

    def probing(self, key: Key) -> None:
        self.probe, self.fresh_next = key, self.failing(key[0])

    def probed(self, key: Key) -> int:
        """How often its prompt failed as a probe in this pause."""
        return self._probed[key[0]]

    def may_probe(self, now: float) -> bool:
        return bool(self.paused) and not self._over and self.probe is None and now >= self._probe_at

    # --- decisions
    # ----------------------------------------------------------------------------------------------

    def evaluate(self, prompts: Mapping[int, int], waiting: int, now: float) -> AdmissionChange | None:
        """Decide; None: go on.

        ``prompts``: samples of each open prompt that have not ended; ``waiting`` trajectories wait for their next
        attempt.
        """
        self._failing = {index for index, row in self._rows.items() if row.fails(prompts.get(index, 0))}
        if not self.paused:
            if self._well >= SOUND:
                self._paused_s, self._delay_s = 0.0, FIRST_S
            failing = len(self._failing - self._own)
            fewest = PROMPTS if self._proof > float("-inf") else 1
            outage = failing > self._max_share * len(prompts) and failing >= fewest
            return self._pause(failing, len(prompts), now) if outage else None
        self._paused_s += now - self._counted_at
        self._counted_at = now
        if self._resume:
            return self._resumed(now)
        if waiting and self.probe is None and not self._over and self._paused_s > self._patience_s:
            self._over = True
            sentence = self._sentence(len(self._failing), len(prompts))
            limit = f"[task] failed_patience_s = {self._patience_s:g}"
            return AdmissionChange("fail", f"{sentence} Admission was paused for {self._paused_s:.0f} s ({limit}).")
        return None

    def unable(self, now: float) -> None:
        """Do not count the time since the last call of this or `evaluate` as patience: no probe could run."""
        self._counted_at = now

    def discount(self, seconds: float) -> None:
        """Do not count a stall of this process as pause."""
        self._paused_at += seconds
        self._counted_at += seconds
        self._probe_at += seconds

    def _pause(self, failing: int, prompts: int, now: float) -> AdmissionChange:
        self.paused = f"{self._sentence(failing, prompts)} One attempt at a time goes on until one succeeds."
        self._strikes.clear()
        self._probed.clear()
        self._paused_at = self._counted_at = now
        self._probe_at = now + self._delay_s
        self.probe, self._resume, self.fresh_next, self._well = None, "", True, 0
        return AdmissionChange("pause", self.paused)

    def _resumed(self, now: float) -> AdmissionChange:
        sentence = f"{self._resume} after a pause of {now - self._paused_at:.0f} s."
        self.paused, self._resume, self.probe = "", "", None
        if self._own:
            named = sorted(self._own)
            more = f" and {len(named) - NAMED} more" if len(named) > NAMED else ""
            which = ", ".join(map(str, named[:NAMED]))
            return AdmissionChange("resume", f"{sentence} Failures are of prompts {which}{more} of the data order.")
        self._rows.clear()
        return AdmissionChange("resume", sentence)

    def _sentence(self, failing: int, prompts: int) -> str:
        (kind, text), count = self._texts.most_common(1)[0]
        share = f"{failing} of {prompts} open prompts fail again and again ([task] max_failed_share"
        share = f"{share} = {self._max_share:g})"
        return f"{share}; the most frequent error ({kind}, {count} times): {text.rstrip('.')}."

    @property
    def counts(self) -> tuple[tuple[str, int, str], ...]:
        """(kind, failures, last error), the most frequent first."""
        found = [(kind, count, failure.error[:TEXT_CHARS]) for kind, (count, failure) in self.last.items()]
        return tuple(sorted(found, key=lambda entry: (-entry[1], entry[0])))
