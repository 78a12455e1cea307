"""Whether the coordinator lives, from the view of every other agent.

- Silent for `QUIET_S` -> read what the launcher saw; its process ended -> gone.
- Silent for `ORPHAN_S`, before its first message `FIRST_WORD_S` -> gone, whatever the launcher saw.
- This process was stopped itself -> that time is no silence of the coordinator.

Once it is gone, training saves at its next step boundary and training nodes stay for that, so that no step is lost.
"""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path

from libra_hpc.coordinator.liveness import read_gone
from libra_hpc.process.progress import ticks

CHECK_S = 1.0
"""Between two checks."""
ORPHAN_S = 90.0
"""The Layout comes every 2 s.  Half: a long stall of rank 0 ends the ranks; double: nodes idle longer."""
FIRST_WORD_S = 1800.0
"""Before, the coordinator reads a whole checkpoint, which takes minutes for a large one."""
QUIET_S = 5.0
"""Asking what the launcher saw costs a file look-up, so not every second."""
FIRST_QUIET_S = 20.0
"""Before the first message its process id is unknown, and a late note may be of the start before."""
SAVE_S = 60.0
"""For training to save once the coordinator is gone."""

log = logging.getLogger("libra_hpc.agent")


class CoordinatorWatch:
    """``prefix`` is `RunDir.gone`, where the launcher leaves what it saw."""

    def __init__(self, prefix: Path) -> None:
        self._prefix = prefix
        self._seen_at = time.monotonic()
        self._pid = 0

    def seen(self, pid: int = 0) -> None:
        self._seen_at, self._pid = time.monotonic(), pid or self._pid

    async def gone(self) -> None:
        async for stall in ticks(CHECK_S):
            self._seen_at += stall
            silent_s = time.monotonic() - self._seen_at
            if silent_s > (ORPHAN_S if self._pid else FIRST_WORD_S):
                log.error("no word from the coordinator for %.0f s: leaving", silent_s)
                return
            if silent_s > (QUIET_S if self._pid else FIRST_QUIET_S) and await self._ended(0, self._pid):
                log.error("the coordinator's process ended: leaving")
                return

    async def save(self, training: asyncio.Task[object]) -> None:
        """The train leader's agent: wait until training has saved."""
        await asyncio.wait({training}, timeout=SAVE_S)

    async def stay(self, train_leader: int) -> None:
        """Another training node's agent: stay until the train leader's has left."""
        deadline = time.monotonic() + SAVE_S
        while time.monotonic() < deadline and not await self._ended(train_leader):
            await asyncio.sleep(CHECK_S)

    async def _ended(self, rank: int, pid: int = 0) -> bool:
        """Whether the launcher saw the end of a rank, of process ``pid`` where that is given."""
        found = (await asyncio.to_thread(read_gone, self._prefix)).get(rank)
        return found is not None and (pid == found.pid or 0 in (pid, found.pid))
