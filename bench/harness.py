"""What every benchmark shares: command line, progress, the table, and the JSON file.

A benchmark is a table of rows, and a function that measures one job: (row, seed, ...).

- `options` makes its command line.
- `report` prints the table and the machine, and writes ``bench/results/NAME.json``.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from tests.example_files import KEYCHAIN_TASK

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
POLICIES = ROOT / "models"
KEYCHAIN = ROOT / "bench" / "keychain.toml"
"""Run file of the smallest run of both stages."""
WIDTH = 100
"""Most columns of a printed table."""
Options = argparse.Namespace
median = statistics.median


# --- the command line


def options(
    name: str, doc: str | None, *, rows: Collection[str] = (), arguments: Sequence[str] | None = None, **defaults: Any
) -> Options:
    """The command line of a benchmark; every keyword is an option with its default.

    - A bool is a flag, a tuple are the only values (the first is the default), a list is given as ``a,b,c``.
    - ``--rows``, separated by |, are some of ``rows``.
    - ``--json FILE``: where `report` writes.
    """
    parser = argparse.ArgumentParser(prog=f"python -m bench.{name}", description=(doc or "").split("\n\n")[0])
    if rows:
        parser.add_argument("--rows", default="", help=f"separated by |, of: {'|'.join(rows).replace('%', '%%')}")
    for key, default in defaults.items():
        flag = f"--{key.replace('_', '-')}"
        if isinstance(default, bool):
            parser.add_argument(flag, action="store_true")
        elif isinstance(default, tuple):
            parser.add_argument(flag, choices=default, default=default[0])
        elif isinstance(default, list):
            parser.add_argument(flag, type=list_of(type(default[0])), default=default, metavar="A,B")
        else:
            parser.add_argument(flag, type=type(default), default=default, help=f"default: {default}")
    parser.add_argument("--json", type=Path, default=RESULTS / f"{name}.json")
    given = parser.parse_args(arguments, Options(name=name, error=parser.error))
    if rows:
        given.rows = [name for name in given.rows.split("|") if name] or list(rows)
        for name in given.rows:
            if name not in rows:
                parser.error(f"--rows: {name!r} is unknown; valid: {', '.join(rows)}")
    if not seeds(given):
        parser.error("--seeds must be at least 1")
    return given


def list_of(kind: type[Any]) -> Callable[[str], list[Any]]:
    """Reads ``a,b,c``."""
    return lambda text: [kind(one) for one in text.split(",")]


def seeds(given: Options) -> Sequence[int]:
    """Of ``--seeds``, a list or how many; a benchmark without them has one seed."""
    count = getattr(given, "seeds", 1)
    return count if isinstance(count, list) else range(count)


# --- processes


def progress(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def engine_environment(**own: str) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1", "HF_HUB_OFFLINE": "1", **own}


def child(*words: str, **own: str) -> Any:
    """The JSON in the last line that ``python WORDS`` prints; ``own``: environment variables."""
    env = engine_environment(**own)
    done = subprocess.run([sys.executable, *words], check=True, env=env, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def submit(run_file: Path, *flags: str, overrides: Mapping[str, Any]) -> None:
    changes = [word for key, value in overrides.items() for word in ("-o", f"{key}={value}")]
    command = [str(Path(sys.executable).with_name("libra-hpc")), "submit", str(run_file), *flags, *changes]
    subprocess.run(command, env=engine_environment(), cwd=ROOT, stdout=subprocess.PIPE, check=True)


def policy(seed: int, steps: int = 3000) -> Path:
    """A warm-started tiny policy, made once under `models/`."""
    folder = POLICIES / f"bench-{seed}-{steps}"
    if not (folder / "config.json").exists():
        progress(f"making {folder.name} ({steps} supervised steps) ...")
        make = f"make_tiny_policy({str(folder)!r}, {KEYCHAIN_TASK!r}, seed={seed}, steps={steps})"
        # The warm start is meant for the CPU.
        child("-c", f"from libra_hpc_cli.jobs import make_tiny_policy; {make}; print(0)", CUDA_VISIBLE_DEVICES="")
    return folder


# --- results


def spread(values: Sequence[float], digits: str = ".2f") -> str:
    """Median and range."""
    return f"{median(values):{digits}} ({min(values):{digits}}..{max(values):{digits}})"


def machine() -> dict[str, Any]:
    cpu = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return {
        "cpu": cpu[0].split(":", 1)[1].strip() if cpu else "",
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "python": platform.python_version(),
        "load": os.getloadavg()[0],
    }


def write(given: Options, raw: Any) -> None:
    stamp = {"benchmark": given.name, "machine": machine(), "at": time.strftime("%Y-%m-%dT%H:%M:%S")}
    given.json.parent.mkdir(parents=True, exist_ok=True)
    given.json.write_text(json.dumps(stamp | {"raw": raw}, indent=1) + "\n")


def text(value: Any) -> str:
    """A cell: three digits of a float, thousands with commas."""
    if not isinstance(value, float):
        return "" if value is None else str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 or value.is_integer() else f"{value:.3g}"


def report(
    given: Options,
    title: str,
    *,
    columns: Sequence[str],
    rows: Sequence[Sequence[Any]],
    notes: Sequence[str],
    raw: Any,
    width: int = WIDTH,
) -> None:
    """Print the table with the machine, columns of words flush left, and write the JSON file."""
    table = Table(title=title, box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    lines = [[text(value) for value in row] for row in rows]
    for i, column in enumerate(columns):
        words = i == 0 or any(line[i][:1].isalpha() for line in lines)
        table.add_column(column, justify="left" if words else "right")
    for line in lines:
        table.add_row(*line)
    console = Console(width=width)
    where = "{cpu}, {cores} cores, {memory_gib} GiB, Python {python}, load {load:.1f}".format(**machine())
    for part in (table, *notes, where):
        console.print(part, highlight=False)
    write(given, raw)
