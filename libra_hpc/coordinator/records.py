"""What rank 0 writes of a run: events, metrics, status snapshots and the result; and what went wrong lately."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import time
from typing import Any

import msgspec

from libra_hpc.facts.events import EVENTS, in_words
from libra_hpc.facts.fact_writer import FactsWriter
from libra_hpc.facts.status import Status, encode_status
from libra_hpc.mesh.agent_context import AgentContext
from libra_hpc.protocol.ranks_stop import OUTPUT, RanksStop

CLOSE_S = 30.0
"""How long the last facts may take to reach the run directory.

Half: a slow file system loses them; double: Slurm kills the job first.
"""
NOTICE_S = 120.0
"""An older notice explains nothing any more, unless it is repeated."""
NOTICES = 8
"""Most notices remembered."""
MEASURED = re.compile(r"\d+(?:\.\d+)? ?(?:s|ms|bytes|MiB|GiB)\b")
"""Numbers with a unit, by which the sentences of one fault differ."""


class Notices:
    """The last things that went wrong, as sentences; ``t`` and ``now`` are epoch seconds.

    Equal but for measured numbers -> one notice, the last, with a count.
    """

    def __init__(self) -> None:
        self._notices: dict[tuple[Any, ...], tuple[float, str, int]] = {}

    def add(self, kind: str, t: float, fields: dict[str, Any]) -> None:
        if kind not in EVENTS or not EVENTS[kind].notice:
            return
        reason = str(fields.get("reason", ""))
        key = (kind, *(fields.get(name) for name in ("rank", "engine", "part", "host")), MEASURED.sub("", reason))
        last_t, _, count = self._notices.pop(key, (t, "", 0))
        where = f"node {fields['rank']}: " if "rank" in fields else ""
        sentence = f"{where}{in_words(kind)}: {reason}".rstrip(": ")
        self._notices[key] = t, sentence, 1 + (count if t - last_t <= NOTICE_S else 0)
        if len(self._notices) > NOTICES:
            del self._notices[next(iter(self._notices))]

    def recent(self, now: float) -> list[str]:
        found = [(sentence, count) for t, sentence, count in reversed(self._notices.values()) if now - t <= NOTICE_S]
        return [f"{sentence} ({count} times)" if count > 1 else sentence for sentence, count in found]


class Records:
    """Every method returns at once, except `close`."""

    def __init__(self, context: AgentContext) -> None:
        self._patience_s = context.config.deadlines.storage_s
        self._fence = context.fence
        self._facts = FactsWriter(context.run, context.attempt, self._fence.check)
        self._notices = Notices()
        self._lease_fault = self.fault = ""
        """``fault``: why the run directory takes no writes; empty: it does."""

    @property
    def recorded(self) -> int:
        return self._facts.recorded

    def event(self, kind: str, **fields: Any) -> None:
        self.record(kind, time.time(), fields)

    def record(self, kind: str, t: float, fields: dict[str, Any]) -> None:
        """Something happened somewhere, at epoch time ``t``."""
        self._notices.add(kind, t, fields)
        self._facts.event({"t": t, "kind": kind, **fields})

    def step(self, line: dict[str, Any]) -> None:
        self._facts.step(line)

    def layout(self, line: dict[str, Any]) -> None:
        self._facts.layout(line)

    def check_storage(self) -> str:
        """Log when the run directory stops or begins to take writes.

        Returns why it has taken none for longer than it may, else nothing.
        """
        if self._facts.fault != self.fault:
            self.fault = self._facts.fault
            reason = self.fault or "the run directory takes writes again"
            self.event("storage_fault" if self.fault else "storage_ok", reason=reason)
        if self._fence.fault != self._lease_fault:
            self._lease_fault = self._fence.fault
            if self._lease_fault:
                self.event("lease_fault", reason=self._lease_fault)
        fault_s = self._facts.fault_s(time.monotonic())
        return (
            f"the run directory has taken no writes for {fault_s:.0f} s: {self.fault}"
            if fault_s > self._patience_s
            else ""
        )

    def notices(self, now: float) -> list[str]:
        found = self._notices.recent(now)
        if self.fault:
            found.insert(0, f"storage fault: {self.fault}; {self._facts.waiting} lines wait in memory")
        elif (slow_s := self._facts.slow_s(time.monotonic())) > 5.0:
            found.insert(0, f"the run directory's file system has not answered for {slow_s:.0f} s")
        return found

    def status(self, status: Status) -> None:
        self._facts.status(encode_status(status))

    def end(self, end: RanksStop) -> None:
        """Leave why the ranks end to the run's owner."""
        self._facts.end(msgspec.json.encode(end))

    async def close(self, sentence: str) -> None:
        """Write what waits, and put ``sentence`` on Slurm's own output, in case the run directory takes no writes."""
        unwritten = await asyncio.to_thread(self._facts.close, CLOSE_S)
        rest = f"; not all facts were written: {unwritten}" if unwritten else ""
        # Only the batch script opens that descriptor; elsewhere its number may be any file of this process.
        if (number := os.environ.get(OUTPUT, "")).isdecimal():
            with contextlib.suppress(OSError):
                os.write(int(number), f"libra-hpc: {sentence}{rest}\n".encode())
