"""Whether the kernel killed a process because memory ran out, and what it used until then.

- The count of this process' cgroup has grown (v2 ``memory.events``, v1 ``memory.oom_control``) -> it did.
- Only that of the machine has (``oom_kill`` of /proc/vmstat) -> it may have: the victim may be another's process.
- Neither has, or neither can be read -> nothing is known.

A count belongs to no process: what is older than two `KEPT_S` was another end.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

KEPT_S = 60.0
"""Seconds between two counts that are kept.  Half: a process that takes long to end is missed; double: more ends are
taken for this one."""
COUNT, PEAK = re.compile(r"^oom_kill (\d+)$", re.MULTILINE), re.compile(r"^VmHWM:\s+(\d+) kB$", re.MULTILINE)
GROUPS = (
    (re.compile(r"^0::/(.*)$", re.MULTILINE), "", "memory.events"),
    (re.compile(r"^\d+:(?:\w+,)*memory(?:,\w+)*:/(.*)$", re.MULTILINE), "memory", "memory.oom_control"),
)
"""The two versions of cgroups: a group's line of /proc/self/cgroup, folder of the hierarchy, file with the count."""


class MemoryKills:
    """Kills of the last two `KEPT_S`, and the memory of processes."""

    def __init__(self, proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> None:
        self._proc, self._cgroups = proc, cgroups
        self._before = self._last = self._counted()
        self._counted_at = float("-inf")
        self._peaks: dict[int, int] = {}
        """Bytes, by process id."""

    def measure(self, pids: Iterable[int], now: float) -> None:
        """Note what processes use; about once a second."""
        if now - self._counted_at >= KEPT_S:
            self._before, self._last, self._counted_at = self._last, self._counted(), now
        peaks = {pid: _number(self._proc / str(pid) / "status", PEAK) << 10 for pid in pids}
        # One that ends has none.
        self._peaks = {pid: peak or self._peaks.get(pid, 0) for pid, peak in peaks.items()}

    def cause(self, pid: int) -> str:
        """Why a process may have been killed by signal 9, in words; empty: for no want of memory."""
        (group, machine), used = self._counted(), self._peaks.get(pid, 0)
        what = "probably out of memory: the kernel ended a process of this machine for that"
        if group > self._before[0]:
            what = "out of memory: the kernel ended it"
        elif machine <= self._before[1]:
            return ""
        return f"{what}; it used {used / 1e9:.1f} GB" if used else what

    def _counted(self) -> tuple[int, int]:
        """Processes that the kernel has killed for memory: in this process' cgroup, and on the machine."""
        own = (self._proc / "self" / "cgroup").read_text()
        found = ((line.search(own), self._cgroups / hierarchy, name) for line, hierarchy, name in GROUPS)
        files = (hierarchy / group[1] / name for group, hierarchy, name in found if group)
        return max(map(_number, files), default=0), _number(self._proc / "vmstat")


def _number(path: Path, kind: re.Pattern[str] = COUNT) -> int:
    """0 where there is none."""
    with suppress(OSError):
        if found := kind.search(path.read_text()):
            return int(found[1])
    return 0
