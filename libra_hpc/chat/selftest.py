"""Which dialect a model speaks, proved before the first episode.

- Candidates by ``model_type`` (`RENDERERS`), in order; the last one is the difference of two renderings.
- The first that passes every check is taken; the choice names it, the ``model_type`` and the digest of the template.
- None passes -> one sentence with what the template does.

A renderer of the library passes if its prompts are those of the template, and its deltas what the template writes. The
template itself passes if it only appends: what came before a turn stands unaltered in front of it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from libra_hpc.errors import UserError, invalid
from libra_hpc.protocol.env import ChatChoice
from libra_hpc.tasks.chat_template import ChatTemplate, Message
from libra_hpc.tasks.tokenizer import TaskTokenizer

from .dialects import DUMMY_ID, TAIL, BridgeError, Dialect, LibraryDialect, TemplateDialect, dummy_turn

RENDERERS = {"llama": ("llama-3",), "qwen3": ("qwen3", "prime-qwen3"), "qwen3_moe": ("qwen3",)}
"""Renderers of the library by ``model_type``: models of one type may have different templates."""

TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "description": 'Look at a "thing" <now>.',
        "parameters": {"type": "object", "properties": {"thing": {"type": "string"}}, "required": ["thing"]},
    },
}
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
    plain: TemplateDialect
    """The template itself."""


def choose_dialect(tokenizer: TaskTokenizer, with_tools: bool) -> Choice:
    """Find the dialect of the policy; raises `UserError` with what its template does if none is exact."""
    template = ChatTemplate(tokenizer)
    model_type = _model_type(tokenizer)
    plain = TemplateDialect(tokenizer, template)
    tools = [TOOL] if with_tools else []
    failures = []
    for name in (*RENDERERS.get(model_type, ()), plain.name):
        try:
            dialect = plain if name == plain.name else LibraryDialect(name, tokenizer, plain)
            checks = _prove(dialect, plain, tokenizer, tools)
        except (AssertionError, BridgeError) as error:
            failures.append(f"{name}: {error}")
            continue
        return Choice(dialect, ChatChoice(name, model_type, template.digest, checks), plain)
    why = f"its chat template cannot be continued token by token ({'; '.join(failures)})"
    raise invalid("model.path", str(tokenizer.folder), why, "a template that only appends, as those of Qwen and Llama")


def _prove(dialect: Dialect, plain: TemplateDialect, tokenizer: TaskTokenizer, tools: Sequence[dict[str, Any]]) -> int:
    """Number of comparisons; raises `BridgeError` for the first that fails."""
    if tools and dialect is plain and not plain.reads_calls:
        raise BridgeError("it writes tool calls in a form that is not known")
    made = list(_comparisons(dialect, plain, tokenizer, tools))
    for what, found, wanted in made:
        if found != wanted:
            raise BridgeError(f"{what} differs")
    return len(made)


def _model_type(tokenizer: TaskTokenizer) -> str:
    try:
        return str(json.loads((tokenizer.folder / "config.json").read_bytes()).get("model_type", ""))
    except (OSError, ValueError, AttributeError):
        return ""  # only a tokenizer: the template decides


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


def _comparisons(
    dialect: Dialect, plain: TemplateDialect, tokenizer: TaskTokenizer, tools: Sequence[dict[str, Any]]
) -> Iterator[Comparison]:
    for start in STARTS:
        try:
            wanted = plain.first(start, tools)
        except UserError:
            if SYSTEM not in start:
                raise
            continue  # a template without system messages
        yield "a first prompt", dialect.first(start, tools), wanted
    for following in answers():
        if following[0]["role"] == "tool" and not tools:
            continue
        yield from _appends(plain, tokenizer, following, tools)
        tail = plain.first([USER], tools)[-TAIL:]
        for sampled in ([*tokenizer.encode("It is"), dialect.stop_ids[0]], tokenizer.encode("It is")):
            found, wanted = (one.delta(tail, sampled, following, tools) for one in (dialect, plain))
            yield "what follows a turn", found, wanted


def _appends(
    plain: TemplateDialect, tokenizer: TaskTokenizer, following: list[Message], tools: Sequence[dict[str, Any]]
) -> Iterator[Comparison]:
    """That the template only appends."""
    template, turn = plain.template, dummy_turn(following)
    delta = plain.delta_text([USER], following, tools)
    later = [USER, {"role": "assistant", "content": "A train."}, USER]
    yield "what follows a later turn", plain.delta_text(later, following, tools), delta
    whole, before = template.render([USER, turn, *following], tools), template.render([USER], tools, generate=False)
    yield "the conversation before a turn", whole[: len(before)], before
    head = whole.removesuffix(delta)
    yield "tokens at the end of a turn", [*tokenizer.encode(head), *tokenizer.encode(delta)], tokenizer.encode(whole)
    start = template.render([USER], tools).removeprefix(before)
    yield "the start of the next turn", delta[len(delta) - len(start) :], start
