"""Every headline figure of planner and scheduler: played, kept with seeds and commit, checked and shown by one command.

    python -m bench.numbers play [CLAIM[/ROW] ...] [--seeds 4]    # plays them, and keeps them in docs/data/numbers.json
    python -m bench.numbers check [CLAIM[/ROW] ...] [--jobs 2]    # plays a few seeds anew; fails where one is off
    python -m bench.numbers show CLAIM ...                        # the tables of the pages; headlines: README's lines

- A claim has rows, of `bench.judge`, `bench.scheduling` or `bench.replan`. A row is prepared once (choice and rivals
  of a plan), and played with each seed.
- A figure is a mean over seeds with its standard error.
- It is off where its mean over the seeds played anew differs from the kept one, over these seeds, by more than two
  standard errors and `TOLERANCE`. Equal code and seeds have equal figures.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any, NamedTuple

from bench import judge, replan, scheduling
from bench.harness import ROOT, machine, progress
from bench.questions import QUESTIONS

KEPT = ROOT / "docs" / "data" / "numbers.json"
SEEDS = 4
CODE = ("libra_hpc", "bench", "examples")
"""Folders that figures depend on."""
SHIPPED = [name for name in QUESTIONS if name.startswith("shipped")]
LARGE = 128
"""Nodes of 1,024 GPUs."""

TOLERANCE = 0.02
"""Of the mean, beside two standard errors. Half: a change of rounding fails; double: a lost per cent is not seen."""
Kept = dict[str, dict[str, Any]]
"""By claim and row."""
Facts = dict[str, Any]
Figures = dict[str, float]


class Claim(NamedTuple):
    title: str
    rows: Collection[str]
    play: Callable[[str, int, Facts], Figures]
    """(row, seed, its facts) -> figures."""
    headlines: dict[str, str]
    """In words, figures whose mean over the rows README has."""
    prepare: Callable[[str], Facts] = lambda row: {}
    """Facts that a check finds anew."""
    search: Callable[[str], Facts] = lambda row: {}
    """Facts that a check takes as they are kept: opponents, chosen in hindsight."""
    few: int = 2
    """Seeds of a check; 0: a figure of a machine, which is played once and not checked."""
    shown: str = ""
    """Fact that the table shows."""


def _before(row: str, seed: int, facts: Facts) -> Figures:
    ours, theirs = judge.Contestant(facts["choice"]), judge.Contestant(facts["before"])
    theirs_s = judge.seconds(row, theirs, judge.FIRST + seed, before=True)
    return {"before": theirs_s / judge.seconds(row, ours, judge.FIRST + seed)}


def _plan(row: str, seed: int, facts: Facts) -> Figures:
    others = {kind: judge.Contestant(*who) for kind, who in facts["rivals"].items()}
    return judge.compared(row, seed, facts["choice"], facts["predicted_s"], others)


CLAIMS = {
    "defaults": Claim(
        "Seconds with 64 sequences, 96 turns and no step ahead over those with defaults",
        SHIPPED,
        _before,
        {"before": "engines: 64 sequences, no step ahead"},
        lambda row: {**judge.chosen(row), "before": judge.chosen(row, before=True)["choice"]},
        shown="choice",
    ),
    "plan": Claim(
        "Seconds of the best in hindsight over those of the plan's choice",
        list(QUESTIONS),
        _plan,
        {
            "layout": "layout: the best of all",
            "split": "layout: the best split, rule and limit",
            "colocated": "layout: all nodes in turn, the same",
            "predicted": "(seconds predicted over those played)",
        },
        judge.chosen,
        lambda row: {"rivals": judge.rivals(row)},
        shown="choice",
    ),
    "scheduling": Claim(
        "Seconds of a batch under rules of 2026 over those under C-MLFQ",
        list(scheduling.BATCHES),
        lambda row, seed, facts: scheduling.makespans(row, seed),
        {
            "fit": "turns: the oldest whose contexts fit",
            "thunder_agent": "turns: ThunderAgent's, in NVIDIA Dynamo",
            "program_age": "turns: the oldest first",
            "kv_router": "turns: NVIDIA Dynamo's KV router",
        },
    ),
    "live": Claim(
        "Seconds of the best static split and of verl's rule over ours; node moves",
        list(replan.DRIFTS),
        lambda row, seed, facts: replan.compare(row, seed),
        {"static": "moves: the best static split", "verl": "moves: verl's rule"},
        few=1,
    ),
    "search": Claim(
        "CPU seconds of a plan",
        ["48 GPUs", "1,024 GPUs"],
        lambda row, seed, facts: {"CPU s": judge.chosen(SHIPPED[0], nodes=LARGE * (row != "48 GPUs"))["cpu_s"]},
        {},
        few=0,
    ),
}
Row = tuple[str, str]
"""Claim and row."""


def _played(job: tuple[Row, int, Facts]) -> tuple[Facts, dict[str, list[float]]]:
    """Facts and figures by seed; ``job``: a row, seeds, and what is kept of its facts."""
    (name, row), seeds, kept = job
    claim = CLAIMS[name]
    facts = {**(kept or claim.search(row)), **claim.prepare(row)}
    progress(f"{name}/{row} {facts or ''}")
    values = [claim.play(row, seed, facts) for seed in range(seeds)]
    return facts, {key: [one[key] for one in values] for key in values[0]}


def error(values: Sequence[float]) -> float:
    """Standard error of a mean."""
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0


def commit() -> str:
    """The last commit of the code; ``+``: with changes."""

    def git(*command: str) -> str:
        done = subprocess.run(["git", *command, "--", *CODE], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
        return done.stdout.strip()

    return git("log", "-1", "--format=%h") + "+" * bool(git("status", "--porcelain"))


def play(rows: Sequence[Row], kept: Kept, seeds: int, jobs: int) -> None:
    """Play ``rows`` and keep each at once; others stay as they are kept."""
    code, cpu = commit(), machine()["cpu"]
    with ProcessPoolExecutor(jobs) as pool:
        played = pool.map(_played, [(row, seeds if CLAIMS[row[0]].few else 1, {}) for row in rows])
        for (name, row), (facts, figures) in zip(rows, played, strict=True):
            means = {
                key: {"mean": statistics.fmean(values), "error": error(values), "seeds": values}
                for key, values in figures.items()
            }
            kept.setdefault(name, {})[row] = {"commit": code, "cpu": cpu, "facts": facts, "figures": means}
            KEPT.write_text(json.dumps(kept, indent=1) + "\n")


def check(rows: Sequence[Row], kept: Kept, jobs: int) -> list[str]:
    """What is off, in words."""
    wanted, wrong = [(name, row) for name, row in rows if CLAIMS[name].few], []
    with ProcessPoolExecutor(jobs) as pool:
        todo = [((name, row), CLAIMS[name].few, kept[name][row]["facts"]) for name, row in wanted]
        for (name, row), (_, figures) in zip(wanted, pool.map(_played, todo), strict=True):
            for key, values in figures.items():
                old = kept[name][row]["figures"][key]
                now, then = statistics.fmean(values), statistics.fmean(old["seeds"][: len(values)])
                room = 2.0 * old["error"] + TOLERANCE * max(1.0, old["mean"])
                if abs(now - then) > room:
                    wrong.append(f"{name}/{row}, {key}: {now:.3f}, kept {then:.3f} of these seeds, over {room:.3f} off")
    return wrong


def show(name: str, kept: Kept) -> Iterator[str]:
    """The table of a claim, or of the headlines."""
    rows = kept[name]
    claim, keys = CLAIMS[name], list(next(iter(rows.values()))["figures"])
    yield claim.title
    wide = max(map(len, rows)) + 1
    facts = {row: one["facts"].get(claim.shown, "") for row, one in rows.items()}
    room = max(map(len, facts.values())) + 1 if claim.shown else 0
    widths = [max(11, len(key) + 1) for key in keys]
    yield f"{'':{wide}}{claim.shown:{room}}" + "".join(f"{key:>{n}}" for key, n in zip(keys, widths, strict=True))
    for row, one in rows.items():
        cells = (_cell(one["figures"][key]) for key in keys)
        yield f"{row:{wide}}{facts[row]:{room}}" + "".join(
            f"{cell:>{n}}" for cell, n in zip(cells, widths, strict=True)
        )
    yield _source([rows])


def _cell(figure: dict[str, Any]) -> str:
    digits = 2 if figure["mean"] < 10.0 else 1
    return f"{figure['mean']:.{digits}f} ±{figure['error']:.{digits}f}"


def headlines(kept: Kept) -> Iterator[str]:
    """A line for each figure: its mean over the rows, and its least and most row."""
    yield f"{'seconds over ours':41}{'mean':>5}{'most':>6}{'least':>6}  in"
    for name, rows in kept.items():
        for key, words in CLAIMS[name].headlines.items():
            means = {row: one["figures"][key]["mean"] for row, one in rows.items()}
            least = min(means, key=means.__getitem__)
            mean = math.exp(statistics.fmean(map(math.log, means.values())))
            yield f"{words:41}{mean:5.2f}{max(means.values()):6.2f}{means[least]:6.2f}  {least}"
    yield _source([rows for name, rows in kept.items() if CLAIMS[name].headlines])


def _source(claims: Sequence[dict[str, Any]]) -> str:
    every = [one for rows in claims for one in rows.values()]
    commits = ", ".join(dict.fromkeys(one["commit"] for one in every))
    least = min(len(figure["seeds"]) for one in every for figure in one["figures"].values())
    return f"{least} seeds a row, means and standard errors; commit {commits}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.numbers")
    parser.add_argument("verb", choices=("play", "check", "show"))
    parser.add_argument("names", nargs="*", metavar="CLAIM[/ROW]", help=f"of {', '.join(CLAIMS)}; show: headlines, too")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--seeds", type=int, default=SEEDS, help=f"of play; default: {SEEDS}")
    given = parser.parse_args(arguments)
    kept: Kept = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    if given.verb == "show":
        tables = [headlines(kept) if name == "headlines" else show(name, kept) for name in given.names]
        print("\n\n".join("\n".join(lines) for lines in tables))
        return 0
    every = [(name, row) for name, claim in CLAIMS.items() for row in claim.rows]
    rows = [row for row in every if not given.names or {row[0], "/".join(row)} & set(given.names)]
    if unknown := [name for name in given.names if not any(name in (row[0], "/".join(row)) for row in every)]:
        parser.error(f"{unknown[0]}: no such claim or row; valid: {', '.join(map('/'.join, every))}")
    if given.verb == "play":
        play(rows, kept, given.seeds, given.jobs)
        return 0
    wrong = check(rows, kept, given.jobs)
    print("\n".join(wrong) or f"{len(rows)} rows hold")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
