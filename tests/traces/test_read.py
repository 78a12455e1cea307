"""Trace readers and the writer, on small files in each format, and the cut at the longest context."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from libra_hpc.errors import UserError
from libra_hpc.protocol.trace import TrajectoryRecord, TurnRecord
from libra_hpc.traces import own_format
from libra_hpc.traces.cut import cut_at
from libra_hpc.traces.read import read_trace, write_trace

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


def call(t: float, context: int, out: int, *hashes: int, **more: Any) -> dict[str, Any]:
    sizes = {"t": t, "in": context, "out": out, "hash_ids": hashes}
    return {"type": "s", "model": "m", "input_types": ["tool_result"], **sizes, **more}


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_what_was_written_is_read_again(name: str, tmp_path: Path) -> None:
    other = TrajectoryRecord("q", 3, 0, (TurnRecord(0, 1),))
    write_trace(tmp_path / name, [ONE, other])
    trace = read_trace(tmp_path / name)
    assert (trace.format, trace.trajectories, trace.bad) == ("libra", [ONE, other], [])
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
    assert one.turns == (TurnRecord(0, 5, "get", "ok", 1.0), TurnRecord(3, 4))


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
        ('{"x": 1}', {}, "of no known format; valid: libra, kv-cache-tester, mooncake, azure"),
        (line(), {"format": "azur"}, "did you mean 'azure'?"),
        (line(), {"limit": 0}, "limit = 0"),
        (line(turns=[]), {"skip_bad": True}, "no trajectory that can be read; bad lines: 1, the first: line 1: turns"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens", {}, "no trajectory"),
        ('{"requests":[' + '{"type":"subagent","requests":[' * 5000 + "]}" * 5000 + "]}", {}, "nested too deeply"),
    ],
    ids=lambda value: "" if isinstance(value, str) and len(value) > 100 else None,
)
def test_files_that_are_no_trace(text: Any, options: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    assert sentence in refused(write(tmp_path / "a", *([text] if text else [])), **options)


def test_what_cannot_be_read_or_written_is_one_sentence(tmp_path: Path) -> None:
    damaged = tmp_path / "a.jsonl.gz"
    damaged.write_bytes(gzip.compress(json.dumps(line()).encode())[:-9])
    (tmp_path / "folder").mkdir()
    assert "the gzip file is damaged" in refused(damaged)
    assert "No such file" in refused(tmp_path / "absent")
    assert "the folder has no trace" in refused(tmp_path / "folder")
    with pytest.raises(UserError, match="cannot be written"):
        write_trace(tmp_path / "nowhere" / "a.jsonl", [ONE])


def test_azure_rows_are_trajectories_of_one_turn(tmp_path: Path) -> None:
    head = "TIMESTAMP,ContextTokens,GeneratedTokens"
    rows = ["2023-11-16 18:17:03.9799600,4808,10\r", "2023-11-16 18:17:04.0319600,3180,8\r"]
    trace = read_trace(write(tmp_path / "a.csv", head + "\r", *rows))
    assert trace.format == "azure"
    assert [(one.prompt_tokens, one.turns) for one in trace.trajectories] == [
        (4808, (TurnRecord(0, 10),)),
        (3180, (TurnRecord(0, 8),)),
    ]
    assert len({one.prompt_id for one in trace.trajectories}) == 2
    for lines, sentence in (
        ((head, rows[0], "2023-11-16 18:17:04.0319600,3180,-8"), "line 3: GeneratedTokens = -8: negative"),
        ((head, "2023,x,8"), "line 2: ContextTokens = 'x': not a number"),
        (
            ("TIMESTAMP,ContextTokens", "2023,5"),
            "line 1: header = 'TIMESTAMP,ContextTokens': no column GeneratedTokens",
        ),
    ):
        assert sentence in refused(write(tmp_path / "b.csv", *lines))
    images = "TIMESTAMP,NumImages,ContextTokens,GeneratedTokens"
    (multimodal,) = read_trace(write(tmp_path / "c.csv", images, "2024-10-15,2,70,9")).trajectories
    assert (multimodal.prompt_tokens, multimodal.generated) == (70, 9)


def request(t: int, prompt: int, out: int, *hashes: int) -> dict[str, Any]:
    return {"timestamp": t, "input_length": prompt, "output_length": out, "hash_ids": hashes}


def test_mooncake_sessions_are_recovered_by_their_prefix(tmp_path: Path) -> None:
    lines = [
        request(0, 1100, 100, 0, 1, 2),  # session A; its last whole block is 1, block 2 is not full
        request(0, 1300, 50, 0, 5, 6),  # B shares the system prompt 0 only
        request(0, 600, 30, 0, 9),  # its last whole block is the shared 0: nothing continues it
        request(4000, 1900, 200, 0, 1, 7, 8),  # A again: 1,900 - 1,200 = 700 new tokens
        request(5000, 1800, 20, 0, 1, 7, 20),  # the prefix of A, which was continued already: another trajectory
        request(9000, 1300, 60, 0, 5, 6),  # B's very prompt: a second sample of it
        request(200_000, 2200, 10, 0, 1, 7, 8, 11),  # A once more, after a long pause
        request(200_000, 90, 4, 30),  # less than a block
    ]
    trace = read_trace(write(tmp_path / "a.jsonl", *lines))
    assert trace.format == "mooncake"
    first, second, third, branch, again, short = trace.trajectories
    assert first.prompt_tokens == 1100
    assert first.turns == (
        TurnRecord(0, 100, "gap", None, 4.0),
        TurnRecord(700, 200, "gap", None, 60.0),
        TurnRecord(100, 10),
    )
    assert [len(one.turns) for one in (second, third, branch, again, short)] == [1] * 5
    assert (second.sample, again.prompt_id, again.sample) == (0, second.prompt_id, 1)
    assert len({one.prompt_id for one in trace.trajectories}) == 5
    assert "line 1: output_length = -1: negative" in refused(write(tmp_path / "b.jsonl", request(0, 5, -1)))


SESSION = {
    "id": "s",
    "models": ["m"],
    "block_size": 64,
    "requests": [
        call(0, 1000, 50, 1, 2, input_types=["text"]),
        call(9, 1000, 70, 1, 2, type="n", input_types=[]),  # the same context again: replaces the call before it
        call(2, 300, 5, 90, model="small", input_types=["text"]),  # another model's call: a thread of its own
        call(20, 1200, 80, 1, 2, 3, api_time=4.0),
        call(30, 1250, 10, 1, 2, 3, 4, think_time=1.0),  # 1,250 < 1,200 + 80: part of the answer was dropped
        {"type": "subagent", "t": 31, "agent_id": "a", "requests": [call(0, 400, 20, 50), call(100, 500, 30, 50, 51)]},
        call(40, 1300, 0, 1, 2, 3, 4),  # failed
        call(50, 1400, 11, 1, 2, 3, 4, input_types=["text"]),  # a person spoke
        call(60, 700, 12, 1, 60),  # the session was compacted
    ],
}


def test_kv_cache_tester_sessions_become_episodes(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path / "a.json", json.dumps(SESSION, indent=1)))
    assert trace.format == "kv-cache-tester"
    found = {one.prompt_id: (one.prompt_tokens, one.turns) for one in trace.trajectories}
    assert found == {
        # 20 - 9 s without api_time; then 30 - 20 - 4 s.
        "s/0/0": (
            1000,
            (TurnRecord(0, 70, "tool", None, 11.0), TurnRecord(130, 80, "tool", None, 6.0), TurnRecord(0, 10)),
        ),
        "s/0/1": (1400, (TurnRecord(0, 11),)),
        "s/0/2": (700, (TurnRecord(0, 12),)),
        "s/1/0": (300, (TurnRecord(0, 5),)),
        "s/2/0": (400, (TurnRecord(0, 20, "tool", None, 60.0), TurnRecord(80, 30))),
    }


def test_kv_cache_tester_files_of_several_sessions(tmp_path: Path) -> None:
    other = {**SESSION, "id": "t"}
    single = len(read_trace(write(tmp_path / "0.json", SESSION)).trajectories)
    for path in (write(tmp_path / "list.json", [SESSION, other]), write(tmp_path / "lines.jsonl", SESSION, other)):
        assert {one.prompt_id[0] for one in read_trace(path).trajectories} == {"s", "t"}
    folder = tmp_path / "traces"
    folder.mkdir()
    write(folder / "1.json", SESSION)
    (folder / "2.json.gz").write_bytes(gzip.compress(json.dumps(other).encode()))
    (folder / "README.txt").write_text("no trace")
    assert len(read_trace(folder).trajectories) == 2 * single
    assert [one.prompt_id for one in read_trace(folder, limit=single + 1).trajectories][-1] == "t/0/0"
    write(folder / "3.json", {"id": "u", "requests": []})
    assert "3.json, line 1: requests = []: no requests" in refused(folder)
    assert len(read_trace(folder, skip_bad=True).bad) == 1
    write(folder / "3.json", {"id": "u", "requests": [call(0, 10, -2)]})
    assert "out = -2: negative" in refused(folder)


CALLS = (TurnRecord(0, 50, tool="bash", tool_s=1.0), TurnRecord(30, 40, tool="bash"), TurnRecord(200, 10))
LONG = TrajectoryRecord("p", 0, 100, CALLS, reward=1.0)


def test_a_trajectory_of_several_samples_survives_its_file_and_each_ends_at_the_limit(tmp_path: Path) -> None:
    two = TrajectoryRecord("p", 0, 100, (*CALLS[:2], TurnRecord(60, 90, new_sample=True)), reward=1.0)
    assert (two.context, two.tokens) == (220, 370)
    (tmp_path / "a.jsonl").write_bytes(own_format.encode([two]))
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
