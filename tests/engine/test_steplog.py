"""The reader of step logs leaves out a torn line and refuses what is no log."""

from __future__ import annotations

from pathlib import Path

import pytest

from libra_hpc.engine.steplog import read_steps
from libra_hpc.errors import UserError

HEADER = (
    b'{"tp":2,"kv_tokens":640,"block_size":32,"max_num_seqs":4,"max_num_batched_tokens":2048,"format":"libra-hpc steps'
    b' 1"}\n'
)


def test_a_torn_last_line_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    path.write_bytes(HEADER + b"[1,10,0,0,0.5]\n[2,2")
    header, steps = read_steps(path)
    assert (header.tp, header.kv_tokens) == (2, 640)
    assert [(step.tp, step.decodes, step.kv_tokens, step.seconds) for step in steps] == [(2, 1, 10, 0.5)]


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b"", "steps.jsonl"),
        (b'{"tp":1}\n', "format"),
        (HEADER + b"[1,10,0,0,0.5]\n[1,2]\n", "line 3"),
        (HEADER.replace(b"steps 1", b"steps 2"), "steps 2"),
    ],
)
def test_the_error_names_a_file_that_is_no_log(content: bytes, named: str, tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    path.write_bytes(content)
    with pytest.raises(UserError, match="step log") as caught:
        read_steps(path)
    assert named in str(caught.value)
