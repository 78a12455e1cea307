"""Traces of other projects, on small files in each format."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from libra_hpc.errors import UserError
from libra_hpc.protocol.trace import TurnRecord
from libra_hpc.traces.foreign import read_foreign

from .test_read import write

KV = "kv-cache-tester"


def call(t: float, context: int, out: int, *hashes: int, **more: Any) -> dict[str, Any]:
    sizes = {"t": t, "in": context, "out": out, "hash_ids": hashes}
    return {"type": "s", "model": "m", "input_types": ["tool_result"], **sizes, **more}


def refused(path: Path, format: str) -> str:
    with pytest.raises(UserError) as caught:
        read_foreign(path, format)
    return str(caught.value)


def test_azure_rows_are_trajectories_of_one_turn(tmp_path: Path) -> None:
    head = "TIMESTAMP,ContextTokens,GeneratedTokens"
    rows = ["2023-11-16 18:17:03.9799600,4808,10\r", "2023-11-16 18:17:04.0319600,3180,8\r"]
    found = read_foreign(write(tmp_path / "a.csv", head + "\r", *rows), "azure")
    assert [(one.prompt_tokens, one.turns) for one in found] == [
        (4808, (TurnRecord(0, 10),)),
        (3180, (TurnRecord(0, 8),)),
    ]
    assert len({one.prompt_id for one in found}) == 2
    for lines, sentence in (
        (
            (head, rows[0], "2023-11-16 18:17:04.0319600,3180,-8"),
            "line 3: expected `int` >= 1 - at `$.GeneratedTokens`",
        ),
        ((head, "2023,x,8"), "line 2: expected `int`, got `str` - at `$.ContextTokens`"),
        (("TIMESTAMP,ContextTokens", "2023,5"), "line 2: object missing required field `GeneratedTokens`"),
    ):
        assert sentence in refused(write(tmp_path / "b.csv", *lines), "azure")
    images = "TIMESTAMP,NumImages,ContextTokens,GeneratedTokens"
    (multimodal,) = read_foreign(write(tmp_path / "c.csv", images, "2024-10-15,2,70,9"), "azure")
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
    found = read_foreign(write(tmp_path / "a.jsonl", *lines), "mooncake")
    first, second, third, branch, again, short = found
    assert first.prompt_tokens == 1100
    assert first.turns == (
        TurnRecord(0, 100, "gap", None, 4.0),
        TurnRecord(700, 200, "gap", None, 60.0),
        TurnRecord(100, 10),
    )
    assert [len(one.turns) for one in (second, third, branch, again, short)] == [1] * 5
    assert (second.sample, again.prompt_id, again.sample) == (0, second.prompt_id, 1)
    assert len({one.prompt_id for one in found}) == 5
    wrong = write(tmp_path / "b.jsonl", request(0, 5, 1), request(0, 5, -1))
    assert "line 2: expected `int` >= 1 - at `$.output_length`" in refused(wrong, "mooncake")


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
    found = read_foreign(write(tmp_path / "a.json", json.dumps(SESSION, indent=1)), KV)
    assert {one.prompt_id: (one.prompt_tokens, one.turns) for one in found} == {
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
    single = len(read_foreign(write(tmp_path / "0.json", SESSION), KV))
    for path in (write(tmp_path / "list.json", [SESSION, other]), write(tmp_path / "lines.jsonl", SESSION, other)):
        assert {one.prompt_id[0] for one in read_foreign(path, KV)} == {"s", "t"}
    folder = tmp_path / "traces"
    folder.mkdir()
    assert "no trajectory" in refused(folder, KV)
    write(folder / "1.json", SESSION)
    (folder / "2.json.gz").write_bytes(gzip.compress(json.dumps(other).encode()))
    (folder / "README.txt").write_text("no trace")
    write(folder / "3.json", {"id": "u", "requests": []})
    assert len(read_foreign(folder, KV)) == 2 * single
    write(folder / "3.json", {"id": "u", "requests": [call(0, 10, -2)]})
    assert "3.json, line 1: expected `int` >= 0 - at `$.requests[0].out`" in refused(folder, KV)
