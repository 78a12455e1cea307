"""The gate before each rollout step on a device whose server has users: how many tokens may the step have?

- The owner has closed it, or a server process was silent for `SILENT_S` -> none.
- Nobody is served -> as many as end within ``share`` of the limit for a first token: a begun step cannot be stopped,
  and a request may arrive right after its begin.
- Somebody is served -> none.
- The cost of a step is unknown -> `PROBE`.

Pure: ``now`` is of the clock of the view's times.
"""

from __future__ import annotations

from typing import Final, Literal, NamedTuple

from .serving_view import ServingView
from .step_cost import StepCost, StepWork

Reason = Literal["open", "probe", "closed", "silent", "served", "long"]
"""``probe``: the cost of a step is unknown; ``long``: one token exceeds the share."""
SILENT_S: Final = 1.0
"""Seconds, four beats of a server.  Half: closed by one that is only busy; double: a new one serves unseen as long."""
PROBE: Final = 16
"""Tokens."""
SHARE: Final = 0.15
"""Half: small steps, which cost more per token; double: twice the harm."""


class GateLimits(NamedTuple):
    """What the owner's users must not lose."""

    ttft_s: float
    """Limit (seconds) for a first token."""
    share: float = SHARE
    """Longest step as a share of ``ttft_s``."""


class GateDecision(NamedTuple):
    tokens: int
    """Most of the next step; 0: it must not begin."""
    reason: Reason


class StepGate:
    """Give every measured step to `stepped`, and ask `decide` before each."""

    def __init__(self, limits: GateLimits) -> None:
        self.limits = limits
        self.cost = StepCost()

    def stepped(self, batch: StepWork, seconds: float, now: float) -> None:
        """A step has ended."""
        self.cost.observe(batch, seconds, now)

    def decide(self, view: ServingView, batch: StepWork, now: float) -> GateDecision:
        """Whether a step may begin; ``batch``: all that is there to compute."""
        if view.closed:
            return GateDecision(0, "closed")
        if now - view.written > SILENT_S:
            return GateDecision(0, "silent")
        if view.served:
            return GateDecision(0, "served")
        longest = self.limits.share * self.limits.ttft_s
        if not self.cost.known(now):
            return GateDecision(PROBE, "probe")
        tokens = self.cost.tokens(batch, longest)
        return GateDecision(tokens, "open" if tokens else "long")
