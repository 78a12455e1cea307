"""Lines that are written later: order, batching, what a kill leaves, and that nobody waits."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

from libra_hpc.telemetry.journal import Journal
from libra_hpc.telemetry.rundir import read_lines


def test_nothing_is_rendered_or_written_before_the_flush_and_then_all_in_order(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    threads: set[int] = set()

    def render(record: int) -> dict[str, Any]:
        threads.add(threading.get_ident())
        return {"n": record}

    async def main() -> None:
        journal: Journal[int] = Journal(path, render)
        for n in range(5):
            journal.add(n)
        assert not threads
        assert path.stat().st_size == 0
        await asyncio.gather(journal.flush(), journal.flush())
        assert [line["n"] for line in read_lines(path)] == [0, 1, 2, 3, 4]
        assert threading.get_ident() not in threads
        journal.add(5)
        await journal.close()
        assert [line["n"] for line in read_lines(path)] == [0, 1, 2, 3, 4, 5]

    asyncio.run(main())


def test_a_torn_last_line_of_an_earlier_attempt_costs_that_line_only(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"n": 1}\n{"n": 2')

    async def main() -> None:
        journal: Journal[int] = Journal(path, lambda n: {"n": n})
        journal.add(3)
        await journal.close()

    asyncio.run(main())
    assert [line["n"] for line in read_lines(path)] == [1, 3]
