"""The gate in the process of a rollout engine: before each step it reads the page and sets the tokens of the step.

- The gate is closed and there is work -> no step begins, and the seconds count as paused.
- Closed with work for longer than its turns wait (`Pauses`) -> the engine *stands still*: they are wanted back.
- It stood still, and the gate has been open for `REOPEN_S` -> it takes turns again.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Annotated, Protocol

import msgspec

from libra_hpc.policies.serving.pauses import LONGEST_S, STAND_S, Pauses
from libra_hpc.policies.serving.step_cost import StepWork
from libra_hpc.policies.serving.step_gate import SHARE, GateLimits, Reason, StepGate

from .page import Page

REOPEN_S = 0.25
"""Seconds: between two requests of a server that is always busy the gate opens for less."""
UNASKED_S = 1.0
"""Seconds: an engine that did not ask for longer had nothing to do, and knows nothing of the gate in this time."""

Positive = Annotated[float, msgspec.Meta(gt=0)]


class GateConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A device on which somebody's server has users."""

    page: str
    """The file that the server writes (`Page`)."""
    ttft_s: Positive
    """Limit for a first token."""
    share: Annotated[float, msgspec.Meta(gt=0, le=1)] = SHARE
    """Longest step as a share of ``ttft_s``."""
    longest_s: Positive = LONGEST_S
    """Most seconds that turns wait for the gate to open."""


class Scheduler(Protocol):
    """vLLM's, or what is like it."""

    max_num_scheduled_tokens: int
    """Most tokens of the next step."""


class Batches(Protocol):
    """The batches of a scheduler."""

    def take(self) -> StepWork:
        """Return the work of the last step."""

    def upcoming(self) -> StepWork:
        """What is there to compute."""


class GatedStart:
    """The gate before each step of an engine's start: its load, its profile run, its capture of graphs."""

    def __init__(self, config: GateConfig) -> None:
        self._page, self._gate = Page(config.page), StepGate(GateLimits(config.ttft_s))

    def may_begin(self) -> bool:
        """Whether nobody is served: how long such a step takes is unknown."""
        return self._gate.decide(self._page.read(), StepWork(), time.monotonic()).tokens > 0


class GatedSteps:
    """Ask `may_step` before each step, and report it to `stepped`.  Raises `UserError` for a page that is none."""

    def __init__(
        self, config: GateConfig, scheduler: Scheduler, batches: Batches, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._page, self._scheduler, self._batches, self._clock = Page(config.page), scheduler, batches, clock
        self._most = scheduler.max_num_scheduled_tokens
        self._gate = StepGate(GateLimits(config.ttft_s, config.share))
        self._pauses, self._asked_at = Pauses(config.longest_s), self._clock()
        self._paused_at: float | None = None
        self._closed_at: float | None = None
        self._opened_at: float | None = None
        self.paused_s = 0.0
        """With work and without leave to step, since the start."""
        self.stands_still = False
        self.reason: Reason = "open"
        """Reason of the last decision."""
        self.pause = ""
        """Cause of the last decision against a step."""

    def may_step(self, work: bool) -> bool:
        """Whether a step may begin now, of at most the tokens that the scheduler has been given; ``work``: whether
        there is anything to do."""
        now = self._clock()
        tokens, self.reason = self._gate.decide(self._page.read(), self._batches.upcoming(), now)
        if self._paused_at is not None:
            self.paused_s += now - self._paused_at
        self._paused_at = now if work and not tokens else None
        if not tokens:
            self.pause = self.reason
        else:
            self._scheduler.max_num_scheduled_tokens = min(tokens, self._most)
        self._watch(now, work, closed=not tokens)
        return tokens > 0

    def _watch(self, now: float, work: bool, closed: bool) -> None:
        if now - self._asked_at > UNASKED_S:
            self._closed_at = None
        self._asked_at = now
        if closed:
            self._opened_at = None
            if not (work or self.stands_still):
                self._closed_at = None
            elif self._closed_at is None:
                self._closed_at = now
            elif now - self._closed_at >= self._pauses.waits_s(STAND_S):
                self.stands_still = True
        else:
            if self._closed_at is not None:
                self._pauses.paused(now - self._closed_at)
            self._closed_at = None
            self._opened_at = now if self._opened_at is None else self._opened_at
            if now - self._opened_at >= REOPEN_S:
                self.stands_still = False

    def stepped(self, seconds: float) -> None:
        """A step has ended."""
        self._page.stepped()
        self._gate.stepped(self._batches.take(), seconds, self._clock())
