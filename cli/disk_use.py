"""`libra-hpc du`: what the files of runs take."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from libra_hpc.facts.rundir import RunDir

from .output import busy, print_json, print_line, print_note
from .run_table import RunRow, show_runs
from .runs import RUNS, AnyRunsOption, JsonOption, RunArgument, everywhere, find_run

PARTS = {
    "checkpoints": ("checkpoints",),
    "exports": ("policy",),
    "logs": ("logs",),
    "decisions": ("decisions.jsonl", "decisions.jsonl.old"),
    "trajectories": ("trajectories.jsonl", "experience"),
}
"""Names in a run directory by the part that they belong to; all others are the rest."""
COLUMNS = ("run", "total>", *(f"{part}>" for part in PARTS), "rest>")


def du(run: RunArgument = None, json: JsonOption = False, runs: AnyRunsOption = None) -> None:
    found = everywhere(runs) if run is None else [find_run(run, runs or Path(RUNS))]
    with busy("adding up"):
        rows: list[dict[str, Any]] = [{"run": one.name, "path": str(one.path), **use(one)} for one in found]
    # The largest is next to the prompt.
    rows.sort(key=lambda row: row["total"])
    if json:
        print_json(rows)
        return
    if not rows:
        print_note("no runs")
        return
    show_runs([RunRow(os.path.realpath(Path(row["path"]).parent), "", cells(row)) for row in rows], COLUMNS)
    if len(rows) > 1:
        print_line(f"{in_words(sum(row['total'] for row in rows))} in {len(rows)} runs")


def use(run: RunDir) -> dict[str, int]:
    """Bytes of a run's files: the total, and each part; a file with several names counts once."""
    part_of = {name: part for part, names in PARTS.items() for name in names}
    found, seen = dict.fromkeys(("total", *PARTS, "rest"), 0), set()
    for folder, _, files in os.walk(run.path):
        above = Path(folder).relative_to(run.path).parts
        for name in files:
            try:
                info = os.lstat(os.path.join(folder, name))
            except OSError:
                # A run that lives replaces files.
                continue
            if (info.st_dev, info.st_ino) not in seen:
                seen.add((info.st_dev, info.st_ino))
                for part in ("total", part_of.get((*above, name)[0], "rest")):
                    found[part] += info.st_size
    return found


def cells(row: dict[str, Any]) -> dict[str, str]:
    """Texts by column; a part without files has none."""
    sizes = {part: in_words(row[part]) if row[part] else "-" for part in ("total", *PARTS, "rest")}
    return {"run": row["run"], **sizes}


def in_words(size: float) -> str:
    """Bytes with three digits at most: ``512 B``, ``3.1 MB``, ``48 GB``."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 999.5:
            return f"{size:.0f} {unit}" if size >= 9.95 or unit == "B" else f"{size:.1f} {unit}"
        size /= 1000.0
    return f"{size:,.1f} TB"
