"""The context of a chat is what was sampled and what the template writes, token for token."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from libra_hpc.chat.chat_task import ChatEnvironment, ChatEpisode
from libra_hpc.tasks.chat_template import ChatTemplate
from libra_hpc.tasks.tokenizer import TaskTokenizer

from .chat_folder import write_chat_folder
from .random_chats import Box, Look, sample_turn

FAMILIES = {"library": ("qwen3", "qwen3"), "template": ("plain", "qwen2"), "template, thinking": ("qwen3", "other")}
"""Template and ``model_type`` of each way to write a chat."""


class Family:
    """An environment, and the template that writes the whole conversation with raw turns."""

    def __init__(self, folder: Path, template: str, model_type: str) -> None:
        self.tokenizer = TaskTokenizer(write_chat_folder(folder / "policy", template, model_type))
        made = Look(self.tokenizer).make({"max_bad_calls": 4})
        assert isinstance(made, ChatEnvironment)
        self.environment = made
        self.whole = ChatTemplate(TaskTokenizer(write_chat_folder(folder / "whole", "plain")))
        self.end = self.tokenizer.need("<|im_end|>")


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path: Path) -> Family:
    return Family(tmp_path, *FAMILIES[request.param])


async def play(family: Family, index: int) -> Counter[str]:
    """Play one conversation; counts turns, positions, and positions that differ from the template's whole text."""
    draw, tokenizer, count = random.Random(f"turns-{index}"), family.tokenizer, Counter[str]()
    episode, box = family.environment.open(index, 0, 0.0), Box(draw)
    assert isinstance(episode, ChatEpisode)
    await episode.start(box)
    before = rendered(family, episode, [])
    context, wanted = list(episode.prompt), tokenizer.encode(before)
    count["odd"] += differing(context, wanted)
    spoken: list[str] = []
    while True:
        turn = sample_turn(draw, tokenizer, family.end)
        answer = await episode.step(turn, box)
        count["turns"] += 1
        count["calls"] += len(answer.signals)
        if answer.done:
            break
        context += [*turn.tokens, *answer.tokens]
        spoken.append(tokenizer.decode(turn.tokens).removesuffix("<|im_end|>"))
        after = rendered(family, episode, spoken)
        start = len(before) + len(spoken[-1]) + (0 if turn.stop == "length" else len("<|im_end|>"))
        assert after.startswith(before + spoken[-1])
        wanted += [*turn.tokens, *tokenizer.encode(after[start:])]
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
    assert found["calls"] > 2 * found["bad calls"] > count, found
    return found


def test_a_context_is_what_was_sampled_and_what_the_template_writes(family: Family) -> None:
    play_many(family, 150)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("family", ["library", "template"], indirect=True)
def test_ten_thousand_conversations_are_exact(family: Family) -> None:
    play_many(family, 10_000)
