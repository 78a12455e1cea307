"""Rows of data files: what is read, in which order, and where a mistake is."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libra_hpc.errors import UserError
from libra_hpc.tasks.data_task import open_rows, row_at


@given(count=st.integers(1, 5000), seed=st.integers(0, 5), epoch=st.integers(0, 2**40))
@settings(max_examples=50, deadline=None)
def test_an_epoch_has_every_row_once(count: int, seed: int, epoch: int) -> None:
    found = [row_at(epoch * count + place, count, seed) for place in range(count)]
    assert {one for one, _ in found} == {epoch}
    assert sorted(row for _, row in found) == list(range(count))


def test_epochs_and_seeds_have_orders_of_their_own_and_no_row_keeps_its_place() -> None:
    orders = [[row_at(epoch * 1000 + i, 1000, seed)[1] for i in range(1000)] for epoch in (0, 1) for seed in (0, 1)]
    pairs = [(a, b) for i, a in enumerate(orders) for b in (*orders[i + 1 :], list(range(1000)))]
    assert max(sum(x == y for x, y in zip(a, b, strict=True)) for a, b in pairs) < 12, "one is expected at random"
    steps = [abs(b - a) for a, b in zip(orders[0], orders[0][1:], strict=False)]
    assert 280 < sum(steps) / len(steps) < 390, "a third is expected at random"


def test_lines_are_rows_and_blank_lines_are_none(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\n{"a": 1}\n\n  \n{"a": "\xc3\xa9"}\r\n{"a": [3]}')
    rows = open_rows(str(path))
    assert [rows[number] for number in range(len(rows))] == [{"a": 1}, {"a": "é"}, {"a": [3]}]
    assert [rows.place(number) for number in range(3)] == [f"{path}:2", f"{path}:5", f"{path}:6"]


@pytest.mark.parametrize("line", ["[1]", "{", '{"a": 1} 2', '{"a": NaN}', "\\xff"])
def test_a_line_that_is_no_object_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(f'{{"a": 1}}\n{line}\n')
    rows = open_rows(str(path))
    with pytest.raises(UserError, match=r"a\.jsonl:2: not a JSON object \("):
        rows[1]


def test_what_has_no_rows_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "folder").mkdir()
    (tmp_path / "rows.jsonl.gz").write_bytes(gzip.compress(b'{"a": 1}'))
    (tmp_path / "rows.csv").write_text("problem,answer\n1,2\n")
    for name, why in (
        ("empty.jsonl", "it has no rows"),
        ("folder", "no such files"),
        ("absent", "no such file"),
        ("rows.jsonl.gz", r"it cannot be read \(it is compressed\); valid: a .jsonl \(a JSON object a line\) or"),
        ("rows.csv", r"its first line is no JSON object: b'problem,answer"),
    ):
        with pytest.raises(UserError, match=why):
            open_rows(str(tmp_path / name))
    with pytest.raises(UserError, match="not given"):
        open_rows("")


def test_parquet_files_and_folders_of_datasets_are_read_and_splits_are_not_mixed(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = [{"problem": f"p{i}", "answer": {"n": i}, "chat": [{"role": "user", "content": "x"}]} for i in range(10)]
    hub, saved = tmp_path / "hub", tmp_path / "saved"
    hub.mkdir()
    saved.mkdir()
    for part in (0, 1):
        table = pyarrow.Table.from_pylist(rows[5 * part : 5 * part + 5])
        parquet.write_table(table, hub / f"train-0000{part}-of-00002.parquet")
        with pyarrow.ipc.new_stream(str(saved / f"data-0000{part}-of-00002.arrow"), table.schema) as writer:
            writer.write_table(table)
    for path in (hub, saved):
        found = open_rows(str(path))
        assert [found[number] for number in range(len(found))] == rows
    assert len(open_rows(str(hub / "train-00001-of-00002.parquet"))) == 5
    parquet.write_table(table, hub / "test-00000-of-00001.parquet")
    with pytest.raises(UserError, match="the folder has files of test, train"):
        open_rows(str(hub))
    (tmp_path / "broken.parquet").write_text("no")
    with pytest.raises(UserError, match="it cannot be read"):
        open_rows(str(tmp_path / "broken.parquet"))
