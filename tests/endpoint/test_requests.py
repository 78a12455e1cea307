"""What a request may ask: what is honoured changes its turn as it should, what is not is refused by name."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from libra_hpc.chat.selftest import choose_dialect
from libra_hpc.endpoint import anthropic_messages, chat_completions, responses
from libra_hpc.endpoint.agent_endpoint import APIS
from libra_hpc.endpoint.agent_request import Histories, RequestRefused
from libra_hpc.protocol.codec import unpack_i32
from libra_hpc.tasks.tokenizer import TaskTokenizer

from .played import call, play
from .test_agents import task_of
from .test_conversations import ODD


@pytest.mark.parametrize("seed", range(30))
def test_a_turn_ends_with_the_token_that_completes_a_stop_string(tokenizer: TaskTokenizer, seed: int) -> None:
    draw, dialect = random.Random(seed), choose_dialect(tokenizer, with_tools=False).dialect
    text = "".join(draw.choice([ODD, "the ", "Observation: ", "\n", "</code>", "🚆"]) for _ in range(6))
    at, sampled = draw.randrange(len(text)), tokenizer.encode(text)
    stop = text[at : at + draw.randrange(1, 9)]
    kept, *found = dialect.stopped(sampled, [stop, "never said"])
    assert found == [tokenizer.encode(text[: text.index(stop)]), stop]
    assert [stop in tokenizer.decode(sampled[:count]) for count in (kept - 1, kept)] == [False, True]
    assert dialect.stopped(sampled[:kept], [stop]) == (kept, *found), "what was kept is answered equally"
    ended = [*sampled, *dialect.stop_ids[:1]]
    assert dialect.stopped(ended, ["never said", "<|"]) == (len(ended), ended, "")


async def test_of_a_turn_with_a_stop_string_what_was_kept_is_trained_and_goes_on(
    tokenizer: TaskTokenizer, tmp_path: Path
) -> None:
    said = iter(["<code>\nx = 1\n</code>\nObservation: 2", "So the end", "Observation: kept"])
    task = task_of(tokenizer, tmp_path, "stopping")
    played = await play(task, lambda context: next(said))
    assert (played.end.info["agent_failed"], played.samples) == (0, 1)
    (sample,) = played.trajectory.samples_for_training(1.0)
    ids, mask = unpack_i32(sample.tokens), sample.loss_mask
    own = "".join(tokenizer.decode([one]) if trained else "\0" for one, trained in zip(ids, mask, strict=True))
    wanted = ["<code>\nx = 1\n</code>", "So the", "Observation: kept<|im_end|>"]
    assert [one for one in own.split("\0") if one] == wanted, "of a split token all is kept"
    assert tokenizer.decode(ids) == (
        "<|im_start|>user\nWhat is there?<|im_end|>\n<|im_start|>assistant\n<code>\nx = 1\n</code><|im_end|>\n"
        "<|im_start|>user\ngo on, not </code><|im_end|>\n<|im_start|>assistant\nSo the<|im_end|>\n<|im_start|>user\n"
        "go on, not ['Observation:', 'he']<|im_end|>\n<|im_start|>assistant\nObservation: kept<|im_end|>"
    )
    assert all(ids[: len(context)] == context for context in played.contexts), (
        "turns are trained where they were sampled"
    )
    again = iter(turn[: kept.gen_tokens] for turn, kept in zip(played.turns, played.trajectory.turns, strict=True))
    replayed: Any = await play(task, lambda context: next(again))
    assert replayed.trajectory.tokens == played.trajectory.tokens


CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
LAST: Any = [{"role": "user", "content": "x"}]
TOOL: Any = [{"type": "function", "function": {"name": "look"}, "name": "look"}]
CHANGES: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {"max_token": 5}, "max_token: no such field is known here (did you mean 'max_tokens'?)."),
    (CHAT, {"n": 2}, "n = 2: not possible here; valid: null, 1."),
    (CHAT, {"stop_token_ids": [7]}, "stop_token_ids = [7]: not possible here; valid: null, []."),
    (CHAT, {"stop": 7}, "stop or stop_sequences = 7: not possible here"),
    (CHAT, {"messages": [*LAST, {"role": "assistant", "content": "{"}]}, "the last message's role = 'assistant'"),
    (CHAT, {"messages": []}, "the last message's role = None"),
    (RESPONSES, {"previous_response_id": "resp_1"}, "previous_response_id = 'resp_1'"),
    (RESPONSES, {"text": {"frmat": {}}}, "text.frmat: no such field is known here (did you mean 'text.format'?)."),
    (RESPONSES, {"include": ["message.output_text.logprobs"]}, "include = "),
    (MESSAGES, {"mcp_servers": [{"url": "x"}]}, "mcp_servers = [{'url': 'x'}]: not possible here; valid: null, []."),
    (MESSAGES, {"thread": {"type": "create"}}, "thread: no history is held here; valid: null, with all messages."),
]
WISHES: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"response_format": {"type": "json_object"}}),
    (CHAT, {"tools": TOOL, "tool_choice": "required"}),
    (CHAT, {"tools": TOOL, "parallel_tool_calls": False}),
    (CHAT, {"reasoning_effort": "low"}),
    (CHAT, {"chat_template_kwargs": {"enable_thinking": False}}),
    (CHAT, {"guided_json": {}}),
    (CHAT, {"structured_outputs": {"regex": "a"}}),
    (RESPONSES, {"text": {"format": {"type": "json_object"}}}),
    (RESPONSES, {"reasoning": {"effort": "high"}}),
    (MESSAGES, {"thinking": {"type": "enabled", "budget_tokens": 1024}}),
    (MESSAGES, {"output_config": {"format": {"type": "json_schema"}}}),
    (MESSAGES, {"tools": [{"name": "look"}], "tool_choice": {"type": "any"}}),
]
SAME: list[tuple[str, dict[str, Any]]] = [
    (
        CHAT,
        {"temperature": 0.1, "seed": 1, "user": "u", "metadata": {"a": "b"}, "tool_choice": "none", "logprobs": None},
    ),
    (RESPONSES, {"store": True, "text": {"verbosity": "medium"}, "reasoning": None, "include": []}),
    (MESSAGES, {"top_k": 1, "service_tier": "auto", "thinking": {"type": "adaptive"}, "mcp_servers": []}),
]


def read(path: str, **body: Any) -> Any:
    last = {"input": "x"} if path == RESPONSES else {"messages": LAST}
    return APIS[path].read({**last, **body}, Histories())


def test_what_would_change_a_turn_is_refused_by_name_and_all_else_changes_nothing() -> None:
    for path, body, why in CHANGES:
        with pytest.raises(RequestRefused) as error:
            read(path, **body)
        assert error.value.why.startswith(why)
    for path, body in WISHES:
        assert read(path, **body).unenforced.endswith("; any, where env.unenforced = 'accept' in the run file.")
    for path, body in SAME:
        assert read(path, **body) == read(path)


def test_every_field_that_an_sdk_can_send_is_known() -> None:
    from anthropic.types.beta import message_create_params
    from openai.types.chat.completion_create_params import CompletionCreateParamsBase
    from openai.types.responses.response_create_params import ResponseCreateParamsBase

    for api, params in (
        (chat_completions, CompletionCreateParamsBase),
        (responses, ResponseCreateParamsBase),
        (anthropic_messages, message_create_params.MessageCreateParamsBase),
    ):
        known = {name.partition(".")[0] for name in api.FIELDS}
        assert params.__annotations__.keys() - known <= {"betas"}, "those are a header"


@pytest.mark.parametrize(("unenforced", "column"), [("refuse", "refused_requests"), ("accept", "unenforced_requests")])
async def test_refused_requests_are_counted_and_a_thread_becomes_whole_histories(
    tokenizer: TaskTokenizer, tmp_path: Path, unenforced: str, column: str
) -> None:
    task = task_of(tokenizer, tmp_path, "refused", env={"unenforced": unenforced})
    said = iter([call("look", thing="train"), "I see.", "Yes.", "{}"])
    played = await play(task, lambda context: next(said))
    numbers = {name: value for name, value in played.end.info.items() if "request" in name or name == "agent_failed"}
    assert numbers == {"agent_failed": 0, column: 1}
    assert tokenizer.decode(played.contexts[1]).count("train") == 2, "the call and its result"


async def test_thinking_that_the_template_drops_begins_a_sample_and_no_other(
    tokenizer: TaskTokenizer, tmp_path: Path
) -> None:
    said = [f"<think>\nhm {n}\n</think>\n\n{call('look', thing=n)}" for n in ("a", "b")]
    said += ["<think>\nhm c\n</think>\n\nSeen.", "Done."]
    shown = {"template": [0, 1, 2, 0], "keep": [0, 1, 2, 3]}
    for thinking, marks in shown.items():
        turns = iter(said).__next__
        task = task_of(tokenizer, tmp_path, "completions", thinking=thinking)
        played = await play(task, lambda context, say=turns: say())
        assert [one.count("<think>") for one in played.texts(tokenizer)] == marks, "tools' results keep it"
        parts = [played.turns] if thinking == "keep" else [played.turns[:3], played.turns[3:]]
        assert played.end.info.get("new_thinking", 0) == len(parts) - 1
        samples = played.trajectory.samples_for_training(1.0)
        assert [sum(one.loss_mask) for one in samples] == [sum(map(len, part)) for part in parts]
