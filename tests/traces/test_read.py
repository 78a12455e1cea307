"""Reading and writing a trace, and the cut at the longest context."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from libra_hpc.errors import UserError
from libra_hpc.protocol.trace import TrajectoryRecord, TurnRecord
from libra_hpc.traces.cut import cut_at
from libra_hpc.traces.read import encode, read_trace, write_trace

TURNS = (TurnRecord(0, 5, "get", "ok", 0.5), TurnRecord(7, 6, "test", "error", 2.0, 1, 3, 4), TurnRecord(2, 9))
ONE = TrajectoryRecord("p", 0, 100, TURNS, 0.5)


def write(path: Path, *lines: Any) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def line(**changes: Any) -> dict[str, Any]:
    first = {"new_tokens": 0, "gen_tokens": 5, "tool": "get", "outcome": "ok", "tool_s": 1}
    turns = [first, {"new_tokens": 3, "gen_tokens": 4, "tool": None}]
    return {"prompt_id": "p", "sample": 0, "prompt_tokens": 10, "turns": turns, "reward": None, **changes}


def one_turn(new: int, generated: int, **more: Any) -> dict[str, Any]:
    return line(turns=[{"new_tokens": new, "gen_tokens": generated, **more}] * (2 if more else 1))


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_what_was_written_is_read_again(name: str, tmp_path: Path) -> None:
    other = TrajectoryRecord("q", 3, 0, (TurnRecord(0, 1),))
    write_trace(tmp_path / name, [ONE, other])
    trace = read_trace(tmp_path / name)
    assert trace == ([ONE, other], [])
    assert list(tmp_path.iterdir()) == [tmp_path / name]


def test_the_same_trace_gives_the_same_bytes_and_unknown_counts_are_left_out(tmp_path: Path) -> None:
    write_trace(tmp_path / "a.jsonl.gz", [ONE])
    first = (tmp_path / "a.jsonl.gz").read_bytes()
    write_trace(tmp_path / "a.jsonl.gz", read_trace(tmp_path / "a.jsonl.gz").trajectories)
    assert (tmp_path / "a.jsonl.gz").read_bytes() == first
    turns = json.loads(gzip.decompress(first))["turns"]
    assert turns[0] == {"new_tokens": 0, "gen_tokens": 5, "tool": "get", "outcome": "ok", "tool_s": 0.5}
    assert (turns[1]["exit_code"], turns[1]["passed"], turns[1]["failed"]) == (1, 3, 4)


def test_what_a_run_writes_is_read_as_it_is(tmp_path: Path) -> None:
    record = line(index=4, attempt=0, info={"truncated": 1.0}, versions=[[0, 9]], started_at=1.0, finished_at=2.0)
    record["turns"][0].update(engine="r1.0", versions=[[0, 5]])
    # The tool's answer no longer fitted: the run opened a turn that generated nothing.
    record["turns"][1].update(tool="get", outcome="ok", tool_s=3.0)
    nothing = {"gen_tokens": 0, "tool": None, "outcome": None, "tool_s": 0.0, "engine": "", "versions": []}
    record["turns"].append({"new_tokens": 900, **nothing})
    (one,) = read_trace(write(tmp_path / "trajectories.jsonl", record)).trajectories
    assert one.turns == (TurnRecord(0, 5, "get", "ok", 1.0, engine="r1.0", versions=((0, 5),)), TurnRecord(3, 4))


BAD = [
    ('{"prompt_id":"p","turns":[', "not JSON ("),
    (line(turns=[]), "turns = []: no turns; valid: at least one turn"),
    (one_turn(0, -5), "turns[0].gen_tokens = -5: negative; valid: an integer >= 1"),
    (one_turn(0, 0), "turns[0].gen_tokens = 0: too small"),
    (line(prompt_tokens=-1), "prompt_tokens = -1: negative"),
    (one_turn(8, 1), "turns[0].new_tokens = 8: the context of the first turn is prompt_tokens"),
    (one_turn(0, 1, tool_s=-1), "turns[0].tool_s = -1: out of range"),
    (one_turn(0, 1, new_sample=True), "turns[0].new_sample = true: the first sample begins with the prompt"),
    (line(sample="x"), "expected `int`, got `str` - at `$.sample`"),
    ({"prompt_id": "p", "turns": []}, "object missing required field `sample`"),
]


@pytest.mark.parametrize(("bad", "sentence"), BAD)
def test_a_bad_line_is_named_or_counted(bad: Any, sentence: str, tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", line(), "", bad, line(sample=1))
    assert f"{path}, line 3: {sentence}" in refused(path)
    trace = read_trace(path, skip_bad=True)
    assert [one.sample for one in trace.trajectories] == [0, 1]
    assert [one.startswith(f"line 3: {sentence}") for one in trace.bad] == [True]


def refused(path: Path, **options: Any) -> str:
    """Why a file is no trace."""
    with pytest.raises(UserError) as caught:
        read_trace(path, **options)
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "options", "sentence"),
    [
        ("", {}, "the trace is empty."),
        ('{"x": 1}', {}, "line 1: object missing required field `prompt_id` (--skip-bad goes on without such lines)."),
        (line(turns=[]), {"skip_bad": True}, "no trajectory that can be read; bad lines: 1, the first: line 1: turns"),
        ('{"x":' + "[" * 100_000, {}, "nested too deeply"),
    ],
    ids=lambda value: "" if isinstance(value, str) and len(value) > 100 else None,
)
def test_files_that_are_no_trace(text: Any, options: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    assert sentence in refused(write(tmp_path / "a", *([text] if text else [])), **options)


def test_what_cannot_be_read_or_written_is_one_sentence(tmp_path: Path) -> None:
    damaged = tmp_path / "a.jsonl.gz"
    damaged.write_bytes(gzip.compress(json.dumps(line()).encode())[:-9])
    assert "the gzip file is damaged" in refused(damaged)
    assert "No such file" in refused(tmp_path / "absent")
    assert "Is a directory" in refused(tmp_path)
    with pytest.raises(UserError, match="cannot be written"):
        write_trace(tmp_path / "nowhere" / "a.jsonl", [ONE])


CALLS = (TurnRecord(0, 50, tool="bash", tool_s=1.0), TurnRecord(30, 40, tool="bash"), TurnRecord(200, 10))
LONG = TrajectoryRecord("p", 0, 100, CALLS, reward=1.0)


def test_a_trajectory_of_several_samples_survives_its_file_and_each_ends_at_the_limit(tmp_path: Path) -> None:
    two = TrajectoryRecord("p", 0, 100, (*CALLS[:2], TurnRecord(60, 90, new_sample=True)), reward=1.0)
    assert (two.context, two.all_tokens) == (220, 370)
    (tmp_path / "a.jsonl").write_bytes(encode([two]))
    assert b'"new_sample":true' in (tmp_path / "a.jsonl").read_bytes()
    (read,) = read_trace(tmp_path / "a.jsonl").trajectories
    assert read == two
    assert cut_at([two], 220).shortened == 0
    long = msgspec.structs.replace(two, turns=(*CALLS[:1], TurnRecord(60, 190, new_sample=True)))
    for one, limit, left in ((two, 200, [50, 20]), (two, 149, [49]), (long, 240, [50, 180])):
        (cut,) = cut_at([one], limit).trajectories
        assert [turn.gen_tokens for turn in cut.turns] == left


@pytest.mark.parametrize(
    ("limit", "left"), [(429, [50, 40, 9]), (420, [50, 40]), (220, [50, 40]), (200, [50, 20]), (180, [50]), (120, [20])]
)
def test_an_answer_ends_with_the_context_and_a_tool_result_that_fills_it_ends_the_trajectory(
    limit: int, left: list[int]
) -> None:
    (one,) = cut_at([LONG], limit).trajectories
    assert [turn.gen_tokens for turn in one.turns] == left
    assert (one.turns[-1].tool, one.reward) == (None, 0.0)


def test_a_trajectory_within_the_limit_stays_as_it_is_and_a_prompt_without_room_is_left_out_and_counted() -> None:
    assert cut_at([LONG], LONG.context) == ([LONG], 0, 0)
    assert cut_at([LONG, LONG], 100) == ([], 0, 2)
