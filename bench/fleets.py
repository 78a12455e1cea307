"""The judge: what libra-hpc would choose, against the best that a user could have chosen, in the simulator.

- Ours: the planner's fleet for lengths seen before, chosen as `libra-hpc plan` does, and `cmlfq` with its defaults.
- The opponent: the best, in hindsight and at equal GPUs, of all homogeneous fleets and the common mixes.  Chosen on
  some seeds, reported on others.
- Its rules, each tuned: sticky, TP-weighted sticky, least loaded, Libra's rule, Libra's cost rule, LA-MLFQ.
- Its admission: none, the best constant share of the KV cache, or a cap after prime-rl.
- ``x``: the opponent's seconds over ours; above 1 ours is faster.  ``bound``: a lower bound over ours.
- ``plan``: seconds of a batch by the cost models over those of the simulator, for the planner's fleet and the choosing
  seeds, whose lengths the cost models know.
- The second table has the same for `cmlfq` with one thing replaced: what the losses come from.

Elastic control is not judged here: training has nodes of its own (`bench.replan`).

    python -m bench.fleets [--rows NAME|NAME] [--trace FILE ...] [--seeds 3] [--gpus N] [--quick] [--json FILE]
        [--jobs 2]
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from pathlib import Path
from typing import Any

from msgspec.structs import replace
from rich import box
from rich.console import Console
from rich.table import Table

from bench import fleets_rows
from bench.fleets_rows import (
    ROWS,
    Proposal,
    Setting,
    bounds,
    fleet_name,
    fleets_of,
    longest_context,
    proposals,
    setting_of,
    work,
)
from bench.fleets_search import ADMISSIONS, FORECAST, OURS, Contestant, Effort, Search
from bench.harness import RESULTS, machine
from libra_hpc.planning.simulated_plan import halving, promising

CHOOSING = 1_000
"""First seed for choosing; those for reporting start at 0."""
QUICK_ROWS = "r2e|math|long"
WIDTH = 80


def judge(pool: Executor, name: str, effort: Effort) -> dict[str, Any]:
    """All contestants of one row."""
    begin = time.perf_counter()

    def say(text: str) -> None:
        print(f"{label}: {text} ({time.perf_counter() - begin:.0f} s)", file=sys.stderr, flush=True)

    label = fleets_rows.trace_name(name)
    row, first = setting_of(name), effort.choosing[0]
    seen = [one for seed in effort.choosing for one in work(name, seed)[1]]
    longest = longest_context(
        name, [one for seed in (*effort.choosing, *effort.reporting) for one in work(name, seed)[1]]
    )
    search = Search(pool, name, effort, say)
    fleets, choice = fleets_of(row, longest), planned(search, proposals(row, seen, longest), effort)
    plan = choice.fleet
    ranked = search.opponents(fleets)
    ours = Contestant(plan, OURS)
    variants = _variants(search, ours, [plan, *fleets], effort)
    bare = next(
        (c for c in ranked if not c.admission), Contestant(ranked[0].fleet, ranked[0].rule, ranked[0].parameters)
    )
    forecast = ours._replace(admission=FORECAST)
    shown = {"ours": ours, "forecast": forecast, **variants, "opponent, no admission": bare}
    reported = list(dict.fromkeys([*ranked[: effort.reported], *shown.values()]))
    search.run(reported, effort.reporting, limited=False)
    opponent = min(ranked[: effort.reported], key=lambda c: search.median(c, effort.reporting))
    shown["opponent"] = opponent
    bound = {seed: bounds(row, work(name, seed)[1], longest) for seed in effort.reporting}
    found = {
        key: {
            "fleet": fleet_name(row, c.fleet),
            "policy": c.words,
            "seconds": [search.of(c, seed) for seed in effort.reporting],
            "x": statistics.median(search.of(opponent, s) / search.of(c, s) for s in effort.reporting),
            "bound": statistics.median(max(bound[s].values()) / search.of(c, s) for s in effort.reporting),
        }
        for key, c in shown.items()
    }
    say(f"{search.count} simulations, ours {found['ours']['x']:.2f} x as fast as {found['opponent']['policy']}")
    simulated = statistics.fmean(search.of(ours, seed) for seed in effort.reporting)
    return {
        "row": label,
        "setting": row._asdict(),
        "plan": {"model_s": choice.model_s, "expected_s": choice.seconds, "simulated_s": simulated},
        "choosing": [first, len(effort.choosing)],
        "found": found,
        "bounds": bound,
        "simulations": search.count,
        "took_s": time.perf_counter() - begin,
    }


def planned(search: Search, options: Sequence[Proposal], effort: Effort) -> Proposal:
    """The planner's choice, as `libra-hpc plan` makes it: the promising ones, simulated on the choosing seeds."""

    def play(option: Proposal, seed: int) -> float:
        contestant = Contestant(option.fleet, OURS)
        search.run([contestant], [effort.choosing[seed]], limited=False)
        return search.of(contestant, effort.choosing[seed])

    def with_seconds(option: Proposal, seconds: float, batches: int) -> Proposal:
        return replace(option, seconds=seconds, simulated=batches)

    return halving(promising(options, len(options)), play, with_seconds, seeds=len(effort.choosing))[0]


def _variants(
    search: Search, ours: Contestant, fleets: Sequence[fleets_rows.Fleet], effort: Effort
) -> dict[str, Contestant]:
    """`cmlfq` with the best admission, on the best fleet, and both; chosen like the opponent."""

    def best(contestants: list[Contestant]) -> list[Contestant]:
        return search.run(search.run(contestants, effort.choosing[:1])[: effort.finalists], effort.choosing)

    admitted = best([ours._replace(admission=admission) for admission in ADMISSIONS])[0]
    placed = best([ours._replace(fleet=fleet) for fleet in fleets])
    both = best([c._replace(admission=admission) for c in placed[:2] for admission in ADMISSIONS])[0]
    return {"admission": admitted, "fleet": placed[0], "both": both}


def tables(rows: Sequence[dict[str, Any]]) -> list[Table]:
    """The comparison, and what replacing one thing gives."""
    first = _table("row", "ours", "", "the best other choice", "s", "x", "bound", "plan")
    second = _table("cmlfq, x the opponent", "ours", "forecast", "best admission", "best fleet", "both")
    for row in rows:
        found = row["found"]
        mine, other = found["ours"], found["opponent"]
        first.add_row(
            row["row"],
            mine["fleet"],
            f"{statistics.median(mine['seconds']):,.0f}",
            f"{other['fleet']}; {other['policy']}",
            f"{statistics.median(other['seconds']):,.0f}",
            f"{mine['x']:.2f}",
            f"{mine['bound']:.0%}",
            f"{row['plan']['model_s'] / row['plan']['expected_s']:.2f}",
        )
        second.add_row(
            row["row"],
            f"{mine['x']:.2f}",
            f"{found['forecast']['x']:.2f}",
            f"{found['admission']['x']:.2f} {found['admission']['policy'].removeprefix('cmlfq').strip(', ') or '-'}",
            f"{found['fleet']['x']:.2f} {found['fleet']['fleet']}",
            f"{found['both']['x']:.2f}",
        )
    return [first, second]


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for i, column in enumerate(columns):
        numeric = column in ("s", "x", "bound", "plan", "")
        table.add_column(column, justify="right" if numeric else "left", no_wrap=numeric or i == 0)
    return table


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--rows", default="", help=f"separated by |, of: {', '.join(ROWS)}; default: all without --trace"
    )
    parser.add_argument("--trace", action="append", default=[], help="a recorded trace, one more row")
    parser.add_argument("--seeds", type=int, default=3, help="for choosing, and as many others for reporting")
    parser.add_argument("--gpus", type=int, default=0, help="GPUs of each kind instead of the row's, in whole nodes")
    parser.add_argument("--quick", action="store_true", help="three small rows with a short search")
    parser.add_argument("--json", type=Path, default=RESULTS / "fleets.json")
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    default = QUICK_ROWS if options.quick else "" if options.trace else "|".join(ROWS)
    names = [name for name in (options.rows or default).split("|") if name] + options.trace
    for name in names:
        if name not in ROWS and not Path(name).is_file():
            parser.error(f"--rows: {name!r} is no row; valid: {', '.join(ROWS)}")
    if options.gpus % fleets_rows.NODE or options.gpus < 0 or options.seeds < 1:
        parser.error(f"--gpus must be a multiple of {fleets_rows.NODE}, --seeds at least 1")
    count = 1 if options.quick else options.seeds
    effort = Effort(tuple(range(CHOOSING, CHOOSING + count)), tuple(range(count)))
    if options.quick:
        effort = effort._replace(pairs=3, tuned=2, finalists=2, reported=1)
        for name in names:
            if name in ROWS:
                ROWS[name] = _smaller(ROWS[name])
    if options.gpus:
        for name in names:
            if name in ROWS:
                ROWS[name] = ROWS[name]._replace(pools=tuple((d, options.gpus) for d, _ in ROWS[name].pools))
    begin, done = time.perf_counter(), []
    # The workers are forked after the rows were changed.
    with ProcessPoolExecutor(options.jobs) as pool:
        for name in names:
            done.append(judge(pool, name, effort))
            options.json.parent.mkdir(exist_ok=True)
            options.json.write_text(json.dumps({"machine": machine(), "rows": done}, indent=1) + "\n")
    console = Console(width=WIDTH)
    for table in tables(done):
        console.print(table)
    better = [row["found"]["ours"]["x"] for row in done]
    console.print(
        f"{len(done)} rows in {(time.perf_counter() - begin) / 60:.0f} minutes; x: geometric mean"
        f" {math.exp(statistics.fmean(math.log(x) for x in better)):.2f}, worst {min(better):.2f}; details:"
        f" {options.json}",
        highlight=False,
    )


def _smaller(row: Setting) -> Setting:
    """A quarter of the trajectories on half of the GPUs."""
    return row._replace(
        trajectories=max(64, row.trajectories // 4), pools=tuple((d, max(8, g // 16 * 8)) for d, g in row.pools)
    )


if __name__ == "__main__":
    main()
