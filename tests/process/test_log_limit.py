"""A log that grows without end is emptied in place, and its writer goes on."""

from __future__ import annotations

from pathlib import Path

import pytest

from libra_hpc.process import log_limit


def test_a_long_log_is_emptied_and_its_end_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_limit, "MOST_BYTES", 1000)
    monkeypatch.setattr(log_limit, "KEPT_BYTES", 10)
    path = tmp_path / "host0.log"
    with path.open("ab", buffering=0) as writer:
        writer.write(b"x" * 1000)
        assert not log_limit.cut(path)
        writer.write(b"0123456789")
        assert log_limit.cut(path)
        writer.write(b"next")
    assert path.read_bytes() == b"next"
    assert (tmp_path / "host0.log.old").read_bytes() == b"0123456789"


def test_a_log_that_is_missing_is_short(tmp_path: Path) -> None:
    assert not log_limit.cut(tmp_path / "none.log")
