"""The task ``arithmetic``: calculator, data order, and episodes in real sandboxes."""

from __future__ import annotations

import asyncio
import re
import sys
from pathlib import Path

import pytest

from libra_hpc.errors import UserError
from libra_hpc.host.sandbox import Sandbox
from libra_hpc.tasks.arithmetic import INSTRUCTIONS, Arithmetic, calculate, demonstration_batch
from libra_hpc.tasks.base import PolicyTurn, Turn
from libra_hpc.tasks.tokenizer import TaskTokenizer
from tests.host.conftest import OpenSandbox


@pytest.fixture
def task(arithmetic_folder: Path) -> Arithmetic:
    return Arithmetic(TaskTokenizer(arithmetic_folder), seed=2)


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("12*7", "84"),
        (" ( 2 - 9 ) * 3", "-21"),
        ("-(-4) + +1", "5"),
        ("7 / 2", "3.5"),
        ("8 / 2", "4"),
        ("7 // 2 % 2", "1"),
        ("1.5 * 2", "3"),
    ],
)
def test_calculator(expression: str, value: str) -> None:
    assert calculate(expression) == value


OTHER_PYTHON = "1 + ; 2 ** 9; abs(1); x; (1).real; [1][0]; 1 if 1 else 2; True; 'a' * 3; lambda: 1; __import__('os')"
TOO_LARGE = ["1 / 0", "1e300 * 1e300", "1e400", "9" * 31, "1 + " * 100 + "1", "(" * 200]


@pytest.mark.parametrize("expression", [*OTHER_PYTHON.split("; "), *TOO_LARGE, "", "1\x00"])
def test_calculator_refuses_everything_else(expression: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        calculate(expression)


def test_order_is_fixed_by_seed_and_index(arithmetic_folder: Path, task: Arithmetic) -> None:
    again = Arithmetic(task.tokenizer, seed=2)
    for index in (0, 5, 2**40):
        siblings = [task.open(index, 0, 0.0), task.open(index, 1, 1.0), again.open(index, 2, 0.5)]
        assert len({(s.prompt_id, tuple(s.prompt)) for s in siblings}) == 1
    other = Arithmetic(task.tokenizer, seed=3)
    here, there = ([tuple(t.open(i, 0, 0.0).prompt) for i in range(50)] for t in (task, other))
    assert here != there
    shown = Arithmetic(task.tokenizer, seed=2, instructions=True).open(0, 0, 0.0)
    assert task.tokenizer.decode(shown.prompt) == INSTRUCTIONS + task.tokenizer.decode(list(here[0]))


def test_answers_of_the_data_set_are_right(task: Arithmetic) -> None:
    for index in range(300):
        entry = task._problems[index]
        assert calculate(entry["metadata"]["expression"]) == str(entry["answer"])


def test_stop_ids_are_the_closing_tags(task: Arithmetic) -> None:
    assert {task.tokenizer.decode([i]) for i in task.open(0, 0, 0.0).stop_ids} == {"</calc>", "</python>", "</answer>"}


async def test_scripted_policies_end_to_end(sandbox: OpenSandbox, task: Arithmetic) -> None:
    tokenizer = task.tokenizer

    def said(text: str) -> PolicyTurn:
        return PolicyTurn(tokenizer.encode(text))

    async def solve(box: Sandbox, index: int, tag: str) -> tuple[Turn, Turn]:
        episode = task.open(index, 0, 0.0)
        question = tokenizer.decode(episode.prompt)
        expression = question.removeprefix("Calculate ").removesuffix(".\n")
        code = expression if tag == "calc" else f"print({expression})"
        called = await episode.step(said(f"Let me see. <{tag}>{code}</{tag}>"), box)
        result = tokenizer.decode(called.tokens).removeprefix("<result>").removesuffix("</result>\n")
        return called, await episode.step(said(f"<answer> {result} </answer>"), box)

    async def fail(box: Sandbox) -> list[tuple[str, str]]:
        episode = task.open(0, 0, 0.0)
        seen = []
        calls = ("<calc>import os</calc>", "<python>1/0</python>", "<python>while True: pass</python>")
        for text in (*calls, "no call at all", "<calc>1"):
            turn = await episode.step(said(text), box)
            seen.append((turn.signals[0].outcome if turn.signals else "", tokenizer.decode(turn.tokens)))
        end = await episode.step(said("<calc>1+1</calc>"), box)
        assert (end.done, end.reward) == (True, 0.0)
        assert end.info == {"solved": 0.0, "turns": 6, "calls": 4, "failed_calls": 3}
        return seen

    async with sandbox(task.tools, tool_timeout_s=1.0) as box:
        solved = await asyncio.gather(*(solve(box, i, tag) for i in range(10) for tag in ("calc", "python")))
        failed = await fail(box)
    for called, end in solved:
        (signal,) = called.signals
        assert (signal.outcome, signal.payload_tokens) == ("ok", len(called.tokens))
        assert (end.done, end.reward, end.info["solved"], end.info["turns"]) == (True, 1.0, 1.0, 2)
    assert {called.signals[0].tool for called, _ in solved} == {"calc", "python"}
    assert [outcome for outcome, _ in failed] == ["error", "error", "timeout", "", ""]
    assert failed[0][1] == "<result>error: ValueError: not an expression</result>\n"
    assert "ZeroDivisionError" in failed[1][1]
    assert failed[2][1] == "<result>error: out of time</result>\n"
    assert failed[3][1] == failed[4][1] == "<result>error: no complete <calc>, <python> or <answer></result>\n"


async def test_wrong_answer_gets_the_scorers_reward(sandbox: OpenSandbox, task: Arithmetic) -> None:
    async with sandbox(task.tools) as box:
        turn = await task.open(0, 0, 0.0).step(PolicyTurn(task.tokenizer.encode("<answer>123456</answer>")), box)
    assert turn.reward < 0.1


def test_demonstrations_teach_the_protocol(task: Arithmetic) -> None:
    tokenizer = task.tokenizer
    for step in range(3):
        for tokens, mask in demonstration_batch(tokenizer, 0, step, 12, False):
            text = tokenizer.decode(tokens)
            assert tokenizer.encode(text) == tokens
            written = tokenizer.decode([t for t, m in zip(tokens, mask, strict=True) if m])
            result = text.split("<result>")[1].split("</result>")[0]
            assert written.endswith(f"<answer>{result}</answer>")
            assert written.startswith(("<calc>", "<python>print("))
            assert result not in written.split("<answer>")[0] or len(result) < 3
    flawed = [tokenizer.decode(t) for step in range(10) for t, _ in demonstration_batch(tokenizer, 0, step, 12, True)]
    results, answers = (
        [re.findall(f"<{tag}>(.*?)</{tag}>", t, re.S)[:1] for t in flawed] for tag in ("result", "answer")
    )
    wrong = sum(result != answer for result, answer in zip(results, answers, strict=True))
    assert 0.2 < wrong / len(flawed) < 0.6


def test_missing_package_is_one_sentence(monkeypatch: pytest.MonkeyPatch, arithmetic_folder: Path) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(UserError, match="needs the package reasoning-gym"):
        Arithmetic(TaskTokenizer(arithmetic_folder))


@pytest.mark.parametrize(
    ("options", "message"),
    [({"min_terms": 5, "max_terms": 2}, "task.options = "), ({"max_turns": 0}, "task.options.max_turns = 0")],
)
def test_bad_options(arithmetic_folder: Path, options: dict[str, int], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Arithmetic(TaskTokenizer(arithmetic_folder), **options)  # type: ignore[arg-type]
