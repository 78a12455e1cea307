"""The log of what was learned: torn lines, merging, traces."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from libra_hpc.sched.persist import append, merge, records, to_line, warm
from libra_hpc.sched.tree import CausalTree
from tests.sched.views import MISS, OK, finished

PAST = [finished(100 * i + 50, f"p{i}", f"t{i}", version=i, signals=(OK, MISS), at=(20, 40)) for i in range(6)]


def test_a_log_is_readable_after_a_kill_at_any_byte(tmp_path: Path) -> None:
    whole = b"".join(to_line(r) for r in PAST[:3])
    path = tmp_path / "log"
    for cut in range(len(whole) + 1):
        path.write_bytes(whole[:cut])
        complete = whole[:cut].count(b"\n")
        found = list(records(path))
        assert found[:complete] == PAST[:complete]
        assert len(found) <= complete + 1
        append(path, PAST[3:4])
        assert list(records(path))[-1] == PAST[3]


def test_merging_is_the_union_by_version(tmp_path: Path) -> None:
    one, other = tmp_path / "1", tmp_path / "2"
    append(one, [PAST[4], PAST[0], PAST[2]])
    append(other, [PAST[2], PAST[1], PAST[5], PAST[3]])
    assert merge([one, other, tmp_path / "missing"]) == PAST


def test_a_warm_tree_knows_what_was_logged(tmp_path: Path) -> None:
    append(tmp_path / "log", PAST)
    tree = warm(CausalTree(), records(tmp_path / "log"))
    assert tree.learned == len(PAST)
    assert tree.cursor("p3", "task").prompt.finished == 1.0


def test_trajectories_of_a_run_are_read_too(tmp_path: Path) -> None:
    turns = [
        {"new_tokens": 0, "gen_tokens": 30, "tool": "run", "outcome": "error", "tool_s": 2.0, "exit_code": 1},
        {"new_tokens": 7, "gen_tokens": 20, "tool": None, "outcome": None, "tool_s": 0.0},
    ]
    line = {"prompt_id": "p", "sample": 3, "prompt_tokens": 11, "turns": turns, "reward": 1.0, "versions": [[4, 30], [5, 20]]}
    (tmp_path / "trajectories.jsonl").write_bytes(b"\xff\xfe\n" + json.dumps(line).encode() + b"\n[1]\n{\n")
    (record,) = records(tmp_path / "trajectories.jsonl", task="t")
    assert (record.generated_tokens, record.turns, record.version, record.context_tokens, record.task) == (50, 2, 5, 68, "t")
    assert record.at_signal == (30,)
    assert (record.signals[0].outcome, record.signals[0].exit_code, record.signals[0].payload_tokens) == ("error", 1, 7)
    assert record.signals[0].seconds == pytest.approx(2.0)
