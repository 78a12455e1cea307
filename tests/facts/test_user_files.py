"""Copies of the user's Python files: each attempt has its own, and a changed one is named."""

from __future__ import annotations

from pathlib import Path

from libra_hpc.config.load import validate
from libra_hpc.facts.rundir import RunDir, keep_user_files


def test_a_changed_file_is_named_and_both_versions_are_kept(tmp_path: Path) -> None:
    task, loss = tmp_path / "repair.py", tmp_path / "loss.py"
    task.write_text("class Repair: ...\n")
    loss.write_text("def mine(): ...\n")
    config = validate({"task": {"name": f"{task}:Repair"}, "algorithm": {"loss": f"{loss}:mine"}})
    run = RunDir.create(tmp_path, "quick")
    assert keep_user_files(run, config.as_data(), 1) == []
    assert keep_user_files(run, config.as_data(), 2) == []
    task.write_text("class Repair: other = 1\n")
    (sentence,) = keep_user_files(run, config.as_data(), 3)
    assert sentence.startswith(f"task.name: {task} is not what attempt 2 ran")
    kept = [(run.user_files(number) / "task.name" / "repair.py").read_text() for number in (2, 3)]
    assert kept == ["class Repair: ...\n", "class Repair: other = 1\n"]
    assert (run.user_files(1) / "algorithm.loss" / "loss.py").exists()
