"""Which trajectories keep their context in an engine's KV cache when all contexts together exceed it.

An engine evicts the least recently used context.  With more open contexts than cache, every turn finds its own evicted
and prefills it again.  So some trajectories are *resident*, and the others wait without cache:

- A trajectory's turn is sent -> it is resident there, through its tool calls too, until it ends or leaves.
- The residents' contexts stay below `START_AT` of the cache with one more -> it may become resident.
- They exceed `PARK_AT`, because contexts grow -> residents in tool calls are parked, the smallest first: their prefill
  costs least.
- Nobody else can be parked, or the returning trajectory is the smallest -> it is parked itself.
- A trajectory has no room anywhere -> it waits (``wait="room"``), and nobody behind it in the queue is started.
- An engine has no resident -> any trajectory may become one, so that none waits for ever.

Contexts that fit into the cache change no decision.  A prompt counts once for all its siblings at an engine.
"""

from __future__ import annotations

from typing import Final

START_AT: Final = 0.8
"""Share of the cache.  0.6 and 0.7 make a batch about 3 % longer.  At `PARK_AT` each start parks another trajectory,
and a batch takes 1.3 times as long."""
PARK_AT: Final = 0.9
"""Share of the cache, as contexts in flight still grow.  At 1.1 a batch takes three times as long."""


class Claim:
    """The room that one trajectory takes in an engine's cache."""

    def __init__(self, prompt_id: str, prompt_tokens: int) -> None:
        self.prompt_id, self.prompt_tokens = prompt_id, prompt_tokens
        """Its siblings have the same two; ``prompt_tokens`` is 0 where its first turn was not seen."""
        self.cache: EngineCache | None = None
        """Where it is resident."""
        self.own = 0
        """Context tokens there that no sibling shares."""
        self.key = 0.0
        """Its place in the queue since its last turn became ready."""
        self.running = False
        """Whether its turn is at an engine: a running turn cannot be parked."""

    @property
    def context(self) -> int:
        """Context tokens where it is resident."""
        return self.own + self.prompt_tokens


class EngineCache:
    """The residents of one engine."""

    def __init__(self, capacity: float = 0.0) -> None:
        self.capacity = capacity
        """Tokens."""
        self.held = 0
        """Context tokens of the residents."""
        self._residents: dict[Claim, None] = {}
        self._prompts: dict[str, tuple[int, int]] = {}
        """Residents by prompt, and its tokens as they are held."""

    @property
    def residents(self) -> int:
        return len(self._residents)

    def added(self, claim: Claim, context: int) -> int:
        """Tokens that a trajectory of ``context`` tokens adds that lives elsewhere: siblings share their prompt."""
        return context - claim.prompt_tokens if claim.prompt_id in self._prompts else context

    def has_room(self, claim: Claim, context: int) -> bool:
        """Whether it may be resident here."""
        return not self._residents or self.held + self.added(claim, context) <= START_AT * self.capacity

    def hold(self, claim: Claim, context: int) -> None:
        """Make a trajectory of ``context`` tokens resident here, and nowhere else."""
        if claim.cache is not self:
            release(claim)
            claim.cache, claim.own = self, 0
            siblings, tokens = self._prompts.get(claim.prompt_id, (0, claim.prompt_tokens))
            self._prompts[claim.prompt_id] = siblings + 1, tokens
            if not siblings:
                self.held += claim.prompt_tokens
            self._residents[claim] = None
        own = max(0, context - claim.prompt_tokens)
        self.held += own - claim.own
        claim.own = own

    def fits(self, claim: Claim) -> bool:
        """Park residents in tool calls until the rest fits; False where ``claim`` is to be parked instead."""
        while self.held > PARK_AT * self.capacity and len(self._residents) > 1:
            least: Claim | None = None
            for other in self._residents:
                if not other.running and other is not claim and (least is None or other.context < least.context):
                    least = other
            if least is None or least.context > claim.context:
                return False
            release(least)
        return True

    def _remove(self, claim: Claim) -> None:
        del self._residents[claim]
        self.held -= claim.own
        siblings, tokens = self._prompts.pop(claim.prompt_id)
        if siblings > 1:
            self._prompts[claim.prompt_id] = siblings - 1, tokens
        else:
            self.held -= tokens


def release(claim: Claim) -> None:
    """Give up the room of a trajectory, if it has any."""
    cache = claim.cache
    if cache is not None:
        cache._remove(claim)
        claim.cache = None
