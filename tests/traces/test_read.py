"""Trace readers and the writer, on small files in each format, and the cut at the longest context."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from libra_hpc.errors import UserError
from libra_hpc.protocol.trace import TrajectoryRecord, TurnRecord
from libra_hpc.traces.cut import cut_at
from libra_hpc.traces.read import read_trace, write_trace

TURNS = (TurnRecord(0, 5, "get", "ok", 0.5), TurnRecord(7, 6, "test", "error", 2.0, 1, 3, 4), TurnRecord(2, 9))
ONE = TrajectoryRecord("p", 0, 100, TURNS, 0.5)


def write(path: Path, *lines: Any) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def line(**changes: Any) -> dict[str, Any]:
    turns = [
        {"new_tokens": 0, "gen_tokens": 5, "tool": "get", "outcome": "ok", "tool_s": 1},
        {"new_tokens": 3, "gen_tokens": 4, "tool": None},
    ]
    return {"prompt_id": "p", "sample": 0, "prompt_tokens": 10, "turns": turns, "reward": None, **changes}


def call(t: float, context: int, out: int, *hashes: int, **more: Any) -> dict[str, Any]:
    return {
        "t": t,
        "type": "s",
        "model": "m",
        "in": context,
        "out": out,
        "hash_ids": hashes,
        "input_types": ["tool_result"],
        **more,
    }


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
    record["turns"].append(
        {"new_tokens": 900, "gen_tokens": 0, "tool": None, "outcome": None, "tool_s": 0.0, "engine": "", "versions": []}
    )
    (one,) = read_trace(write(tmp_path / "trajectories.jsonl", record)).trajectories
    assert one.turns == (TurnRecord(0, 5, "get", "ok", 1.0), TurnRecord(3, 4))


BAD = {
    "torn": ('{"prompt_id":"p","turns":[', "not JSON ("),
    "no turns": (line(turns=[]), "turns = []: no turns; valid: at least one turn"),
    "negative": (
        line(turns=[{"new_tokens": 0, "gen_tokens": -5}]),
        "turns[0].gen_tokens = -5: negative; valid: an integer >= 1",
    ),
    "nothing generated": (line(turns=[{"new_tokens": 0, "gen_tokens": 0}]), "turns[0].gen_tokens = 0: too small"),
    "negative prompt": (line(prompt_tokens=-1), "prompt_tokens = -1: negative"),
    "prompt twice": (
        line(turns=[{"new_tokens": 8, "gen_tokens": 1}]),
        "turns[0].new_tokens = 8: the context of the first turn is prompt_tokens",
    ),
    "negative time": (
        line(turns=[{"new_tokens": 0, "gen_tokens": 1, "tool_s": -1}] * 2),
        "turns[0].tool_s = -1: out of range",
    ),
    "wrong type": (line(sample="x"), "expected `int`, got `str` - at `$.sample`"),
    "missing": ({"prompt_id": "p", "turns": []}, "object missing required field `sample`"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_line_is_named_or_counted(case: str, tmp_path: Path) -> None:
    bad, sentence = BAD[case]
    path = write(tmp_path / "a.jsonl", line(), "", bad, line(sample=1))
    with pytest.raises(UserError) as caught:
        read_trace(path)
    assert f"{path}, line 3: {sentence}" in str(caught.value)
    trace = read_trace(path, skip_bad=True)
    assert [one.sample for one in trace.trajectories] == [0, 1]
    assert len(trace.bad) == 1
    assert trace.bad[0].startswith(f"line 3: {sentence}")


def test_files_that_are_no_trace(tmp_path: Path) -> None:
    def sentence(path: Path, **options: Any) -> str:
        with pytest.raises(UserError) as caught:
            read_trace(path, **options)
        return str(caught.value)

    damaged = tmp_path / "a.jsonl.gz"
    damaged.write_bytes(gzip.compress(json.dumps(line()).encode())[:-9])
    assert "the gzip file is damaged" in sentence(damaged)
    assert sentence(write(tmp_path / "empty")).endswith("the trace is empty.")
    assert "of no known format; valid: libra, kv-cache-tester, mooncake, azure" in sentence(
        write(tmp_path / "b", '{"x": 1}')
    )
    assert "No such file" in sentence(tmp_path / "absent")
    assert "did you mean 'azure'?" in sentence(write(tmp_path / "c", line()), format="azur")
    assert "limit = 0" in sentence(tmp_path / "c", limit=0)
    assert "no trajectory that can be read; bad lines: 1, the first: line 1: turns = []" in sentence(
        write(tmp_path / "d", line(turns=[])), skip_bad=True
    )
    assert "no trajectory" in sentence(write(tmp_path / "e.csv", "TIMESTAMP,ContextTokens,GeneratedTokens"))
    depth = 5000
    nested = '{"requests":[' + '{"type":"subagent","requests":[' * depth + "]}" * depth + "]}"
    assert "nested too deeply" in sentence(write(tmp_path / "f.json", nested))
    (tmp_path / "folder").mkdir()
    assert "the folder has no trace" in sentence(tmp_path / "folder")
    with pytest.raises(UserError, match="cannot be written"):
        write_trace(tmp_path / "nowhere" / "a.jsonl", [ONE])


def test_azure_rows_are_trajectories_of_one_turn(tmp_path: Path) -> None:
    rows = [
        "TIMESTAMP,ContextTokens,GeneratedTokens\r",
        "2023-11-16 18:17:03.9799600,4808,10\r",
        "2023-11-16 18:17:04.0319600,3180,8\r",
    ]
    trace = read_trace(write(tmp_path / "a.csv", *rows))
    assert trace.format == "azure"
    assert [(one.prompt_tokens, one.turns) for one in trace.trajectories] == [
        (4808, (TurnRecord(0, 10),)),
        (3180, (TurnRecord(0, 8),)),
    ]
    assert len({one.prompt_id for one in trace.trajectories}) == 2
    with pytest.raises(UserError, match=r"line 3: GeneratedTokens = -8: negative"):
        read_trace(write(tmp_path / "b.csv", *rows[:2], "2023-11-16 18:17:04.0319600,3180,-8"))
    with pytest.raises(UserError, match=r"line 2: ContextTokens = 'x': not a number"):
        read_trace(write(tmp_path / "c.csv", rows[0], "2023,x,8"))
    with pytest.raises(UserError, match=r"line 1: header = 'TIMESTAMP,ContextTokens': no column GeneratedTokens"):
        read_trace(write(tmp_path / "d.csv", "TIMESTAMP,ContextTokens", "2023,5"))
    multimodal = read_trace(
        write(tmp_path / "e.csv", "TIMESTAMP,NumImages,ContextTokens,GeneratedTokens", "2024-10-15,2,70,9")
    )
    assert (multimodal.trajectories[0].prompt_tokens, multimodal.trajectories[0].generated) == (70, 9)


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
    assert (second.prompt_id, second.sample, again.prompt_id, again.sample) == (
        second.prompt_id,
        0,
        second.prompt_id,
        1,
    )
    assert len({one.prompt_id for one in trace.trajectories}) == 5
    with pytest.raises(UserError, match=r"line 1: output_length = -1: negative"):
        read_trace(write(tmp_path / "b.jsonl", request(0, 5, -1)))


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
    with pytest.raises(UserError, match=r"3\.json, line 1: requests = \[\]: no requests"):
        read_trace(folder)
    assert len(read_trace(folder, skip_bad=True).bad) == 1
    write(folder / "3.json", {"id": "u", "requests": [call(0, 10, -2)]})
    with pytest.raises(UserError, match="out = -2: negative"):
        read_trace(folder)


LONG = TrajectoryRecord(
    prompt_id="p",
    sample=0,
    prompt_tokens=100,
    turns=(TurnRecord(0, 50, tool="bash", tool_s=1.0), TurnRecord(30, 40, tool="bash"), TurnRecord(200, 10)),
    reward=1.0,
)


def lengths(max_context: int) -> list[list[int]]:
    return [[turn.gen_tokens for turn in one.turns] for one in cut_at([LONG], max_context).trajectories]


def test_a_trajectory_within_the_limit_stays_as_it_is() -> None:
    assert LONG.context == 430
    assert cut_at([LONG], 430) == ([LONG], 0, 0)


def test_an_answer_ends_with_the_context() -> None:
    assert lengths(429) == [[50, 40, 9]]
    assert lengths(200) == [[50, 20]]
    assert lengths(120) == [[20]]


def test_a_tool_result_that_fills_the_context_ends_the_trajectory() -> None:
    assert lengths(420) == lengths(220) == [[50, 40]]
    assert lengths(180) == [[50]]
    (one,) = cut_at([LONG], 180).trajectories
    assert one.turns[-1].tool is None
    assert one.reward == 0.0


def test_a_prompt_without_room_is_left_out_and_counted() -> None:
    assert cut_at([LONG, LONG], 100) == ([], 0, 2)
