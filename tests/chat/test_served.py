"""The example of the pages, served by a real host process with its sandbox, to a scripted policy."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from bench.chat_model import shopper
from libra_hpc.protocol.env import EpisodeStepped
from libra_hpc.tasks.tokenizer import TaskTokenizer
from tests.host.leader import Leader, host_settings, play

from .chat_folder import write_chat_folder

SHOP = f"{Path(__file__).parents[2] / 'examples' / 'my_chat_task.py'}:Shop"


def said(tokenizer: TaskTokenizer, context: list[int]) -> list[int]:
    return tokenizer.encode(shopper(tokenizer.decode(context), random.Random(0), False) + "<|im_end|>")


@pytest.mark.slow
@pytest.mark.parametrize("template", ["qwen3", "plain"])
def test_a_chat_with_two_tools_is_played_by_a_host(tmp_path: Path, template: str) -> None:
    folder = write_chat_folder(tmp_path / "policy", template, "qwen3" if template == "qwen3" else "qwen2")
    tokenizer = TaskTokenizer(folder)
    with Leader(host_settings(task=SHOP, model=str(folder), options={"articles": 2})) as leader:
        ends = play(leader, lambda name, context: said(tokenizer, context), {f"e{i}": i for i in range(8)})
    assert {end.reward for end in ends.values()} == {1.0}
    assert [end.info for end in ends.values()] == [
        {"turns": 3.0, "tool_calls": 3.0, "bad_calls": 0.0, "tool_errors": 0.0, "truncated": 0.0}
    ] * 8


@pytest.mark.slow
def test_the_limit_of_bad_calls_is_that_of_the_run_file(tmp_path: Path) -> None:
    folder = write_chat_folder(tmp_path / "policy")
    flying = TaskTokenizer(folder).encode('<tool_call>{"name": "fly"}</tool_call><|im_end|>')
    for limit in (0, 1):
        settings = host_settings(task=SHOP, model=str(folder), chat={"max_bad_calls": limit})
        with Leader(settings) as leader:
            leader.open("a")
            steps = [leader.step("a", flying) for _ in range(limit + 1)]
        assert [isinstance(one, EpisodeStepped) and one.done for one in steps] == [False] * limit + [True]
