"""What a request may ask: what is honoured changes its turn as it should, what is not is refused by name."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from libra_hpc.chat.selftest import choose_dialect
from libra_hpc.protocol.codec import unpack_i32
from libra_hpc.tasks.tokenizer import TaskTokenizer
from tests.chat.chat_folder import write_chat_folder

from .played import play
from .test_agents import task_of
from .test_conversations import ODD


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> TaskTokenizer:
    return TaskTokenizer(write_chat_folder(tmp_path_factory.mktemp("policy")))


@pytest.mark.parametrize("seed", range(30))
def test_a_turn_ends_with_the_token_that_completes_a_stop_string(tokenizer: TaskTokenizer, seed: int) -> None:
    draw, dialect = random.Random(seed), choose_dialect(tokenizer, with_tools=False).dialect
    text = "".join(draw.choice([ODD, "the ", "Observation: ", "\n", "</code>", "🚆"]) for _ in range(6))
    at = draw.randrange(len(text))
    strings = [text[at : at + draw.randrange(1, 9)], "never said"]
    sampled = tokenizer.encode(text)
    kept, shown, string = dialect.stopped(sampled, strings)
    assert (tokenizer.decode(shown), string) == (text[: text.index(strings[0])], strings[0])
    assert strings[0] in tokenizer.decode(sampled[:kept])
    assert strings[0] not in tokenizer.decode(sampled[: kept - 1])
    assert dialect.stopped(sampled[:kept], strings) == (kept, shown, string), "what was kept is answered equally"
    assert dialect.stopped(sampled, strings[1:]) == (len(sampled), sampled, "")


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
    for context, turn, kept in zip(played.contexts, played.turns, played.trajectory.turns, strict=True):
        assert ids[: len(context)] == context, "each turn was sampled in the context that it is trained in"
        assert ids[len(context) : len(context) + kept.gen_tokens] == turn[: kept.gen_tokens]
    again = iter(turn[: kept.gen_tokens] for turn, kept in zip(played.turns, played.trajectory.turns, strict=True))
    replayed: Any = await play(task, lambda context: next(again))
    assert replayed.trajectory.tokens == played.trajectory.tokens
