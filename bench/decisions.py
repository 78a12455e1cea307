"""What one scheduling decision costs: C-MLFQ at 10,000 turns in flight over 64 engines of three TP classes.

One decision = `Policy.key` (the step in the causal tree and the estimate) + `Policy.route` + the board's `sent` and
`answered`.  The policy is warm: 4,000 trajectories of groups of eight have finished.  Each trajectory makes its next
turn in random order, so caches see what a leader's do.  Times are of single calls, less the cost of reading the clock:
wall time, which is what a turn waits, and the thread's CPU time, which leaves out what other processes of a shared
machine take.  Every pass is a process of its own, compiled and interpreted (`libra_hpc.compiled`) by turns.  Each
quantile is the median over the passes.

    python -m bench.decisions [--passes 5]
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from bench.harness import median, report
from libra_hpc import compiled
from libra_hpc.protocol.env import Signal
from libra_hpc.protocol.rollout import EngineStats
from libra_hpc.sched.board import Board
from libra_hpc.sched.cmlfq import CausalMlfq
from libra_hpc.sched.protocol import Finished, TurnView

INFLIGHT = 10_000
LAYOUT = (1,) * 36 + (2,) * 18 + (4,) * 10
LIMIT = 131_072
"""Of the context."""
WARM = 4_000
FINISHED = 2_000
PASSES = 5
QUANTILES = (0.5, 0.9, 0.99)
CLOCKS: dict[str, Callable[[], int]] = {"wall": time.perf_counter_ns, "CPU": time.thread_time_ns}


def signals(rng: random.Random, count: int) -> tuple[Signal, ...]:
    """Results of random tools."""
    return tuple(
        Signal(
            rng.choice(("bash", "edit", "search")),
            rng.choice(("ok", "ok", "error")),
            rng.randrange(2000),
            rng.expovariate(1.0),
            rng.choice((0, 0, 1)),
        )
        for _ in range(count)
    )


def record(rng: random.Random, name: str, prompt: str) -> Finished:
    """A trajectory of 20 turns."""
    made = signals(rng, 19)
    total = int(rng.lognormvariate(7.5, 1.0)) + 20
    at = tuple(total * (i + 1) // 20 for i in range(19))
    return Finished(name, prompt, 0, "task", total, 20, at, made, 0)


def busy_board() -> Board:
    """64 engines that have reported."""
    board = Board(4 * INFLIGHT // len(LAYOUT), adaptive=False)
    for i, tp in enumerate(LAYOUT):
        board.up(f"engine-{i}", tp, 300_000 * tp, 0)
        for n in range(3):
            board.report(f"engine-{i}", EngineStats(0, 100, 0, 0.5, 5000 * n, 20_000 * n, 0, 0, 50 * n, 0.5 * n))
    return board


def views(rng: random.Random, count: int, at: dict[str, str]) -> list[TurnView]:
    """The next turns of ``count`` trajectories that have done six."""
    return [
        TurnView(
            f"t{i}",
            f"p{i // 8}",
            i % 8,
            "task",
            rng.randrange(2000, 40_000),
            rng.randrange(200, 6000),
            6,
            100.0,
            at.get(f"t{i}", ""),
            signals(rng, 6),
            LIMIT,
        )
        for i in range(count)
    ]


def one_pass(seed: int, clock: Callable[[], int]) -> dict[str, list[float]]:
    """Microseconds of single calls."""
    rng = random.Random(seed)
    policy, board = CausalMlfq(), busy_board()
    for i in range(WARM):
        policy.finished(record(rng, f"w{i}", f"p{i // 8}"), 0.0)
    at: dict[str, str] = {}
    turns = views(rng, INFLIGHT, at)
    for turn in turns:
        policy.key(turn, 100.0)
        decision = policy.route(turn, board, 100.0)
        at[turn.trajectory] = decision.engine
        board.sent(decision.engine, turn.context_tokens)
    extra = signals(rng, 1)
    nexts = [
        replace(
            t,
            context_tokens=t.context_tokens + 600,
            attained_tokens=t.attained_tokens + 150,
            turns=7,
            ready_at=101.0,
            engine=at[t.trajectory],
            signals=t.signals + extra,
        )
        for t in turns
    ]
    order = list(range(INFLIGHT))
    rng.shuffle(order)
    empty = median([-clock() + clock() for _ in range(1000)])
    decisions, ends = [], []
    gc.collect()
    gc.freeze()
    for i in order:
        turn, before = nexts[i], turns[i]
        start = clock()
        board.answered(turn.engine, before.context_tokens)
        policy.key(turn, 101.0)
        decision = policy.route(turn, board, 101.0)
        board.sent(decision.engine, turn.context_tokens)
        decisions.append((clock() - start - empty) / 1000)
    for i in order[:FINISHED]:
        done = record(rng, f"t{i}", f"p{i // 8}")
        done = Finished(
            done.trajectory,
            done.prompt_id,
            i % 8,
            "task",
            done.generated_tokens + 6000,
            8,
            done.at_signal[:7],
            nexts[i].signals,
            0,
        )
        start = clock()
        policy.finished(done, 102.0)
        ends.append((clock() - start - empty) / 1000)
    gc.unfreeze()
    return {"decision": sorted(decisions), "finished": sorted(ends)}


def children(passes: int) -> dict[str, list[dict[str, list[float]]]]:
    """Quantiles of every pass by way of running and clock, as processes of their own made them."""
    found: dict[str, list[dict[str, list[float]]]] = {}
    ways = {"compiled": "", "interpreted": "1"} if compiled.in_use() else {"interpreted": "1"}
    for seed in range(passes):
        for way, flag in ways.items():
            for clock in CLOCKS:
                command = [sys.executable, "-m", "bench.decisions", "--seed", str(seed), "--clock", clock]
                done = subprocess.run(
                    command, stdout=subprocess.PIPE, check=True, env=os.environ | {compiled.INTERPRETED: flag}
                )
                found.setdefault(f"{way}, {clock}", []).append(json.loads(done.stdout))
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--passes", type=int, default=PASSES)
    parser.add_argument("--seed", type=int, help="one pass in this process, its quantiles as JSON")
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    given = parser.parse_args()
    if given.seed is not None:
        made = one_pass(given.seed, CLOCKS[given.clock])
        print(json.dumps({what: [values[int(q * len(values))] for q in QUANTILES] for what, values in made.items()}))
        return
    raw = children(given.passes)
    rows: list[tuple[Any, ...]] = []
    for what, bounds in (("decision", "5 / 20"), ("finished", "50")):
        for way, passes in raw.items():
            quantiles = [[one[what][i] for one in passes] for i in range(len(QUANTILES))]
            rows.append(
                (f"{what}, {way}", *map(median, quantiles), f"{min(quantiles[0]):.3g}..{max(quantiles[0]):.3g}", bounds)
            )
    notes = (
        (
            f"{INFLIGHT} in flight, {len(LAYOUT)} engines (TP 1, 2, 4), {WARM} finished before; medians over"
            f" {given.passes} passes, by turns."
        ),
        "A decision is answered + key + route + sent; finished is of trajectories with seven signals.",
    )
    report(
        "decisions",
        "Cost of scheduling, microseconds",
        ("what", "p50", "p90", "p99", "range of p50", "aim p50 / p99"),
        rows,
        notes,
        raw,
    )


if __name__ == "__main__":
    main()
