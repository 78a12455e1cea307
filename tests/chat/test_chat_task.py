"""What a chat task's author writes, and what the policy gets to read."""

from __future__ import annotations

import asyncio
import json
import random
import re
import time
from functools import partialmethod
from pathlib import Path
from typing import Annotated, Any

import msgspec
import pytest

from libra_hpc.chat.chat_task import Chat, ChatEnvironment, ChatEpisode, ChatTask, tool
from libra_hpc.errors import UserError
from libra_hpc.tasks.base import EnvironmentFailed, PolicyTurn, ToolResult, Turn
from libra_hpc.tasks.tokenizer import TaskTokenizer

from .chat_folder import TEMPLATES, write_chat_folder
from .random_chats import Box


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> TaskTokenizer:
    return TaskTokenizer(write_chat_folder(tmp_path_factory.mktemp("policy")))


class Desk(ChatTask):
    """Its tools note what happens."""

    max_turns = 5

    def __init__(self, tokenizer: TaskTokenizer, *, seed: int = 0) -> None:
        super().__init__(tokenizer, seed=seed)
        self.notes: list[str] = []
        self.both = asyncio.Barrier(2)

    def row(self, index: int) -> dict[str, str]:
        return {"prompt": f"Question {index}"}

    @tool
    async def meet(self, box: Any, name: Annotated[str, msgspec.Meta(description="who")]) -> str:
        """Wait for another one.

        Both must come.
        """
        await self.both.wait()
        self.notes.append(name)
        return f"met {name}"

    @tool(timeout_s=0.01)
    async def sleep(self, box: Any, blocking: bool = False) -> str:
        """Sleep."""
        if blocking:
            time.sleep(0.02)
        else:
            await asyncio.sleep(60)
        return "awake"

    @tool
    async def halve(self, number: int, times: int = 1) -> dict[str, float]:
        """Halve."""
        if number % 2:
            raise ValueError(f"{number} is odd")
        return {"half": number / 2**times}

    @tool
    async def shell(self, chat: Chat, row: dict[str, str]) -> ToolResult:
        """Run."""
        assert chat.messages[0]["content"] == row["prompt"]
        return ToolResult("error", "no such file", 1.5, exit_code=2)

    @tool
    async def broken(self, box: Any) -> str:
        """Break."""
        raise KeyError("a defect of the task")

    async def reward(self, row: Any, chat: Chat, box: Any) -> float | dict[str, float]:
        return {"right": float("yes" in chat.text), "short": 0.5}

    async def close(self, row: Any, box: Any) -> None:
        self.notes.append(f"closed {row['prompt']}")


def call(name: str, arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def play(
    tokenizer: TaskTokenizer,
    *said: str,
    bad: int = 3,
    cut: bool = False,
    thinking: str = "keep",
    desk: type[Desk] = Desk,
) -> tuple[ChatEpisode, list[Turn], Desk]:
    """Play one episode with these turns; ``cut`` cuts the last one."""

    async def run() -> tuple[ChatEpisode, list[Turn], Desk]:
        made = desk(tokenizer)
        episode = made.make({"max_bad_calls": bad, "thinking": thinking}).open(7, 0, 0.0)
        assert isinstance(episode, ChatEpisode)
        box = Box(random.Random(0))
        await episode.start(box)
        turns = []
        for number, text in enumerate(said):
            stop = cut and number == len(said) - 1
            ids = tokenizer.encode(text if stop else text + "<|im_end|>")
            turns.append(await episode.step(PolicyTurn(ids, "length" if stop else "stop"), box))
        await episode.close("done")
        return episode, turns, made

    return asyncio.run(run())


def contents(episode: ChatEpisode) -> list[str]:
    return [one["content"] for one in episode.chat.messages if one["role"] == "tool"]


def test_the_policy_reads_name_docstring_and_types(tokenizer: TaskTokenizer) -> None:
    made = Desk(tokenizer).make({})
    assert isinstance(made, ChatEnvironment)
    schemas: list[Any] = made.schemas
    shown = {one["function"]["name"]: one["function"] for one in schemas}
    assert list(shown) == ["meet", "sleep", "halve", "shell", "broken"]
    assert shown["meet"]["description"] == "Wait for another one.\n\nBoth must come."
    assert shown["meet"]["parameters"]["properties"] == {"name": {"type": "string", "description": "who"}}
    assert shown["halve"]["parameters"]["required"] == ["number"]
    assert shown["halve"]["parameters"]["properties"]["times"] == {"type": "integer", "default": 1}
    assert '"name": "halve"' in tokenizer.decode(
        made.choice.dialect.first([{"role": "user", "content": ""}], made.schemas)
    )


def test_calls_of_a_turn_run_in_parallel_and_are_answered_in_order(tokenizer: TaskTokenizer) -> None:
    episode, turns, made = play(tokenizer, call("meet", {"name": "Bo"}) + call("meet", {"name": "Al"}))
    assert contents(episode) == ["met Bo", "met Al"]
    assert sorted(made.notes[:2]) == ["Al", "Bo"]
    assert [signal.tool for signal in turns[0].signals] == ["meet", "meet"]
    assert 0 < sum(signal.payload_tokens for signal in turns[0].signals) <= len(turns[0].tokens)
    ids = [one["id"] for one in episode.chat.messages[1]["tool_calls"]]
    assert ids == [one["tool_call_id"] for one in episode.chat.messages[2:]] == ["call00000", "call00001"]


@pytest.mark.parametrize(
    ("said", "answer"),
    [
        (call("fly", {}), "error: there is no tool 'fly'; tools: meet, sleep, halve, shell, broken"),
        ("<tool_call>{'name': 1}</tool_call>", "error: the tool call is no valid JSON"),
        (f"<tool_call>{'1' * 5000}</tool_call>", "error: the tool call is no valid JSON"),
        (f"<tool_call>{'[' * 5000}</tool_call>", "error: the tool call is no valid JSON"),
        ('<tool_call>{"arguments": {}}</tool_call>', "error: the tool call has no name"),
        ('<tool_call>{"name": "halve"', "error: the tool call has no end"),
        (call("halve", {}), "error: Object missing required field `number`"),
        (call("halve", {"number": "many"}), "error: Expected `int`, got `str` - at `$.number`"),
        (call("halve", {"number": 4, "by": 3}), "error: Object contains unknown field `by`"),
        (call("halve", [4]), "error: the arguments are no JSON object"),
    ],
)
def test_a_call_that_reaches_no_tool_is_an_answer_and_counted(tokenizer: TaskTokenizer, said: str, answer: str) -> None:
    episode, turns, _ = play(tokenizer, said)
    assert contents(episode) == [answer]
    assert answer in tokenizer.decode(turns[0].tokens)
    assert episode.chat.bad_calls == 1
    assert [signal.outcome for signal in turns[0].signals] == ["error"]


def test_names_that_the_policy_made_up_are_one_name_in_signals(tokenizer: TaskTokenizer) -> None:
    _, turns, _ = play(tokenizer, call("fly", {}) + call("swim", {}))
    assert {signal.tool for signal in turns[0].signals} == {"bad_call"}


def test_what_a_tool_returns_is_what_the_policy_reads(tokenizer: TaskTokenizer) -> None:
    said = [
        call("halve", {"number": 8, "times": "2"}),
        call("halve", {"number": 3}),
        call("sleep", {}),
        call("shell", {}),
    ]
    episode, turns, _ = play(tokenizer, "".join(said))
    assert contents(episode) == ['{"half":2.0}', "error: 3 is odd", "error: no answer within 0.01 s", "no such file"]
    assert [signal.outcome for signal in turns[0].signals] == ["ok", "error", "timeout", "error"]
    assert turns[0].signals[3].exit_code == 2
    assert episode.chat.bad_calls == 0


def test_a_tool_that_blocks_the_host_has_its_limit_too(
    tokenizer: TaskTokenizer, capsys: pytest.CaptureFixture[str]
) -> None:
    episode, _, _ = play(tokenizer, call("sleep", {"blocking": True}))
    assert contents(episode) == ["error: no answer within 0.01 s"]
    assert "tool sleep blocks: all episodes of this host waited" in capsys.readouterr().err


def test_an_exception_of_a_tool_is_an_answer_and_counted(
    tokenizer: TaskTokenizer, capsys: pytest.CaptureFixture[str]
) -> None:
    episode, _, _ = play(tokenizer, *[call("broken", {}) + call("sleep", {})] * 2)
    assert contents(episode)[::2] == ["error: KeyError: 'a defect of the task'"] * 2
    assert episode.chat.tool_errors == 2
    assert capsys.readouterr().err.count("KeyError: 'a defect of the task'") == 1, "the log has it once"


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"prompt": []}, r"rows.jsonl:1: messages = \[\]: no conversation; valid: a list of messages with role"),
        ({"prompt": ["hi"]}, r"rows.jsonl:1: messages = \['hi'\]: no conversation"),
        ({"question": "x"}, r"rows.jsonl:1: task.prompt = 'prompt': the row has no such column; valid: question"),
    ],
)
def test_a_row_without_a_conversation_is_named(
    tokenizer: TaskTokenizer, tmp_path: Path, row: dict[str, Any], why: str
) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    rows = {"row": ChatTask.row, "__init__": partialmethod(ChatTask.__init__, data=str(tmp_path / "rows.jsonl"))}
    with pytest.raises(UserError, match=why):
        play(tokenizer, desk=type("Rows", (Desk,), rows))


@pytest.mark.parametrize("method", ["open", "halve", "answer", "reward"])
def test_the_environments_failure_is_no_answer_wherever_it_is_raised(tokenizer: TaskTokenizer, method: str) -> None:
    async def away(self: Any, row: Any = None, chat: Any = None, box: Any = None) -> Any:
        raise EnvironmentFailed("the index is away")

    desk = type("Desk", (Desk,), {method: tool(away) if method == "halve" else away})
    with pytest.raises(EnvironmentFailed, match=r"^the index is away$"):
        play(tokenizer, call("halve", {}), "yes", desk=desk)


def test_past_the_limit_of_bad_calls_the_episode_ends_with_its_reward(tokenizer: TaskTokenizer) -> None:
    episode, turns, _ = play(tokenizer, call("fly", {}), "yes" + call("fly", {}) + call("fly", {}), bad=2)
    assert [turn.done for turn in turns] == [False, True]
    assert (episode.chat.stop, turns[1].reward) == ("bad_calls", 1.5)


def test_reward_is_asked_at_every_end(tokenizer: TaskTokenizer) -> None:
    episode, turns, made = play(tokenizer, "<think>\nHm.\n</think>\n\nyes")
    assert (episode.chat.stop, turns[0].reward) == ("answer", 1.5)
    assert turns[0].info == {
        "turns": 1,
        "tool_calls": 0,
        "bad_calls": 0,
        "tool_errors": 0,
        "truncated": 0.0,
        "right": 1.0,
        "short": 0.5,
    }
    assert episode.chat.messages[-1] == {"role": "assistant", "content": "yes", "reasoning_content": "Hm."}
    assert made.notes == ["closed Question 7"]
    episode, turns, _ = play(tokenizer, "yes, bec", cut=True)
    assert (episode.chat.stop, turns[0].info["truncated"]) == ("length", 1.0)
    assert play(tokenizer, *[call("shell", {})] * 5)[0].chat.stop == "turns"
    truncated = asyncio.run(episode.truncated(Box(random.Random(0))))
    assert (truncated.done, truncated.reward, episode.chat.stop) == (True, 1.5, "truncated")


class Talk(Desk):
    """Its user goes on asking."""

    async def answer(self, row: Any, chat: Chat, box: Any) -> str | None:
        chat.turn_reward = 0.5 * chat.turns
        return "And then?"


THOUGHT = "<think>\nHm.\n</think>\n\n"
NEXT = "<|im_end|>\n<|im_start|>user\nAnd then?<|im_end|>\n<|im_start|>assistant\n"


def test_thinking_that_the_template_drops_begins_a_sample_without_it(tokenizer: TaskTokenizer) -> None:
    said = ["One.", f"{THOUGHT}{call('shell', {})}", f"{THOUGHT}Two.", "Three.", f"{THOUGHT}Four."]
    for thinking in ("keep", "template"):
        episode, turns, _ = play(tokenizer, *said, thinking=thinking, desk=Talk)
        assert [turn.reward for turn in turns[:4]] == [0.5, 0.0, 1.5, 2.0], "of each turn that set it"
        begins = [False, False, thinking == "template", False]
        assert [turn.new_sample for turn in turns[:4]] == begins, (
            "a tool's answer drops nothing, nor does a turn without"
        )
        prompt = tokenizer.decode(turns[2].tokens)
        assert prompt.endswith(f"Two.{NEXT}") == (thinking == "template")
        assert "Hm." not in prompt
        assert tokenizer.decode(turns[3].tokens) == NEXT.removeprefix("<|im_end|>")
    assert tokenizer.decode(turns[2].tokens).startswith(tokenizer.decode(episode.prompt) + "One.")
    (signal,) = turns[1].signals
    assert signal.payload_tokens == len(turns[1].tokens), "where the context grows, it is the answer's"


def test_a_template_that_refuses_the_conversation_lets_the_context_grow(tmp_path: Path) -> None:
    strict = TEMPLATES["qwen3"].replace(
        "{%- for call in message.tool_calls or [] %}",
        "{%- if message.tool_calls and message.tool_calls | length > 1 %}{{ raise_exception('one call') }}{% endif %}"
        "{%- for call in message.tool_calls or [] %}",
    )
    strict_tokenizer = TaskTokenizer(write_chat_folder(tmp_path, strict))
    said = [f"{THOUGHT}{call('shell', {}) * 2}", f"{THOUGHT}Two."]
    _, turns, _ = play(strict_tokenizer, *said, thinking="template", desk=Talk)
    assert [turn.new_sample for turn in turns] == [False, False]
    assert strict_tokenizer.decode(turns[1].tokens) == NEXT.removeprefix("<|im_end|>")


class Rowed(ChatTask):
    """Everything but the reward comes from the run file."""

    async def reward(self, row: Any, chat: Chat, box: Any) -> float:
        return float(row["answer"] in chat.text)


def test_rows_and_prompts_are_those_of_the_run_file(tokenizer: TaskTokenizer, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"ask": f"q{i}", "answer": f"a{i}"}) + "\n" for i in range(5)))
    environment = Rowed(tokenizer, seed=3, data=str(file), prompt="ask").make({})

    async def reward(index: int, said: str) -> tuple[str, float]:
        episode, box = environment.open(index, 0, 0.0), Box(random.Random(0))
        await episode.start(box)
        turn = await episode.step(PolicyTurn(tokenizer.encode(said + "<|im_end|>")), box)
        return tokenizer.decode(episode.prompt), turn.reward

    found = [asyncio.run(reward(index, "a0 a1")) for index in range(5)]
    assert sorted(re.findall(r"user\n(q\d)<", prompt)[0] for prompt, _ in found) == [f"q{i}" for i in range(5)]
    assert sum(reward for _, reward in found) == 2.0
    with pytest.raises(UserError, match=r"task.data = '': not given"):
        Rowed(tokenizer)
    file.write_text(json.dumps({"ask": [{"role": "assistant", "content": "a0"}]}))
    with pytest.raises(UserError, match=r"task.name = 'Rowed': its prompt ends with the assistant's answer"):
        asyncio.run(
            Rowed(tokenizer, data=str(file), prompt="ask").make({}).open(0, 0, 0.0).start(Box(random.Random(0)))
        )


def test_tools_that_cannot_be_described_are_a_mistake_in_one_sentence(tokenizer: TaskTokenizer) -> None:
    async def untyped(self: Any, box: Any, thing) -> str:  # type: ignore[no-untyped-def]
        return ""

    async def many(self: Any, box: Any, *things: str) -> str:
        return ""

    def slow(self: Any, box: Any) -> str:
        return ""

    for function, why in ((untyped, "'thing' has no type"), (many, "'things' has no name"), (slow, "no coroutine")):
        odd = type("Odd", (Desk,), {"odd": tool(function)})
        with pytest.raises(UserError, match=rf"task.name = 'Odd.odd': not a tool \(.*{why}"):
            odd(tokenizer).make({})
