"""The context of a chat is what was sampled and what the template writes, token for token."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from libra_hpc.chat.chat_task import ChatEnvironment, ChatEpisode
from libra_hpc.errors import UserError
from libra_hpc.tasks.tokenizer import ChatTemplate, TaskTokenizer

from .chat_folder import TEMPLATES, write_chat_folder
from .random_chats import Box, Look, sample_turn

pytestmark = pytest.mark.slow

FAMILIES = {"Qwen3": ("qwen3", "json"), "Qwen2.5": ("plain", "json"), "Llama 3": ("llama3", "bare json")}
"""Template of each way to write a chat, and how its calls are read."""
TRIMMED = "{{- message.content | trim }}"
RAW = TEMPLATES["llama3"].replace(TRIMMED, "{{- message.content if message.role == 'assistant' else " + TRIMMED[4:])


class Family:
    """An environment, and the template that writes the whole conversation with raw turns."""

    def __init__(self, folder: Path, template: str, calls: str, thinking: str = "keep") -> None:
        self.tokenizer = TaskTokenizer(write_chat_folder(folder / "policy", template))
        made = Look(self.tokenizer).make({"max_bad_calls": 4, "thinking": thinking})
        assert isinstance(made, ChatEnvironment)
        assert made.choice.found.calls == calls
        self.environment, self.bare, self.thinking = made, template == "llama3", thinking
        self.keeps_to_the_next_user = template == "qwen3"
        """Else the template never writes what the policy thought."""
        self.own = ChatTemplate(self.tokenizer)
        self.whole = ChatTemplate(TaskTokenizer(write_chat_folder(folder / "whole", RAW if self.bare else "plain")))
        self.end = "<|eot_id|>" if self.bare else "<|im_end|>"

    def drops_thinking(self, episode: ChatEpisode, begun: int) -> bool:
        """Whether the template drops what was thought since message ``begun``, where the sample begins."""
        messages = episode.chat.messages
        try:
            self.own.render(messages, self.environment.schemas)
        except UserError:
            return False
        thought = any(one.get("reasoning_content") for one in messages[begun:])
        asked = messages[-1]["role"] == "user"
        return self.thinking == "template" and thought and (asked or not self.keeps_to_the_next_user)


async def play(family: Family, index: int) -> Counter[str]:
    """Play one conversation; counts turns, positions, and positions that differ from the template's whole text."""
    draw, tokenizer, count = random.Random(f"turns-{index}"), family.tokenizer, Counter[str]()
    episode, box = family.environment.open(index, 0, 0.0), Box(draw)
    assert isinstance(episode, ChatEpisode)
    await episode.start(box)
    end = tokenizer.need(family.end)
    before = rendered(family, episode, [])
    context, wanted = list(episode.prompt), tokenizer.encode(before)
    count["odd"] += differing(context, wanted)
    spoken: list[str] = []
    begun = 0
    while True:
        turn = sample_turn(draw, tokenizer, end, family.bare)
        answer = await episode.step(turn, box)
        count["turns"] += 1
        count["calls"] += len(answer.signals)
        if answer.done:
            break
        drops = family.drops_thinking(episode, begun)
        count["odd"] += drops != answer.new_sample
        context = answer.tokens[:] if answer.new_sample else [*context, *turn.tokens, *answer.tokens]
        spoken.append(tokenizer.decode(turn.tokens).removesuffix(family.end))
        after = rendered(family, episode, spoken)
        start = len(before) + len(spoken[-1]) + (0 if turn.stop == "length" else len(family.end))
        assert after.startswith(before + spoken[-1])
        wanted += [*turn.tokens, *tokenizer.encode(after[start:])]
        if drops:
            begun = len(episode.chat.messages)
            wanted = tokenizer.encode(family.own.render(episode.chat.messages, family.environment.schemas))
            count["new samples"] += 1
        count["odd"] += differing(context, wanted)
        count["positions"] += len(answer.tokens)
        before = after
    count[f"stop: {episode.chat.stop}"] += 1
    count["bad calls"] += episode.chat.bad_calls
    await episode.close("done")
    return count


def rendered(family: Family, episode: ChatEpisode, spoken: list[str]) -> str:
    """The conversation with the policy's turns as they were sampled, up to the next one."""
    messages: list[Any] = []
    turns = iter(spoken)
    for one in episode.chat.messages:
        if one["role"] == "assistant":
            said = next(turns, None)
            if said is None:
                break
            one = {"role": "assistant", "content": said}
        messages.append(one)
    return family.whole.render(messages, family.environment.schemas)


def differing(found: list[int], wanted: list[int]) -> int:
    return abs(len(found) - len(wanted)) + sum(a != b for a, b in zip(found, wanted, strict=False))


def play_many(family: Family, count: int) -> Counter[str]:
    async def all_of_them() -> Counter[str]:
        return sum([await play(family, index) for index in range(count)], Counter[str]())

    found = asyncio.run(all_of_them())
    assert found["odd"] == 0, found
    assert min(found[f"stop: {why}"] for why in ("answer", "length", "turns", "bad_calls")) > count / 100, found
    assert found["calls"] > 1.2 * found["bad calls"] > count, found
    return found


LONG = (pytest.mark.chaos, pytest.mark.timeout(1800))


@pytest.mark.parametrize("count", [60, pytest.param(10_000, marks=LONG)])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_context_is_what_was_sampled_and_what_the_template_writes(tmp_path: Path, name: str, count: int) -> None:
    play_many(Family(tmp_path, *FAMILIES[name]), count)


@pytest.mark.parametrize(
    ("name", "count"), [("Qwen3", 40), ("Qwen2.5", 40), *(pytest.param(name, 3000, marks=LONG) for name in FAMILIES)]
)
def test_where_the_template_drops_thinking_each_sample_is_exact(tmp_path: Path, name: str, count: int) -> None:
    found = play_many(Family(tmp_path, *FAMILIES[name], thinking="template"), count)
    assert found["new samples"] > count / 10 or "Llama" in name, found
