"""Where each request of an agent goes on: the samples of one trajectory, token for token.

- A request continues the *longest* sample whose messages are its prefix (role, text, arguments and ids of calls; not
  thinking) under equal tools. Only what is new is rendered; what was sampled stays as it was sampled.
- Else it begins a sample, with a cause: `CAUSES`.
- A stop string ends a turn with the token that completes it: this is kept and trained as sampled, what follows it is
  dropped, and the agent reads the text before the string.
"""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from typing import Any, NamedTuple

from msgspec.structs import replace

from libra_hpc.chat.dialects import TAIL, BridgeError, Dialect
from libra_hpc.errors import UserError

from .agent_request import CONTEXT_FULL, REFUSED, AgentRequest, Answer, RequestRefused, answer_of, identity

CAUSES = ("rewritten", "tools", "returned", "unbridged", "thinking")
"""Why a request began a sample: it changed messages that came before; its tools are others than the newest sample's (a
sub-agent); it goes on with a sample that is not the newest; the template cannot write what follows; the template drops
thinking that the context has (``chat.thinking = "template"``)."""


class PlacedTurn(NamedTuple):
    """Tokens that a turn follows: of the newest sample as an addition, or a new sample as a whole."""

    tokens: list[int]
    new_sample: bool


class _Sample:
    def __init__(self, tokens: list[int], tools: list[dict[str, Any]]) -> None:
        self.tokens, self.tools = tokens, tools
        self.keys: list[Any] = []
        """Identity of its messages, the policy's newest included."""
        self.sampled: list[int] = []
        """Tokens of its newest turn, the last of `tokens`."""
        self.thinking: dict[int, str] = {}
        """What the policy thought, by the number of the message, as far as `tokens` have it."""


class Conversation:
    """The samples of one trajectory, the newest last; pure: no clock, no I/O."""

    def __init__(self, dialect: Dialect, drops_thinking: bool = False) -> None:
        self._dialect, self._drops_thinking = dialect, drops_thinking
        self._samples: list[_Sample] = []
        self._stop: tuple[str, ...] = ()
        """Stop strings of the request that was placed last."""
        self.causes: Counter[str] = Counter()
        """How many samples began for each of `CAUSES`."""

    @property
    def samples(self) -> int:
        return len(self._samples)

    def place(self, request: AgentRequest, most: int) -> PlacedTurn:
        """What the turn of a request follows, in a context of at most ``most`` tokens.

        Raises `RequestRefused` when there is no room, or the template cannot write the messages, and changes nothing.
        """
        whole, cause, thinking = self._written(request, most)
        if len(whole) >= most:
            why = f"The messages have {len(whole)} tokens or more; the context has {most}, and a turn needs one."
            raise RequestRefused(400, CONTEXT_FULL, why)
        goes_on, before = bool(self._samples) and not cause, 0
        if goes_on:
            before, self._samples[-1].tokens = len(self._samples[-1].tokens), whole
        else:
            self._samples.append(_Sample(whole, request.tools))
            self.causes.update([cause] if cause else [])
        self._samples[-1].keys, self._samples[-1].thinking, self._stop = request.keys, thinking, request.stop
        return PlacedTurn(whole[before:], not goes_on)

    def _written(self, request: AgentRequest, most: int) -> tuple[list[int], str, dict[int, str]]:
        """The context of a request's turn, the cause for which it begins a sample, and the thinking in it."""
        best = max(self._fitting(request), key=lambda sample: len(sample.keys), default=None)
        sent = {n: one["reasoning_content"] for n, one in enumerate(request.messages) if one.get("reasoning_content")}
        before = kept = best.thinking if best is not None else sent
        if self._drops_thinking and before:
            with suppress(UserError):  # it refuses what the policy wrote: the context grows as it is
                kept = {n: before[n] for n in self._dialect.keeps(request.messages, request.tools, [*before])}
        added = self._following(best, request, most) if best is not None and kept == before else None
        if best is not None and added is not None:
            return [*best.tokens, *added], "" if best is self._samples[-1] else "returned", kept
        cause = self._cause(request, best) if best is None or kept == before else "thinking"
        return self._rendered(request, kept, most), cause, kept

    def counted(self, request: AgentRequest, most: int) -> Answer:
        """An answer without a turn: the tokens that one would follow."""
        return Answer(request.model, "", "", (), False, len(self._written(request, most)[0]), 0)

    def _cause(self, request: AgentRequest, best: _Sample | None) -> str:
        """Why a request that no sample goes on with begins one; empty for the first."""
        if best is not None:
            return "unbridged"
        if not self._samples:
            return ""
        return "rewritten" if self._samples[-1].tools == request.tools else "tools"

    def _rendered(self, request: AgentRequest, thinking: dict[int, str], most: int) -> list[int]:
        written = [
            one | ({"reasoning_content": thinking[n]} if n in thinking else {})
            for n, one in enumerate(request.messages)
        ]
        try:
            return self._dialect.first(written, request.tools, most)
        except UserError as error:
            raise RequestRefused(400, REFUSED, str(error)) from error

    def said(self, sampled: list[int], cut: bool, number: str) -> Answer:
        """The answer to the request that was placed last; ``number`` makes its ids."""
        sample = self._samples[-1]
        kept, shown, stop = self._dialect.stopped(sampled, self._stop)
        reply = self._dialect.parse(sample.tokens[-TAIL:], shown, sample.tools)
        sample.sampled = sampled[:kept]
        answer = answer_of(reply, number, len(sample.tokens), sample.sampled, cut and not stop)
        if reply.thinking and self._drops_thinking:
            sample.thinking = sample.thinking | {len(sample.keys): reply.thinking}
        sample.keys = [*sample.keys, identity(answer.message)]
        sample.tokens += sample.sampled
        return replace(answer, stop=stop)

    def unread(self) -> None:
        """The turn of the request that was placed last is dropped: nothing goes on with its sample."""
        self._samples[-1].keys = [None]

    def _fitting(self, request: AgentRequest) -> list[_Sample]:
        """Samples that the messages begin with, the newest first."""
        keys = request.keys
        return [
            one
            for one in reversed(self._samples)
            if len(one.keys) < len(keys) and one.tools == request.tools and keys[: len(one.keys)] == one.keys
        ]

    def _following(self, sample: _Sample, request: AgentRequest, most: int) -> list[int] | None:
        """What follows the newest turn of a sample; None where the template cannot write it."""
        before = len(sample.tokens) - len(sample.sampled)
        tail = sample.tokens[max(0, before - TAIL) : before]
        try:
            new = request.messages[len(sample.keys) :]
            return self._dialect.delta(tail, sample.sampled, new, request.tools, most=most)
        except (BridgeError, UserError):
            return None
