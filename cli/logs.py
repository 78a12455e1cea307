"""`libra-hpc logs`: print or follow the log files of a run."""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from libra_hpc.errors import UserError, invalid
from libra_hpc.facts.rundir import RunDir

from .follow import Follower
from .output import print_line, print_note
from .runs import RUNS, RunArgument, RunsOption, attempt, find_run, job_id

POLL_S = 0.5
LOG_SUFFIXES = (".log", ".out")
_RANK = re.compile(r"^(?:agent-|[ert])(\d+)(?:\.|$)")
"""``agent-2.log`` is the agent of rank 2, ``t2.0.log`` its first trainer, ``r2.0.log`` its first rollout engine."""


def logs(
    run: RunArgument = None,
    rank: Annotated[
        int | None, typer.Option("--rank", min=0, metavar="N", help="Only processes of this node (rank).")
    ] = None,
    process: Annotated[
        str | None, typer.Option("--process", metavar="NAME", help="Only log files whose name contains NAME.")
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on printing until the run ends.")] = False,
    tail: Annotated[int, typer.Option("--tail", "-n", min=0, metavar="N", help="Lines to print of each file.")] = 20,
    which: Annotated[
        int | None, typer.Option("--attempt", min=1, metavar="N", help="Attempt; default: the last.")
    ] = None,
    runs: RunsOption = Path(RUNS),
) -> None:
    found = find_run(run, runs)
    folder = found.logs(which or max(attempt(found), 1))
    files = select(folder, rank, process)
    if not files and not follow:
        raise _nothing(found, folder, rank, process)
    offsets: dict[Path, int] = {}
    for path in files:
        offsets[path] = path.stat().st_size
        print_line(f"==> {path} <==")
        for line in last_lines(path, tail):
            print_line(line)
    if follow and not job_id(found):
        print_note(f"{found.name} was never queued")
        return
    follower = Follower(found)
    while follow:
        # Read before the files, so that lines from before the end are still printed.
        state = follower.refresh()
        for path in select(folder, rank, process):
            for line in new_lines(path, offsets):
                print_line(f"{path.stem}: {line}")
        if state.over:
            print_note(f"{found.name}: {follower.waiting()}")
            return
        time.sleep(POLL_S)


def _nothing(run: RunDir, folder: Path, rank: int | None, process: str | None) -> UserError:
    """Why no log file is selected."""
    have = select(folder, None, None)
    if not have:
        return UserError(f"{run.name} has no logs yet (folder {folder}).")
    if process is None:
        ranks = sorted({known for known in map(rank_of, have) if known is not None})
        return invalid("--rank", rank, "no log file of such a node", [str(known) for known in ranks])
    return invalid("--process", process, "no such log file", [path.stem for path in have])


def select(folder: Path, rank: int | None, process: str | None) -> list[Path]:
    """Log files of an attempt in order of name, of one rank or process if given."""
    files = sorted(path for path in folder.glob("*") if path.suffix in LOG_SUFFIXES)
    if process is not None:
        files = [path for path in files if process in path.stem]
    if rank is not None:
        files = [path for path in files if rank_of(path) == rank]
    return files


def rank_of(path: Path) -> int | None:
    """The rank that wrote this log file; None for those of the job and of environment hosts."""
    match = _RANK.match(path.stem)
    return int(match.group(1)) if match else None


def last_lines(path: Path, count: int) -> list[str]:
    """The last ``count`` lines of a file."""
    with path.open(errors="replace") as handle:
        return [line.rstrip("\n") for line in deque(handle, maxlen=count)]


def new_lines(path: Path, offsets: dict[Path, int]) -> Iterator[str]:
    """Complete lines since the last call; updates ``offsets``.  A file that shrank is read from its start."""
    start = offsets.get(path, 0)
    size = path.stat().st_size
    if size < start:
        start = 0
    with path.open("rb") as handle:
        handle.seek(start)
        data = handle.read(size - start)
    end = data.rfind(b"\n") + 1
    offsets[path] = start + end
    yield from data[:end].decode(errors="replace").splitlines()
