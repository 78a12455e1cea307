"""Rows of an evaluation that are trained on are refused."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from libra_hpc.config.learn import TaskSection
from libra_hpc.config.load import validate
from libra_hpc.errors import UserError
from libra_hpc.preflight.task_trial import check_overlap
from tests.example_files import KEYCHAIN_TASK

TRAINED: list[dict[str, Any]] = [{"prompt": f"p{number}"} for number in range(5)]


def task(folder: Path, held: list[dict[str, Any]], *, name: str = "data", column: str = "prompt") -> TaskSection:
    for file, rows in (("train", TRAINED), ("held", held)):
        (folder / f"{file}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = {
        "name": "held",
        "task": name,
        "data": f"{folder}/held.jsonl",
        "prompt": column,
        "prompts": max(1, len(held)),
    }
    parts = [
        {"name": "other", "task": KEYCHAIN_TASK},
        {"name": "sums", "task": "data", "data": f"{folder}/train.jsonl"},
    ]
    return validate({"task": {"train": parts, "eval": [given]}}).task


@pytest.mark.parametrize("prompt", ["p3", [{"role": "user", "content": "p3"}]])
def test_a_prompt_in_both_is_refused_with_its_lines(tmp_path: Path, prompt: Any) -> None:
    with pytest.raises(UserError) as caught:
        check_overlap(task(tmp_path, [{"q": "new"}, {"q": prompt}], column="q"))
    assert str(caught.value) == (
        f"task.eval.0.data = '{tmp_path}/held.jsonl': the prompt of {tmp_path}/held.jsonl:2 is trained on, at"
        f" {tmp_path}/train.jsonl:4; valid: rows of its own."
    )


@pytest.mark.parametrize(
    "held",
    [
        [{"prompt": "p30"}, {"answer": "p3"}, {"prompt": ""}],
        [{"prompt": [{"role": "system", "content": "p3"}]}],
        [{"prompt": [{"role": "user", "content": "p3"}, {"role": "user", "content": "again"}]}],
    ],
)
def test_other_prompts_are_not(tmp_path: Path, held: list[dict[str, Any]]) -> None:
    assert check_overlap(task(tmp_path, held)) == []


def test_an_evaluation_has_rows_for_its_prompts(tmp_path: Path) -> None:
    found = task(tmp_path, [{"prompt": "new"}])
    found.eval[0] = msgspec.structs.replace(found.eval[0], prompts=2)
    with pytest.raises(UserError, match=r"task\.eval\.0\.prompts = 2: its data have 1 rows; valid: at most 1"):
        check_overlap(found)


def test_parquet_is_compared_or_a_warning_says_why_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table({"q": ["new", "p1"], "n": [1, 2]}), tmp_path / "held.parquet")
    found = task(tmp_path, [])
    found.eval[0] = msgspec.structs.replace(found.eval[0], data=f"{tmp_path}/held.parquet", prompt="q")
    with pytest.raises(UserError, match=r"held\.parquet: row 1 is trained on, at .*train\.jsonl:2;"):
        check_overlap(found)
    found.eval[0] = msgspec.structs.replace(found.eval[0], prompt="absent")
    assert check_overlap(found) == []
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (warning,) = check_overlap(found)
    assert warning.startswith("rows of evaluations and training are not compared: task.eval.0.data = ")


def test_rows_that_only_a_task_of_its_own_can_read_are_not_compared(tmp_path: Path) -> None:
    for name in ("data", "mine.py:Mine"):
        found = task(tmp_path, [], name=name)
        (tmp_path / "held.jsonl").write_text("prompt,answer\np3,4\n")
        if name == "data":
            with pytest.raises(UserError, match=r"its first line is no JSON object: b.prompt,answer"):
                check_overlap(found)
        else:
            (warning,) = check_overlap(found)
            assert "its first line is no JSON object" in warning
