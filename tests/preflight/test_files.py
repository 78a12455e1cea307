"""Files of tasks are parsed and never run; mistakes in them are rows of `tests.cli`."""

from __future__ import annotations

from pathlib import Path

from libra_hpc.config.learn import TaskSection
from libra_hpc.config.load import validate
from libra_hpc.preflight import named_files


def test_task_files_are_parsed_and_never_run(tmp_path: Path) -> None:
    task = tmp_path / "task.py"
    task.write_text("raise SystemExit('imported')\nclass Mine: pass\n")
    named_files.check_tasks(TaskSection(name=f"{task}:Mine"))
    mine, other = "self, tokenizer, turns, *, seed=0", "self, tokenizer, **options"
    task.write_text(f"class Mine:\n def __init__({mine}): pass\nclass Any:\n def __init__({other}): pass\n")
    named_files.check_tasks(TaskSection(name=f"{task}:Mine", options=dict.fromkeys(["turns", "seed"])))
    named_files.check_tasks(TaskSection(name=f"{task}:Any", options=dict.fromkeys(["whatever"])))
    (tmp_path / "rows.jsonl").write_text("{}")
    task.write_text("raise SystemExit('imported')\nasync def judge(row, text): pass\n")
    named_files.check_tasks(validate({"task": {"data": f"{tmp_path}/rows.jsonl", "reward": f"{task}:judge"}}).task)
