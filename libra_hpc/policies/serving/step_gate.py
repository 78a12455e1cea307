"""The gate before each rollout step on a device whose server has users: how many tokens may the step have?

- The owner has closed it, or a server process was silent for `SILENT_S` -> none.
- Nobody is served -> as many as end within ``share`` of the limit for a first token: a begun step cannot be stopped,
  and a request may arrive right after its begin.
- Somebody is served, ``give = "idle"`` -> none.
- Somebody is served, ``give = "slack"`` -> as many as end before the least slack, and within ``share`` as well:

      prefill: oldest arrival + ttft - now - T_prefill(waiting)       decode: oldest last token + tpot - now - T_decode

- The cost of a step is unknown -> `PROBE` while nobody is served, else none.

Pure: ``now`` is of the clock of the view's times.
"""

from __future__ import annotations

from math import inf
from typing import Final, Literal, NamedTuple

from .server_pace import ServerPace
from .serving_view import ServingView
from .step_cost import StepCost, StepWork

Reason = Literal["open", "probe", "closed", "silent", "served", "slack", "long"]
"""``probe``: the cost of a step is unknown; ``slack``: too little; ``long``: one token exceeds the share."""
SILENT_S: Final = 1.0
"""Seconds, four beats of a server.  Half: closed by one that is only busy; double: a new one serves unseen as long."""
PROBE: Final = 16
"""Tokens."""


class GateLimits(NamedTuple):
    """What the owner's users must not lose, in seconds, and what he gives."""

    ttft_s: float
    tpot_s: float
    give: Literal["idle", "slack"] = "idle"
    share: float = 0.2
    """Longest step as a share of ``ttft_s``.  Half: small steps, which cost more per token; double: twice the harm."""


class GateDecision(NamedTuple):
    tokens: int
    """Most of the next step; 0: it must not begin."""
    reason: Reason
    limit_s: float = 0.0
    """Longest that the step may take."""


class StepGate:
    """Give every measured step to `stepped`, and ask `decide` before each."""

    def __init__(self, limits: GateLimits) -> None:
        self.limits = limits
        self.cost = StepCost()
        self.pace = ServerPace()

    def stepped(self, batch: StepWork, seconds: float, now: float) -> None:
        """A step has ended."""
        self.cost.observe(batch, seconds, now)
        self.pace.stepped(now)

    def decide(self, view: ServingView, batch: StepWork, now: float) -> GateDecision:
        """Whether a step may begin; ``batch``: all that is there to compute."""
        self.pace.observe(view, now)
        if view.closed:
            return GateDecision(0, "closed")
        if now - view.written > SILENT_S:
            return GateDecision(0, "silent")
        longest = self.limits.share * self.limits.ttft_s
        known = self.cost.known(now)
        if not view.served:
            if not known:
                return GateDecision(PROBE, "probe", longest)
            tokens = self.cost.tokens(batch, longest)
            return GateDecision(tokens, "open" if tokens else "long", longest)
        if self.limits.give == "idle" or not known:
            return GateDecision(0, "served")
        limit = min(longest, self._slack(view, now))
        tokens = self.cost.tokens(batch, limit) if limit > 0.0 else 0
        return GateDecision(tokens, "open" if tokens else "slack", limit)

    def _slack(self, view: ServingView, now: float) -> float:
        """Seconds until the first user would wait longer than the limits; -inf while that cannot be known."""
        prefill = decode = inf
        if view.waiting:
            prefill = view.arrival + self.limits.ttft_s - now - self.pace.prefill_s(view)
        if view.served > view.waiting:
            # A stream that has just been answered may not show its token yet.
            decode = min(view.last_token, now) + self.limits.tpot_s - now - self.pace.decode_s
        return min(prefill, decode)
