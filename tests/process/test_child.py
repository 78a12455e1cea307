"""The socket of a child process: what becomes of messages to one that is gone."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from pathlib import Path

from libra_hpc.process.child import Child
from libra_hpc.protocol.rollout import Abort, from_engine, to_engine


def test_messages_to_a_child_that_ended_before_it_connected_are_dropped(tmp_path: Path) -> None:
    folder = Path(tempfile.mkdtemp(prefix="c", dir="/tmp"))

    async def work() -> None:
        gone = asyncio.Event()
        codes: list[int] = []

        def exited(child: Child, code: int) -> None:
            codes.append(code)
            gone.set()

        child = Child("a", folder / "a.sock", to_engine, from_engine, lambda child, message: None, exited)
        child.send(Abort("before"))
        await child.start(["/bin/sh", "-c", "exit 3"], dict(os.environ), tmp_path / "a.log")
        await asyncio.wait_for(gone.wait(), 60.0)
        child.send(Abort("after"))
        assert codes == [3]
        assert child._queue == []

    try:
        asyncio.run(work())
    finally:
        shutil.rmtree(folder)
