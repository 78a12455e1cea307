"""A node whose file system answers slowly, or not at all, is named; one whose calls fail is not this one's matter."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from libra_hpc.process import storage_watch
from libra_hpc.process.storage_watch import StorageWatch


def watch(monkeypatch: pytest.MonkeyPatch, file: Path, call_s: float, seconds: float) -> tuple[list[str], float]:
    """What is said within so many seconds where each call takes ``call_s``, and the waiting that was counted."""
    monkeypatch.setattr(storage_watch, "EVERY_S", 0.02)
    monkeypatch.setattr(storage_watch, "SLOW_S", 0.1)
    opened = StorageWatch._open

    def slowly(self: StorageWatch) -> None:
        time.sleep(call_s)
        opened(self)

    monkeypatch.setattr(StorageWatch, "_open", slowly)
    said: list[str] = []
    one = StorageWatch(file, said.append)

    async def script() -> None:
        task = asyncio.create_task(one.run())
        await asyncio.sleep(seconds)
        task.cancel()

    asyncio.run(script())
    return said, one.waited_s


@pytest.mark.parametrize(
    ("call_s", "said", "least_s"), [(0.0, 0, 0.0), (0.15, 1, 0.3), (1.5, 1, 0.0)], ids=["quick", "slow", "hung"]
)
def test_a_slow_file_system_is_named_once_a_minute_and_its_waiting_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call_s: float, said: int, least_s: float
) -> None:
    file = tmp_path / "config.json"
    found, waited_s = watch(monkeypatch, file, call_s, 0.8)
    assert len(found) == said
    assert waited_s >= least_s
    assert all(sentence.startswith(f"waiting for storage: opening {file} takes ") for sentence in found)


def test_one_that_lasts_is_named_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage_watch, "REPEAT_S", 0.25)
    assert len(watch(monkeypatch, tmp_path, 1.5, 1.0)[0]) >= 3
