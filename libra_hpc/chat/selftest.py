"""Whether a policy's chat is followed exactly, proved before the first episode.

- A call that the template writes is read back -> its calls are written so (`Calls`); none is -> one sentence.
- The template only appends: what came before a turn stands unaltered in front of it. Else one sentence says why not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import takewhile
from typing import Any, NamedTuple, get_args

from libra_hpc.errors import UserError, invalid
from libra_hpc.protocol.env import ChatChoice
from libra_hpc.tasks.tokenizer import ChatTemplate, Message, TaskTokenizer

from .dialects import DUMMY_ID, TAIL, BridgeError, Calls, Dialect, dummy_turn, message_call

TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "description": 'Look at a "thing" <now>.',
        "parameters": {
            "type": "object",
            "properties": {"thing": {"type": "string"}, "times": {"type": "integer"}},
            "required": ["thing"],
        },
    },
}
ARGUMENTS = {"thing": "a train", "times": 2}
ODD = 'Zürich, 北京 🚆 \'q\' "p"\n\n  \t{"a": [1]} </x>\\n'
SYSTEM: Message = {"role": "system", "content": "Be brief."}
USER: Message = {"role": "user", "content": "What is there?"}
STARTS: tuple[list[Message], ...] = (
    [USER],
    [SYSTEM, USER],
    [SYSTEM, {"role": "user", "content": ODD}],
    [USER, {"role": "assistant", "content": "A train."}, {"role": "user", "content": ODD}],
)
"""Conversations that a first prompt may hold."""
Comparison = tuple[str, Any, Any]
"""What is compared, as found and as wanted: text or token ids."""


class Choice(NamedTuple):
    """The dialect of a model, and how it was found."""

    dialect: Dialect
    found: ChatChoice


def choose_dialect(tokenizer: TaskTokenizer, with_tools: bool) -> Choice:
    """Find the dialect of the policy; raises `UserError` with what its template does if none is exact."""
    template = ChatTemplate(tokenizer)
    tools = [TOOL] if with_tools else []
    try:
        dialect = Dialect(tokenizer, template)
        checks = _prove(dialect, tokenizer, tools)
        if tools:
            dialect = _reading(tokenizer, template, tools)
    except BridgeError as error:
        why = f"its chat template cannot be continued token by token ({error})"
        valid = "a template that only appends, as those of Qwen and Llama"
        raise invalid("model.path", str(tokenizer.folder), why, valid) from error
    return Choice(dialect, ChatChoice(template.digest, checks, dialect.calls if tools else ""))


def _reading(tokenizer: TaskTokenizer, template: ChatTemplate, tools: Sequence[dict[str, Any]]) -> Dialect:
    """The dialect that reads back a call which the template writes."""
    turn = {"role": "assistant", "content": "", "tool_calls": [message_call(DUMMY_ID, "look", ARGUMENTS)]}
    before = template.render([USER], tools, generate=False)
    start, written = (
        text.removeprefix(before)
        for text in (template.render([USER], tools), template.render([USER, turn], tools, generate=False))
    )
    # What the template writes of the turn and the policy has in its prompt already, an opened thinking for example.
    written = written[sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(start, written, strict=False))) :]
    for calls in get_args(Calls):
        dialect = Dialect(tokenizer, template, calls)
        tail, sampled = tokenizer.encode(start)[-TAIL:], tokenizer.encode(written)
        ends = [place for place, one in enumerate(sampled) if one in dialect.stop_ids]
        found = dialect.parse(tail, sampled[: ends[0] + 1] if ends else sampled, tools).calls
        if [(one.name, one.arguments, one.error) for one in found] == [("look", ARGUMENTS, "")]:
            return dialect
    raise BridgeError("it writes tool calls in a form that is not known")


def _prove(dialect: Dialect, tokenizer: TaskTokenizer, tools: Sequence[dict[str, Any]]) -> int:
    """Number of comparisons; raises `BridgeError` for the first that fails."""
    made = list(_comparisons(dialect, tokenizer, tools))
    for what, found, wanted in made:
        if found != wanted:
            raise BridgeError(f"{what} differs")
    return len(made)


def answers() -> Iterator[list[Message]]:
    """Messages that may follow a turn: a user's, one tool's, two tools'."""
    yield [USER]
    yield [{"role": "user", "content": ODD}]
    one, two = (
        {"role": "tool", "name": "look", "tool_call_id": DUMMY_ID, "content": text} for text in ("a train", ODD)
    )
    yield [one]
    yield [two]
    yield [one, two]


def _comparisons(dialect: Dialect, tokenizer: TaskTokenizer, tools: Sequence[dict[str, Any]]) -> Iterator[Comparison]:
    ends = "".join(tokenizer.decode([one]) for one in dialect.stop_ids)
    for start in STARTS:
        try:
            wanted = _controls(tokenizer, dialect.first(start, tools))
        except UserError:
            if SYSTEM not in start:
                raise
            continue  # a template without system messages
        forged = [one | {"content": one["content"] + ends} for one in start]
        yield "a message with names of control tokens", _controls(tokenizer, dialect.first(forged, tools)), wanted
    for following in answers():
        if tools or following[0]["role"] != "tool":
            yield from _appends(dialect, tokenizer, following, tools)


def _controls(tokenizer: TaskTokenizer, ids: Sequence[int]) -> list[int]:
    special = tokenizer.added_ids
    return [one for one in ids if special.get(one)]


def _appends(
    dialect: Dialect, tokenizer: TaskTokenizer, following: list[Message], tools: Sequence[dict[str, Any]]
) -> Iterator[Comparison]:
    """That the template only appends."""
    template, turn = dialect.template, dummy_turn(following)
    delta = dialect.delta_text([USER], following, tools)
    later = [USER, {"role": "assistant", "content": "A train."}, USER]
    yield "what follows a later turn", dialect.delta_text(later, following, tools), delta
    whole, before = template.render([USER, turn, *following], tools), template.render([USER], tools, generate=False)
    yield "the conversation before a turn", whole[: len(before)], before
    head = whole.removesuffix(delta)
    yield "tokens at the end of a turn", [*tokenizer.encode(head), *tokenizer.encode(delta)], tokenizer.encode(whole)
    start = template.render([USER], tools).removeprefix(before)
    yield "the start of the next turn", delta[len(delta) - len(start) :], start
