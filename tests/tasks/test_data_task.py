"""Rows and a reward function as a task, without a class."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from libra_hpc.errors import UserError
from libra_hpc.tasks.base import EnvironmentFailed, PolicyTurn, Turn, build_task
from libra_hpc.tasks.data_task import DataTask
from libra_hpc.tasks.tokenizer import TaskTokenizer
from tests.host.conftest import OpenSandbox

EXAMPLES = Path(__file__).parents[2] / "examples"
SCORES = """
import asyncio
from beside_scores import times
from libra_hpc.tasks.base import EnvironmentFailed

def score(row, text):
    return times(row["n"], len(text))

async def judge(row, text):
    await asyncio.sleep(0)
    return {"reward": 0.5, "length": len(text)}

def parts(row, text):
    return {"correct": 1, "brief": 0.25}

def slow(row, text):
    while True: pass

def fails(row, text):
    return row["answer"]

async def away(row, text):
    raise EnvironmentFailed("the judge is away")

def gone(row, text):
    raise EnvironmentFailed("the judge is away")

def odd(row, text):
    return {"correct": "yes"}

number = 3
"""
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Count."}]
ANSWER = {"role": "assistant", "content": "1, 2"}
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"


@pytest.fixture
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("data")


@pytest.fixture
def chat_folder(text_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy's tokenizer with a chat template."""
    made = tmp_path_factory.mktemp("policy")
    for file in text_folder.iterdir():
        (made / file.name).write_bytes(file.read_bytes())
    (made / "chat_template.jinja").write_text(TEMPLATE)
    return made


@pytest.fixture
def make(place: Path, text_folder: Path) -> Callable[..., DataTask]:
    (place / "scores.py").write_text(SCORES)
    (place / "beside_scores.py").write_text("def times(a, b):\n    return a * b\n")
    (place / "rows.jsonl").write_text("".join(json.dumps({"prompt": f"p{n}", "n": n}) + "\n" for n in range(5)))

    def made(reward: str = "score", policy: Path = text_folder, **options: Any) -> DataTask:
        path = reward if ":" in reward else f"{place / 'scores.py'}:{reward}"
        given = {"data": str(place / "rows.jsonl"), "reward": path, **options}
        task = build_task("data", given, 0, TaskTokenizer(policy))
        assert isinstance(task, DataTask)
        return task

    return made


async def played(task: DataTask, sandbox: OpenSandbox, turn: PolicyTurn, index: int = 0) -> Turn:
    async with sandbox(task.tools, tool_timeout_s=1.0) as box:
        return await task.open(index, 0, 0.0).step(turn, box)


def said(task: DataTask, text: str) -> PolicyTurn:
    return PolicyTurn(task.tokenizer.encode(text), "length")


def test_five_rows_make_every_prompt_of_a_run_and_the_same_ones_after_a_restart(make: Callable[..., DataTask]) -> None:
    task = make()
    opened = [task.open(index, sample, 0.3) for index in range(15) for sample in (0, 1)]
    assert opened[0].prompt == opened[1].prompt
    assert len({one.prompt_id for one in opened}) == 15
    texts = [task.tokenizer.decode(one.prompt) for one in opened[::2]]
    assert sorted(texts[:5]) == sorted(texts[5:10]) == [f"p{n}" for n in range(5)]
    assert [one.prompt for one in opened[14:]] == [make().open(i // 2, 0, 0.9).prompt for i in range(14, 30)]


async def test_a_function_that_imports_from_its_folder_scores_the_text_without_its_stop_token(
    make: Callable[..., DataTask], sandbox: OpenSandbox
) -> None:
    task = make()
    row = int(task.tokenizer.decode(task.open(3, 0, 0.0).prompt)[1:])
    end = await played(task, sandbox, said(task, "abcd"), 3)
    assert (end.done, end.reward, end.info) == (True, 4.0 * row, {"truncated": 1.0})
    stopped = PolicyTurn([*task.tokenizer.encode("abcd"), task.stop_ids[0]])
    assert (await played(task, sandbox, stopped, 3)).reward == 4.0 * row


async def test_parts_are_numbers_and_their_sum_the_reward_unless_one_is_named_so(
    make: Callable[..., DataTask], sandbox: OpenSandbox
) -> None:
    end = await played(make("parts"), sandbox, said(make(), "x"))
    assert (end.reward, end.info) == (1.25, {"correct": 1, "brief": 0.25, "truncated": 1.0})
    task = make("judge")
    assert not task.tools, "what awaits runs in the host"
    end = await played(task, sandbox, said(task, "xy"))
    assert (end.reward, end.info) == (0.5, {"length": 2, "truncated": 1.0})


@pytest.mark.parametrize(
    ("reward", "why"),
    [
        ("fails", r"it fails \(KeyError: 'answer'\) for rows-0\.\d and the text 'x'\."),
        ("slow", r"it fails \(no answer within 1 s\)"),
        ("away", r"^the judge is away$"),
        ("gone", r"^the judge is away$"),
        ("odd", r"it returned \{'correct': 'yes'\}, which is no number"),
    ],
)
async def test_a_failed_score_fails_the_trajectory_and_is_no_reward(
    make: Callable[..., DataTask], sandbox: OpenSandbox, reward: str, why: str
) -> None:
    with pytest.raises((UserError, EnvironmentFailed), match=why):
        await played(make(reward), sandbox, said(make(), "x"))


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"reward": "/nowhere.py:score"}, "task.reward = '/nowhere.py:score': no file"),
        ({"data": "/nowhere.jsonl"}, "task.data = '/nowhere.jsonl': no such file"),
        ({"max_tokens": 0}, "task.options.max_tokens = 0"),
        ({"columns": 3}, "task.options = 'columns': DataTask has no such option"),
    ],
)
def test_mistakes_are_sentences(make: Callable[..., DataTask], options: dict[str, Any], why: str) -> None:
    with pytest.raises(UserError, match=why):
        make(**options)


def test_a_name_that_is_no_function_lists_those_there_are(make: Callable[..., DataTask]) -> None:
    with pytest.raises(UserError, match="no such function; valid: score, judge, parts, slow, fails, away, gone, odd"):
        make("number")


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"problem": "x"}, "rows.jsonl:3: task.prompt = 'prompt': the column is missing; valid: problem "),
        ({"prompt": ""}, "rows.jsonl:3: task.prompt = 'prompt': the column holds ''; valid: text, or a list of mess"),
        ({"prompt": [{"content": "x"}]}, "the column holds [{'content': 'x'}]"),
        ({"prompt": []}, "the column holds []"),
        (
            {"prompt": [*MESSAGES, ANSWER]},
            "ends with the assistant's answer, which the policy would read; valid: a mes",
        ),
    ],
)
def test_a_bad_row_is_named_by_file_line_and_column(
    make: Callable[..., DataTask], place: Path, row: dict[str, Any], why: str
) -> None:
    (place / "rows.jsonl").write_text('{"prompt": "a"}\n\n' + json.dumps(row))
    with pytest.raises(UserError) as found:
        make().check()
    assert why in str(found.value)


def test_messages_and_text_go_through_the_policys_template(
    make: Callable[..., DataTask], place: Path, chat_folder: Path
) -> None:
    # With what editors of Windows begin a file.
    (place / "rows.jsonl").write_text(json.dumps({"chat": MESSAGES, "prompt": "Hello"}), encoding="utf-8-sig")

    def prompt(**options: Any) -> str:
        task = make(**options)
        return task.tokenizer.decode(task.open(0, 0, 0.0).prompt)

    assert prompt(policy=chat_folder, prompt="chat") == "<system>Be brief.<user>Count.<assistant>"
    assert prompt(policy=chat_folder) == "<user>Hello<assistant>"
    (place / "answered.jsonl").write_text(json.dumps({"chat": [*MESSAGES, ANSWER]}))
    answered = {"policy": chat_folder, "prompt": "chat", "data": str(place / "answered.jsonl")}
    assert prompt(**answered, drop_answer=True) == prompt(policy=chat_folder, prompt="chat")
    assert prompt(policy=chat_folder, template=False) == prompt() == "Hello"
    with pytest.raises(UserError, match="holds messages, and the policy has no chat template"):
        prompt(prompt="chat")


async def test_the_example_scores_its_rows(text_folder: Path, sandbox: OpenSandbox) -> None:
    given = {
        "data": str(EXAMPLES / "my_data.jsonl"),
        "prompt": "problem",
        "reward": f"{EXAMPLES / 'my_reward.py'}:score",
    }
    task = build_task("data", given, 0, TaskTokenizer(text_folder))
    assert isinstance(task, DataTask)
    task.check()
    answers = {row["problem"]: row["answer"] for row in map(json.loads, open(given["data"]))}  # noqa: SIM115
    for index in range(4):
        answer = answers[task.tokenizer.decode(task.open(index, 0, 0.0).prompt)]
        right = await played(task, sandbox, said(task, f"It is 7, so {answer}"), index)
        assert (right.reward, right.info["correct"]) == (1.1, 1.0)
        wrong = await played(task, sandbox, said(task, f"{answer}, no, -1"), index)
        assert (wrong.reward, wrong.info["correct"]) == (0.1, 0.0)
