"""What classes and rows say about their work goes into the configuration, where the run file does not say it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from libra_hpc.config.load import validate
from libra_hpc.errors import UserError
from libra_hpc.preflight.known_work import known_work


def known(**task: Any) -> list[dict[str, Any]]:
    """The work of each task, without what nobody said."""
    works = [work for _, _, work in known_work(validate({"task": task})).task.works.values()]
    return [{key: value for key in work.__struct_fields__ if (value := getattr(work, key))} for work in works]


@pytest.mark.parametrize(
    ("task", "found"),
    [
        ({}, {"turns": 1, "prompt_tokens": 100, "spread": 1}),
        ({"work": {"prompt_tokens": 7, "spread": 0.5}}, {"turns": 1, "prompt_tokens": 7, "spread": 0.5}),
        ({"prompt": "book"}, {"turns": 1, "prompt_tokens": 2048, "spread": 1}),
        ({"data": "nowhere.jsonl"}, {"turns": 1, "spread": 1}),
        ({"command": ["agent", "{question}"]}, {"spread": 1}),
    ],
    ids=["measured", "said", "half of the context", "absent", "an agent has prompts of its own"],
)
def test_rows_give_the_length_of_prompts(task: dict[str, Any], found: dict[str, float], tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps({"question": "x" * 398, "book": "x" * 100_000}) + "\n")
    assert known(**{"data": str(tmp_path / "rows.jsonl"), "prompt": "question", **task}) == [found]


def test_a_class_says_its_work_and_a_trace_says_all(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text('class Mine:\n    work = {"turns": 6, "tool_s": 2.5}\n')
    name = f"{tmp_path}/mine.py:Mine"
    assert known(name=name, work={"trace": "t"}) == [{"trace": "t", "spread": 1}]
    parts = [{"name": "a", "task": name}, {"name": "b", "task": name, "work": {"turns": 2}}]
    assert known(train=parts, work={"answer_tokens": 9}) == [
        {"turns": 6, "tool_s": 2.5, "answer_tokens": 9, "spread": 1},
        {"turns": 2, "tool_s": 2.5, "spread": 1},
    ]


@pytest.mark.parametrize(
    ("table", "sentence"),
    [
        ("made()", r"task\.name = '.*': `work` of its class is not written out as a table; valid: numbers by keys of"),
        ('{"turn": 2}', r"task\.work\.turn = 2: unknown key in \[task\.work\]; .*did you mean 'turns'"),
    ],
)
def test_a_wrong_table_of_a_class_is_one_sentence(table: str, sentence: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(f"class Mine:\n    work: dict[str, float] = {table}\n")
    with pytest.raises(UserError, match=sentence):
        known(name=f"{tmp_path}/mine.py:Mine")
