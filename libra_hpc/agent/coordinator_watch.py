"""Whether the coordinator lives, from the view of every other agent.

- Silent for `QUIET_S`, and its process has ended -> gone.
- Silent for `ORPHAN_S`, before its first message `FIRST_WORD_S` -> gone, whatever was seen of its process.
- This process was stopped itself -> that time is no silence of the coordinator.

Once it is gone, training saves at its next step boundary and training nodes stay for that, so that no step is lost.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from libra_hpc.process.progress import ticks

CHECK_S = 1.0
"""Between two checks."""
ORPHAN_S = 90.0
"""The Layout comes every 2 s.  Half: a long stall of rank 0 ends the ranks; double: nodes idle longer."""
FIRST_WORD_S = 1800.0
"""Before, the coordinator reads a whole checkpoint, which takes minutes for a large one."""
QUIET_S = 5.0
"""For its order to stop, which an agent that was stopped reads late."""
SAVE_S = 60.0
"""For training to save once the coordinator is gone."""

log = logging.getLogger("libra_hpc.agent")


class CoordinatorWatch:
    def __init__(self, ended: Callable[[int], bool]) -> None:
        """``ended``: whether the process of a rank is known to have ended."""
        self._ended = ended
        self._seen_at = time.monotonic()
        self._greeted = False

    def seen(self) -> None:
        """Note a message of the coordinator."""
        self._seen_at, self._greeted = time.monotonic(), True

    async def gone(self) -> None:
        """Return once it is gone."""
        async for stall in ticks(CHECK_S):
            # A message that arrived meanwhile may have been read first.
            self._seen_at = min(time.monotonic(), self._seen_at + stall)
            silent_s = time.monotonic() - self._seen_at
            if silent_s > (ORPHAN_S if self._greeted else FIRST_WORD_S):
                log.error("no word from the coordinator for %.0f s: leaving", silent_s)
                return
            if silent_s > QUIET_S and self._ended(0):
                log.error("the coordinator's process ended: leaving")
                return

    async def stay(self, train_leader: int) -> None:
        """Another training node's agent: stay until the train leader's has left."""
        deadline = time.monotonic() + SAVE_S
        while time.monotonic() < deadline and not self._ended(train_leader):
            await asyncio.sleep(CHECK_S)
