"""A chat task in a real host process."""

from __future__ import annotations

from pathlib import Path

import pytest

from libra_hpc.protocol.env import EpisodeStepped
from libra_hpc.tasks.tokenizer import TaskTokenizer
from tests.host.leader import Leader, host_settings

from .chat_folder import write_chat_folder

SHOP = f"{Path(__file__).parents[2] / 'examples' / 'my_chat_task.py'}:Shop"


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
