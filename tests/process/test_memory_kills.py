"""What the kernel counts where memory ran out, from folders like its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from libra_hpc.process.memory_kills import KEPT_S, MemoryKills

GROUPS = {
    "v2": ("0::/job/step\n", "job/step/memory.events", "low 0\noom 2\noom_kill {}\noom_group_kill 0\n"),
    "v1": ("9:cpu:/\n4:memory:/job/step\n", "memory/job/step/memory.oom_control", "under_oom 0\noom_kill {}\n"),
    "both, v1 has the memory": ("5:hugetlb,memory:/job\n0::/x\n", "memory/job/memory.oom_control", "oom_kill {}\n"),
    "none": ("", "other", "oom_kill {}\n"),
}


@pytest.mark.parametrize(("own", "file", "text"), GROUPS.values(), ids=GROUPS)
def test_a_kill_of_the_own_group_is_certain_and_one_of_the_machine_is_not(
    own: str, file: str, text: str, tmp_path: Path
) -> None:
    def write(path: str, content: str) -> None:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(content)

    def count(group: int, machine: int) -> None:
        write(f"cgroup/{file}", text.format(group))
        write("vmstat", f"pgfault 9\noom_kill {machine}\n")

    # The root counts those of all groups.
    for path, content in {"self/cgroup": own, "cgroup/memory/memory.oom_control": "oom_kill 99\n"}.items():
        write(path, content)
    count(3, 8)
    write("7/status", "VmHWM:\t 8000000 kB\n")
    kills = MemoryKills(tmp_path, tmp_path / "cgroup")
    kills.measure([7], 0.0)
    assert kills.cause(7) == ""
    count(3, 9)
    assert kills.cause(8) == "probably out of memory: the kernel ended a process of this machine for that"
    count(4, 9)
    write("7/status", "State:\tZ\n")
    for minute in (1, 2):
        assert kills.cause(7).startswith("out of memory: the kernel ended it" if own else "probably out of memory")
        assert kills.cause(7).endswith("; it used 8.2 GB")
        kills.measure([7], minute * KEPT_S)
    assert kills.cause(7) == "", "an old one explains no end"
