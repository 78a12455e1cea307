"""The step log of a live engine accounts for every token, and its reader refuses what is no log."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from libra_hpc.errors import UserError
from libra_hpc.rollout.engine.steplog import read_steps
from tests.rollout.engine.engine_harness import EngineUnderTest, Model, engine_config, turn, wait_until

HEADER = (
    b'{"tp":2,"kv_tokens":640,"block_size":32,"max_num_seqs":4,"max_num_batched_tokens":2048,"format":"libra-hpc steps'
    b' 1"}\n'
)


@pytest.fixture
def logged(old: Model, folder: Path) -> Iterator[EngineUnderTest]:
    under_test = EngineUnderTest(folder / "e", engine_config(old, max_num_seqs=4, step_log=str(folder / "steps.jsonl")))
    try:
        under_test.ready()
        yield under_test
    finally:
        under_test.close()


@pytest.mark.engine
@pytest.mark.timeout(900)
def test_every_token_of_every_step_is_in_the_log(logged: EngineUnderTest, folder: Path) -> None:
    path = folder / "steps.jsonl"
    logged.generate(*(turn(str(number), range(3, 43 + number), 6) for number in range(3)))
    before = logged.idle()
    # The same context again, longer: its first block is cached.
    logged.generate(turn("again", [*range(3, 43), 50, 51], 4))
    last = logged.idle()
    # The log is written after the report is sent.
    wait_until(lambda: len(read_steps(path)[1]) >= last.steps, "the last step in the log")
    header, steps = read_steps(path)
    assert (header.tp, header.kv_tokens, header.block_size, header.max_num_seqs) == (
        1,
        16 * 2**20 // (2 * 2 * 64 * 4),
        32,
        4,
    )
    assert header.max_num_batched_tokens >= 1024
    assert len(steps) == last.steps
    assert sum(step.prefill for step in steps) == last.prefill_tokens
    # A request's first token comes with its prefill, the others of a decode each; idle() sends one-token probes.
    assert sum(step.decodes for step in steps) == 3 * 5 + 3
    assert sum(step.seconds for step in steps) >= last.busy_s
    again = steps[before.steps]
    assert (again.prefill, again.context, again.decodes) == (42 - 32, 32, 0)
    decode = steps[before.steps + 1]
    assert (decode.decodes, decode.kv_tokens, decode.prefill, decode.context) == (1, 43, 0, 0)
    assert read_steps(path, skip=before.steps)[1] == steps[before.steps :]


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
