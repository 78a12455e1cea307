"""Cost of one scheduling decision: C-MLFQ at 10,000 turns in flight over 64 engines of three TP classes.

A decision is `Policy.key` + `Policy.route` + the board's `sent` and `answered`.  Turns come in random order, so caches
see what a leader's do.  Times are of single calls, minus reading the clock.  Each pass is a process of its own,
compiled and interpreted (`libra_hpc.compiled`) in turn.  Each quantile is the median over the passes.

    python -m bench.decisions [--passes 5]
"""

from __future__ import annotations

import gc
import json
import random
import time
from itertools import product
from typing import Any

from msgspec.structs import replace

from bench.harness import child, median, options, report
from libra_hpc import compiled
from libra_hpc.policies.scheduling.board import Board
from libra_hpc.policies.scheduling.causal_mlfq import CausalMlfq
from libra_hpc.policies.scheduling.protocol import TurnView
from libra_hpc.protocol.engine_state import EngineStats
from libra_hpc.protocol.env import Signal

INFLIGHT = 10_000
LAYOUT = (1,) * 36 + (2,) * 18 + (4,) * 10
LIMIT = 131_072
"""Context tokens."""
KV_TOKENS = 4_000_000
"""Per GPU: more than there is, so that no turn waits for room in a cache."""
QUANTILES = (0.5, 0.9, 0.99)


def signals(rng: random.Random, count: int) -> tuple[Signal, ...]:
    return tuple(
        Signal(
            rng.choice(("bash", "edit", "search")),
            outcome=rng.choice(("ok", "ok", "error")),
            payload_tokens=rng.randrange(2000),
            seconds=rng.expovariate(1.0),
            exit_code=rng.choice((0, 0, 1)),
        )
        for _ in range(count)
    )


def busy_board() -> Board:
    board = Board(4 * INFLIGHT // len(LAYOUT))
    for i, tp in enumerate(LAYOUT):
        board.up(f"engine-{i}", tp, KV_TOKENS * tp, 0)
        for n in range(3):
            grown = {"generated_tokens": 5000 * n, "prefill_tokens": 20_000 * n, "steps": 50 * n, "busy_s": 0.5 * n}
            board.report(f"engine-{i}", replace(EngineStats(), running=100, kv_use=0.5, **grown))
    return board


def views(rng: random.Random, count: int, at: dict[str, str]) -> list[TurnView]:
    """The seventh turns of ``count`` trajectories."""
    return [
        TurnView(
            trajectory=f"t{i}",
            prompt_id=f"p{i // 8}",
            sample=i % 8,
            task="task",
            context_tokens=rng.randrange(2000, 40_000),
            attained_tokens=rng.randrange(200, 6000),
            turns=6,
            ready_at=100.0,
            engine=at.get(f"t{i}", ""),
            signals=signals(rng, 6),
            max_context=LIMIT,
        )
        for i in range(count)
    ]


def one_pass(seed: int) -> list[float]:
    """Microseconds of single decisions at `QUANTILES`."""
    rng, clock = random.Random(seed), time.perf_counter_ns
    policy, board = CausalMlfq(), busy_board()
    at: dict[str, str] = {}
    turns = views(rng, INFLIGHT, at)
    for turn in turns:
        policy.key(turn, 100.0)
        decision = policy.route(turn, board, 100.0)
        at[turn.trajectory] = decision.engine
        board.sent(decision.engine, turn.context_tokens)
    extra = signals(rng, 1)
    nexts = []
    for t in turns:
        tokens = {"context_tokens": t.context_tokens + 600, "attained_tokens": t.attained_tokens + 150}
        nexts.append(replace(t, turns=7, ready_at=101.0, engine=at[t.trajectory], signals=t.signals + extra, **tokens))
    order = list(range(INFLIGHT))
    rng.shuffle(order)
    empty = median([-clock() + clock() for _ in range(1000)])
    decisions = []
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
    gc.unfreeze()
    decisions.sort()
    return [decisions[int(q * INFLIGHT)] for q in QUANTILES]


def children(passes: int) -> dict[str, list[list[float]]]:
    """Quantiles of every pass by build, each from its own process."""
    ways = {"compiled": "", "interpreted": "1"} if compiled.in_use() else {"interpreted": "1"}
    found: dict[str, list[list[float]]] = {way: [] for way in ways}
    for seed, (way, flag) in product(range(passes), ways.items()):
        found[way].append(child("-m", "bench.decisions", "--seed", str(seed), **{compiled.INTERPRETED: flag}))
    return found


def main() -> None:
    given = options("decisions", __doc__, passes=5, seed=-1)
    if given.seed >= 0:
        print(json.dumps(one_pass(given.seed)))
        return
    raw, rows = children(given.passes), list[list[Any]]()
    for way, passes in raw.items():
        quantiles = list(zip(*passes, strict=True))
        span = f"{min(quantiles[0]):.3g}..{max(quantiles[0]):.3g}"
        rows.append([way, *map(median, quantiles), span])
    notes = (
        f"{INFLIGHT} in flight, {len(LAYOUT)} engines (TP 1, 2, 4); {given.passes} passes.",
        "A decision is answered + key + route + sent; goals: 5 at p50, 20 at p99.",
    )
    columns = ("build", "p50", "p90", "p99", "range of p50")
    report(given, "Cost of a decision, microseconds", columns=columns, rows=rows, notes=notes, raw=raw)


if __name__ == "__main__":
    main()
