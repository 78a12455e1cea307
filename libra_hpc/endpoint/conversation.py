"""Where each request of an agent goes on: the samples of one trajectory, token for token.

- A request continues the *longest* sample whose messages are its prefix (`identity`) under equal tools, and which no
  other request goes on with now. Only what is new is rendered; what was sampled stays as it was sampled.
- Else it begins a sample, with a cause: `CAUSES`. All samples stay open.
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

CAUSES = ("parallel", "rewritten", "tools", "unbridged", "thinking")
"""Why a request began a sample: others had turns then; it changed messages that came before; its tools are
others than the newest sample's (a sub-agent); the template cannot write what follows; the template drops thinking that
the context has (``chat.thinking = "template"``)."""


class GrowingSample:
    """One growing context, whose turns follow one another."""

    def __init__(self, tokens: list[int], tools: list[dict[str, Any]]) -> None:
        self.tokens, self.tools = tokens, tools
        self.stop: tuple[str, ...] = ()
        """Stop strings of its newest request."""
        self.running = False
        """Whether a request waits for its turn here."""
        self.keys: list[Any] = []
        """Identity of its messages, the policy's newest included."""
        self.sampled: list[int] = []
        """Tokens of its newest turn, the last of `tokens`."""
        self.thinking: dict[int, str] = {}
        """What the policy thought, by the number of the message, as far as `tokens` have it."""


class PlacedTurn(NamedTuple):
    """Tokens that a turn follows: an addition to its sample, or the whole of a new one."""

    sample: GrowingSample
    tokens: list[int]
    new_sample: bool


class Conversation:
    """The samples of one trajectory, the one that went on last as the last; pure: no clock, no I/O."""

    def __init__(self, dialect: Dialect, drops_thinking: bool = False) -> None:
        self._dialect, self._drops_thinking = dialect, drops_thinking
        self._samples: list[GrowingSample] = []
        self.causes: Counter[str] = Counter()
        """How many samples began for each of `CAUSES`."""

    @property
    def samples(self) -> int:
        return len(self._samples)

    def place(self, request: AgentRequest, most: int) -> PlacedTurn:
        """What the turn of a request follows, in a context of at most ``most`` tokens.

        Raises `RequestRefused` when there is no room, or the template cannot write the messages, and changes nothing.
        """
        best, added, cause, thinking = self._written(request, most)
        sample = best or GrowingSample([], request.tools)
        if (count := len(sample.tokens) + len(added)) >= most:
            why = f"The messages have {count} tokens or more; the context has {most}, and a turn needs one."
            raise RequestRefused(400, CONTEXT_FULL, why)
        if best is not None:
            self._samples.remove(best)
        self._samples.append(sample)
        self.causes.update([cause] if cause else [])
        sample.tokens += added
        sample.keys, sample.thinking, sample.stop, sample.running = request.keys, thinking, request.stop, True
        return PlacedTurn(sample, added, best is None)

    def _written(self, request: AgentRequest, most: int) -> tuple[GrowingSample | None, list[int], str, dict[int, str]]:
        """The sample that a request goes on with, what it adds there or begins with, why it begins one, and the
        thinking in its context."""
        best = max(self._fitting(request), key=lambda sample: len(sample.keys), default=None)
        sent = {n: one["reasoning_content"] for n, one in enumerate(request.messages) if one.get("reasoning_content")}
        before = kept = best.thinking if best is not None else sent
        if self._drops_thinking and before:
            with suppress(UserError):  # it refuses what the policy wrote: the context grows as it is
                kept = {n: before[n] for n in self._dialect.keeps(request.messages, request.tools, [*before])}
        added = self._following(best, request, most) if best is not None and kept == before else None
        if best is not None and added is not None:
            return best, added, "", kept
        cause = self._cause(request, best) if best is None or kept == before else "thinking"
        return None, self._rendered(request, kept, most), cause, kept

    def counted(self, request: AgentRequest, most: int) -> Answer:
        """An answer without a turn: the tokens that one would follow."""
        sample, added, *_ = self._written(request, most)
        return Answer(request.model, "", "", (), False, len(added) + (len(sample.tokens) if sample else 0), 0)

    def _cause(self, request: AgentRequest, best: GrowingSample | None) -> str:
        """Why a request that no sample goes on with begins one; empty for the first."""
        if best is not None:
            return "unbridged"
        if not self._samples:
            return ""
        if any(one.running for one in self._samples):
            return "parallel"
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

    def said(self, sample: GrowingSample, sampled: list[int], cut: bool, number: str) -> Answer:
        """The answer to the request that goes on with a sample; ``number`` makes its ids."""
        kept, shown, stop = self._dialect.stopped(sampled, sample.stop)
        reply = self._dialect.parse(sample.tokens[-TAIL:], shown, sample.tools)
        sample.sampled = sampled[:kept]
        answer = answer_of(reply, number, len(sample.tokens), sample.sampled, cut and not stop)
        if reply.thinking and self._drops_thinking:
            sample.thinking = sample.thinking | {len(sample.keys): reply.thinking}
        sample.keys = [*sample.keys, identity([answer.message], 0)]
        sample.tokens += sample.sampled
        sample.running = False  # the last: another thread may look for a sample meanwhile
        return replace(answer, stop=stop)

    def unread(self, sample: GrowingSample) -> None:
        """The newest turn of a sample is dropped: nothing goes on there."""
        sample.keys, sample.running = [None], False

    def _fitting(self, request: AgentRequest) -> list[GrowingSample]:
        """Samples that the messages begin with, the newest first."""
        keys = request.keys
        return [
            one
            for one in reversed(self._samples)
            if not one.running
            and len(one.keys) < len(keys)
            and one.tools == request.tools
            and keys[: len(one.keys)] == one.keys
        ]

    def _following(self, sample: GrowingSample, request: AgentRequest, most: int) -> list[int] | None:
        """What follows the newest turn of a sample; None where the template cannot write it."""
        before = len(sample.tokens) - len(sample.sampled)
        tail = sample.tokens[max(0, before - TAIL) : before]
        try:
            new = request.messages[len(sample.keys) :]
            return self._dialect.delta(tail, sample.sampled, new, request.tools, most=most)
        except (BridgeError, UserError):
            return None
