"""Whether the coordinator lives, as every other agent sees it.

- Silent for `QUIET_S` -> ask what the launcher saw; its process ended -> gone.
- Silent for `ORPHAN_S` -> gone, whatever the launcher saw; before its first word `FIRST_WORD_S`.
- This process was stopped itself -> that time is no silence of the coordinator.

Once it is gone, training saves at its next step boundary, so that the restart loses no step; training nodes stay for
it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path

from libra_hpc.process.deadlines import stall_of

from .liveness import read_gone

LOOK_S = 1.0
ORPHAN_S = 90.0
"""The coordinator repeats the roles every 2 s.  Half: a long stall of rank 0 ends the ranks; double: nodes idle so
much longer."""
FIRST_WORD_S = 1800.0
"""Before its first word the coordinator reads a whole checkpoint, which takes minutes for a large one."""
QUIET_S = 5.0
"""A file look-up, so not every second."""
FIRST_QUIET_S = 20.0
"""Without a word yet its process is not known: what the launcher notes late may be of the start before."""
SAVE_S = 60.0
"""How long training may take to save once the coordinator is gone."""

log = logging.getLogger("libra_hpc.agent")


class CoordinatorWatch:
    """``prefix`` is `RunDir.gone`, where the launcher leaves what it saw."""

    def __init__(self, prefix: Path) -> None:
        self._prefix = prefix
        self._heard_at = time.monotonic()
        self._pid = 0

    def heard(self, pid: int = 0) -> None:
        """The coordinator said something; its first word names its process."""
        self._heard_at, self._pid = time.monotonic(), pid or self._pid

    async def gone(self) -> None:
        """Return once the coordinator is gone."""
        while True:
            before = time.monotonic()
            await asyncio.sleep(LOOK_S)
            self._heard_at += stall_of(time.monotonic() - before, LOOK_S)
            silent_s = time.monotonic() - self._heard_at
            if silent_s > (ORPHAN_S if self._pid else FIRST_WORD_S):
                log.error("no word from the coordinator for %.0f s: leaving", silent_s)
                return
            if silent_s > (QUIET_S if self._pid else FIRST_QUIET_S) and await self._ended(0, self._pid):
                log.error("the coordinator's process ended: leaving")
                return

    async def save(self, training: asyncio.Task[object]) -> None:
        """The train leader's agent: wait until training, which was told to stop, has saved."""
        await asyncio.wait({training}, timeout=SAVE_S)

    async def stay(self, train_leader: int) -> None:
        """Another training node's agent: stay until the train leader's has left."""
        deadline = time.monotonic() + SAVE_S
        while time.monotonic() < deadline and not await self._ended(train_leader):
            await asyncio.sleep(LOOK_S)

    async def _ended(self, rank: int, pid: int = 0) -> bool:
        """Whether the launcher saw the end of a rank, of process ``pid`` where that is known; in a thread, for the
        file system may hang."""
        found = (await asyncio.to_thread(read_gone, self._prefix)).get(rank)
        return found is not None and pid in (0, found)
