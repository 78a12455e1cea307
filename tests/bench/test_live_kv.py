"""Work and table of `bench.live_kv`."""

from __future__ import annotations

from bench.live_kv import GROUP_SIZE, GROUPS, Row, held, make_work, table
from libra_hpc.protocol.trace import TrajectoryRecord, TurnRecord


def row(policy: str, seed: int, makespan_s: float, recomputed: int) -> Row:
    facts = {"cache_mb": 48, "kv_tokens": 8192, "prefilled": 1000, "preempted": 0}
    return {**facts, "policy": policy, "seed": seed, "makespan_s": makespan_s, "recomputed": recomputed}


def test_equal_seeds_give_equal_work_that_every_engine_can_hold() -> None:
    work = make_work(3)
    assert work == make_work(3) != make_work(4)
    assert len(work) == GROUPS * GROUP_SIZE
    assert max(record.context for record in work) < 4096
    turns = (TurnRecord(0, 10), TurnRecord(5, 10))
    assert held([TrajectoryRecord("p", sample, 100, turns) for sample in (0, 1)]) == 150, "siblings share the prompt"


def test_ratios_are_taken_within_a_seed() -> None:
    rows = [row("cmlfq", 0, 10.0, 5), row("sticky", 0, 30.0, 50), row("cmlfq", 1, 20.0, 5), row("sticky", 1, 30.0, 70)]
    first, other = table(rows, ["cmlfq", "sticky"])
    assert first[:4] == ["8,192", "cmlfq", "15.0 (10.0..20.0)", "1.00 (1.00..1.00)"]
    assert other[1:] == ["sticky", "30.0 (30.0..30.0)", "2.25 (1.50..3.00)", "1,000", "60", "0"]
