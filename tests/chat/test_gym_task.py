"""Data sets of reasoning-gym as chat tasks, with and without a tool, and the scripts that play them."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest

from bench.chat_model import converse, shopper, summer
from libra_hpc.config.learn import TaskSection
from libra_hpc.errors import UserError
from libra_hpc.preflight.named_files import check_tasks
from libra_hpc.tasks.base import Task, build_task
from libra_hpc.tasks.tokenizer import TaskTokenizer
from libra_hpc.user_file import absolute

from .chat_folder import write_chat_folder

EXAMPLES = Path(__file__).parents[2] / "examples"
SUMS, SHOP = f"{EXAMPLES / 'my_gym_task.py'}:Sums", f"{EXAMPLES / 'my_chat_task.py'}:Shop"
LEGS = "reasoning_gym:leg_counting"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> TaskTokenizer:
    return TaskTokenizer(write_chat_folder(tmp_path_factory.mktemp("policy")))


def prompts(task: Task) -> set[str]:
    return {task.tokenizer.decode(asyncio.run(converse(task, i, lambda text: "7"))[0]) for i in range(16)}


def reward(task: Task, index: int, *said: str) -> float:
    """Of the last of these turns."""
    from libra_hpc.tasks.base import PolicyTurn

    async def played() -> float:
        box: Any = None
        episode = task.open(index, 0, 0.0)
        await episode.start(box)
        for text in said:
            end = await episode.step(PolicyTurn(task.tokenizer.encode(f"{text}<|im_end|>")), box)
        assert end.done
        return end.reward

    return asyncio.run(played())


def test_the_data_set_scores_the_last_answer(tokenizer: TaskTokenizer) -> None:
    task = build_task(LEGS, {}, 3, tokenizer)
    answer = task.made.row(5)["answer"]  # type: ignore[attr-defined]
    assert reward(task, 5, f"<answer>0</answer> No: <answer> {answer} </answer>.") == 1.0
    assert reward(task, 5, answer) == 1.0
    assert reward(task, 5, f"{answer}<answer>no</answer>") < 0.1


def test_seeds_have_problems_of_their_own(tokenizer: TaskTokenizer) -> None:
    first, again, other = (prompts(build_task(LEGS, {}, seed, tokenizer)) for seed in (0, 0, 1))
    assert first == again
    assert len(first) == 16
    assert not first & other


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("reasoning_gym:leg_countin", {}, r"no such data set; valid: .*\(did you mean 'leg_counting'\?\)"),
        (LEGS, {"min_legs": 3}, "leg_counting refuses them .*min_legs"),
        (LEGS, {"max_animals": 0}, "leg_counting refuses them .*max_animals"),
    ],
)
def test_mistakes(tokenizer: TaskTokenizer, name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        build_task(name, options, 0, tokenizer)


def test_its_name_is_no_file() -> None:
    assert absolute("task.name", LEGS) == LEGS
    check_tasks(TaskSection(name=LEGS, options={"max_animals": 3}))


@pytest.mark.parametrize(("name", "script", "turns"), [(SUMS, summer, 2), (SHOP, shopper, 3)])
def test_a_script_solves_what_its_task_asks(tokenizer: TaskTokenizer, name: str, script: Any, turns: int) -> None:
    task, said = build_task(name, {}, 0, tokenizer), list[str]()

    def say(context: str) -> str:
        said.append(script(context, random.Random(0), False))
        return said[-1]

    tokens, mask = asyncio.run(converse(task, 2, say))
    policy = tokenizer.decode([token for token, own in zip(tokens, mask, strict=True) if own])
    assert policy == "".join(f"{one}<|im_end|>" for one in said)
    assert len(said) == turns
    if script is summer:
        assert reward(task, 2, *said) == 1.0
