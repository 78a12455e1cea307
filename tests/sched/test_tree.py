"""What the causal tree learns, how it backs off, forgets and stays bounded."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libra_hpc.protocol.env import Signal
from libra_hpc.sched.tree import HALF_LIFE, K_SIGNAL, MAX_DEPTH, PRIOR_TOKENS, SAMPLES, CausalTree, Sketch, symbol
from tests.sched.views import MISS, OK, finished


def test_nothing_known_is_the_prior_then_attained_service() -> None:
    tree = CausalTree()
    assert tree.estimate("p", (), 0).mean == PRIOR_TOKENS
    assert tree.estimate("p", (), 300).mean == 300.0
    assert tree.mean_total == PRIOR_TOKENS


def test_attained_service_is_the_mean_excess_of_longer_ones() -> None:
    tree = CausalTree()
    for total in (100, 200, 600, 1000):
        tree.insert(finished(total, f"other-{total}"))
    assert tree.estimate("new", (), 0).mean == 475.0
    assert tree.estimate("new", (), 150).mean == pytest.approx(450.0)
    assert tree.estimate("new", (), 700).mean == 300.0
    assert tree.estimate("new", (), 5000).mean == 5000.0, "beyond everything seen: as long again"


def test_siblings_outweigh_the_rest_soon() -> None:
    tree = CausalTree()
    for i in range(50):
        tree.insert(finished(100, f"q{i}"))
    assert tree.estimate("p", (), 0).mean == 100.0
    tree.insert(finished(900, "p"))
    one = tree.estimate("p", (), 0)
    assert one.own == pytest.approx(1.0)
    assert one.mean == pytest.approx((tree.mean_total + 900) / 2, rel=0.05)
    for _ in range(7):
        tree.insert(finished(900, "p"))
    assert tree.estimate("p", (), 0).mean > 800.0


def test_a_signal_moves_the_estimate_by_its_evidence_only() -> None:
    tree = CausalTree()
    for i in range(8):
        tree.insert(finished(100, f"ok{i}", signals=(OK,), at=(50,)))
        tree.insert(finished(1050, f"miss{i}", signals=(MISS,), at=(50,)))
    base = tree.estimate("new", (Signal("other", "ok", 5, 0.0),), 50).mean
    good, bad = tree.estimate("new", (OK,), 50), tree.estimate("new", (MISS,), 50)
    assert good.seen == pytest.approx(8.0)
    weight = 8 / (8 + K_SIGNAL)
    assert good.mean == pytest.approx(base + weight * (50 - base))
    assert bad.mean == pytest.approx(base + weight * (1000 - base))
    assert good.mean < base < bad.mean
    assert good.p90 < bad.p90


def test_a_last_signal_teaches_nothing() -> None:
    tree = CausalTree()
    tree.insert(finished(100, signals=(OK, MISS), at=(50, 100)))
    assert tree.estimate("x", (OK,), 50).seen == 1.0
    assert tree.estimate("x", (OK, MISS), 100).seen == 0.0


def test_evidence_halves_per_half_life_of_versions() -> None:
    sketch = Sketch(SAMPLES)
    for _ in range(4):
        sketch.add(10.0, 0)
    assert sketch.evidence(0) == 4.0
    assert sketch.evidence(int(HALF_LIFE)) == pytest.approx(2.0)
    sketch.add(70.0, int(HALF_LIFE))
    assert sketch.mean == pytest.approx((2 * 10 + 70) / 3)
    sketch.add(70.0, 0)
    assert sketch.evidence(int(HALF_LIFE)) == pytest.approx(3.5), "an old sample counts as old"


def test_symbols_carry_tool_outcome_and_size_class() -> None:
    sizes = [symbol(Signal("t", "ok", n, 9.0))[2] for n in (0, 128, 129, 1024, 1025)]
    assert sizes == [0, 0, 1, 1, 2]
    assert symbol(Signal("t", "ok", 1, 0.0)) == symbol(Signal("t", "ok", 100, 5.0)) != symbol(Signal("t", "error", 1, 0.0))


def test_nodes_are_bounded_and_the_least_recently_updated_go_first() -> None:
    tree = CausalTree(max_nodes=50)
    for i in range(200):
        signals = tuple(Signal(f"tool{(i + j) % 7}", "ok", 1, 0.0) for j in range(5))
        tree.insert(finished(600, f"p{i}", signals=signals, at=(100, 200, 300, 400, 500)))
        assert len(tree) <= 50
    assert tree.estimate("p199", (), 0).own == 1.0
    assert tree.estimate("p0", (), 0).own == 0.0


def test_a_leaf_goes_before_its_parent() -> None:
    tree = CausalTree(max_nodes=8)
    signals = tuple(Signal(f"tool{i}", "ok", 1, 0.0) for i in range(5))
    tree.insert(finished(600, signals=signals, at=(100, 200, 300, 400, 500)))
    # Six global nodes and six of the prompt; the four deepest global ones are gone.
    assert [tree.estimate("x", signals[:depth], 100 * depth).seen for depth in range(1, 6)] == [1.0, 0.0, 0.0, 0.0, 0.0]


def test_paths_beyond_the_depth_are_not_followed() -> None:
    tree = CausalTree()
    signals = (OK,) * 40
    tree.insert(finished(410, signals=signals, at=tuple(range(10, 410, 10))))
    assert len(tree) == 2 * (1 + MAX_DEPTH)
    assert tree.estimate("x", signals[:MAX_DEPTH], 160).seen == 1.0
    assert tree.estimate("x", signals[: MAX_DEPTH + 1], 170) == pytest.approx((240.0, 240.0, 240.0, 0.0, 0.0))


outcomes = st.lists(st.sampled_from(["ok", "miss", "error"]), max_size=6)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(1, 5000), st.integers(0, 3), outcomes, st.integers(0, 40)), max_size=40), outcomes, st.integers(0, 6000))
def test_estimates_stay_within_what_was_seen(records: list[tuple[int, int, list[str], int]], asked: list[str], attained: int) -> None:
    tree = CausalTree(max_nodes=30)
    for total, prompt, path, version in records:
        signals = tuple(Signal("t", o, 1, 0.0) for o in path)
        tree.insert(finished(total, str(prompt), signals=signals, at=tuple(total * (i + 1) // (len(path) + 1) for i in range(len(path))), version=version))
        assert len(tree) <= 30
    left = tree.estimate("0", tuple(Signal("t", o, 1, 0.0) for o in asked), attained)
    longest = max([total for total, *_ in records] + [attained, int(PRIOR_TOKENS)])
    assert 0.0 < left.mean <= longest
    assert 0.0 < left.p50 <= left.p90 <= longest
    assert left.own >= 0.0
    assert left.seen >= 0.0
