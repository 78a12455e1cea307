"""Common parts of the benchmarks: a mesh without MPI, tiny policies, and the report."""

from __future__ import annotations

import asyncio
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
POLICIES = ROOT / "models"


Job = TypeVar("Job", bound=tuple[Any, ...])
Row = TypeVar("Row")
Rates = list[tuple[float, int]]
"""(time in seconds, tokens so far)"""


def rate(points: Rates) -> float:
    """Tokens per second between 10 % and 90 % of the tokens."""
    total = points[-1][1]
    inner = [(t, n) for t, n in points if 0.1 * total <= n <= 0.9 * total]
    return (inner[-1][1] - inner[0][1]) / (inner[-1][0] - inner[0][0])


class LocalMesh:
    """Mesh messages inside one process, delivered one event-loop pass later; the rest is production code."""

    def __init__(self) -> None:
        self.handlers: dict[int, Callable[[Any, bytes], None]] = {}

    def send(
        self, rank: int, message: Any, blob: bytes | memoryview = b"", done: Callable[[bool], None] | None = None
    ) -> None:
        """Deliver to the handler of ``rank``; dropped without one."""
        handler = self.handlers.get(rank)
        if done is not None:
            asyncio.get_running_loop().call_soon(done, handler is not None)
        if handler is not None:
            asyncio.get_running_loop().call_soon(handler, message, bytes(blob))


def machine() -> dict[str, Any]:
    model = ""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.split(":", 1)[1].strip()
            break
    memory = next(
        int(line.split()[1]) for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemTotal")
    )
    cores = len(os.sched_getaffinity(0))
    return {
        "cpu": model,
        "cores": cores,
        "memory_gib": round(memory / 2**20, 1),
        "python": platform.python_version(),
        "load": os.getloadavg()[0],
    }


def policy(seed: int, steps: int = 3000) -> Path:
    """A warm-started tiny policy, made once under `models/`."""
    folder = POLICIES / f"bench-{seed}"
    if not (folder / "config.json").exists():
        print(f"making {folder.name} ({steps} supervised steps) ...", file=sys.stderr)
        code = (
            f"from libra_hpc.tasks.policy import make_tiny_policy as m; m({str(folder)!r}, seed={seed}, steps={steps})"
        )
        subprocess.run(
            [sys.executable, "-c", code],
            check=True,
            env=engine_environment(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
    return folder


def engine_environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1", "HF_HUB_OFFLINE": "1"}


def report(
    name: str, title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], notes: Sequence[str], raw: Any
) -> None:
    """Print the table and write the JSON file."""
    where = machine()
    table = Table(title=title)
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i == 0 else "right")
    for row in rows:
        table.add_row(*(f"{value:.3g}" if isinstance(value, float) else str(value) for value in row))
    console = Console(width=100)
    console.print(table)
    for note in notes:
        console.print(note, highlight=False)
    console.print(
        f"{where['cpu']}, {where['cores']} cores, {where['memory_gib']} GiB, Python {where['python']}, load"
        f" {where['load']:.1f}",
        highlight=False,
    )
    RESULTS.mkdir(exist_ok=True)
    at = time.strftime("%Y-%m-%dT%H:%M:%S")
    stamp = {
        "benchmark": name,
        "machine": where,
        "at": at,
        "columns": list(columns),
        "rows": [list(r) for r in rows],
        "raw": raw,
    }
    (RESULTS / f"{name}.json").write_text(json.dumps(stamp, indent=1) + "\n")


def by_work(
    pool: Executor, play: Callable[[Job], Row], jobs: Sequence[Job], words: Callable[[Row], str]
) -> dict[str, list[Row]]:
    """Run ``jobs`` (work, seed, ...) in order and print each row when it is there; rows by work."""
    found: dict[str, list[Row]] = {job[0]: [] for job in jobs}
    for job, row in zip(jobs, pool.map(play, jobs), strict=True):
        found[job[0]].append(row)
        print(f"{job[0]}, seed {job[1]}: {words(row)}", file=sys.stderr, flush=True)
    return found


def median(values: Sequence[float]) -> float:
    return statistics.median(values)
