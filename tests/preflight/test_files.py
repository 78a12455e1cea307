"""The checks of the policy's folder, the task file and the run directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from libra_hpc.config.learn import TaskSection
from libra_hpc.config.load import validate
from libra_hpc.errors import UserError
from libra_hpc.preflight import named_files
from tests.example_files import KEYCHAIN_TASK


def test_task_files_are_parsed_and_never_run(tmp_path: Path) -> None:
    task = tmp_path / "task.py"
    task.write_text("raise SystemExit('imported')\nclass Mine: pass\n")
    named_files.check_tasks(TaskSection(name=f"{task}:Mine"))
    mine, other = "self, tokenizer, turns, *, seed=0", "self, tokenizer, **options"
    task.write_text(f"class Mine:\n def __init__({mine}): pass\nclass Any:\n def __init__({other}): pass\n")
    named_files.check_tasks(TaskSection(name=f"{task}:Mine", options=dict.fromkeys(["turns", "seed"])))
    named_files.check_tasks(TaskSection(name=f"{task}:Any", options=dict.fromkeys(["whatever"])))


def test_data_and_reward_of_a_run_file_are_there(tmp_path: Path) -> None:
    rows, score = tmp_path / "rows.jsonl", tmp_path / "my.py"
    rows.write_text("{}")
    score.write_text("raise SystemExit('imported')\nasync def judge(row, text): pass\nclass Mine: pass\n")

    def check(**changes: Any) -> None:
        named_files.check_tasks(validate({"task": {"data": str(rows), "reward": f"{score}:judge", **changes}}).task)

    check()
    for changes, why in (
        ({"data": "/nope.jsonl"}, "task.data = '/nope.jsonl': no such file or folder"),
        ({"data": "", "name": "data"}, "task.data = '': not given; valid: a JSONL"),
        ({"reward": ""}, "task.reward = '': not given; valid: path/to/file.py:function"),
        ({"reward": "judge"}, "task.reward = 'judge': unknown; valid: path/to/file.py:function"),
        ({"reward": "/nope.py:f"}, "task.reward = '/nope.py:f': /nope.py cannot be read"),
        ({"reward": f"{score}:juge"}, "has no function 'juge'; valid: judge."),
        ({"name": f"{score}:Mine", "options": {}}, ""),
        ({"name": KEYCHAIN_TASK}, "task = 'data': KeyChain has no such option"),
    ):
        if not why:
            check(**changes)
            continue
        with pytest.raises(UserError) as found:
            check(**changes)
        assert why in str(found.value)
