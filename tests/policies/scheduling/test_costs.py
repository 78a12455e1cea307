"""What a step of a class and of each of its engines costs, from reports that are noisy and sometimes misleading."""

from __future__ import annotations

import random

import msgspec
import pytest

from libra_hpc.policies.scheduling.board import Board
from libra_hpc.policies.scheduling.costs import WINDOW_STEPS, ClassFit, EngineFit, default_costs
from libra_hpc.policies.scheduling.slow_engines import MIN_ENGINES, SURE_S, SlowEngines

from .boards import board, stats

STEPS = 20
"""Of a report."""


class Fleet:
    """Engines that report every half second: ``factor`` times 10 ms and 100 ns per KV token a step."""

    def __init__(self, *engines: tuple[str, int], kv: int = 100_000, seed: int = 0) -> None:
        self.board = board(*engines, kv=kv)
        self.factor = {name: 1.0 for name, _ in engines}
        self.kv, self.rng, self.now = kv, random.Random(seed), 0.0
        self.busy = dict.fromkeys(self.factor, 0.0)
        self.steps = dict.fromkeys(self.factor, 0)
        self.use = dict.fromkeys(self.factor, 0.5)
        self.count = dict.fromkeys(self.factor, STEPS)
        for name in self.factor:
            self.board.report(name, stats(0, 0.0, kv=0.5))

    def run(self, seconds: float, noise: float = 0.0) -> None:
        for _ in range(int(2 * seconds)):
            self.now += 0.5
            for name, factor in self.factor.items():
                use = min(1.0, max(0.0, self.use[name] + self.rng.uniform(-0.2, 0.2)))
                step = factor * (0.01 + 1e-7 * self.kv * 0.5 * (use + self.use[name]))
                self.use[name] = use
                self.busy[name] += self.count[name] * step * self.rng.lognormvariate(0.0, noise)
                self.steps[name] += self.count[name]
                self.board.report(name, stats(self.steps[name], self.busy[name], kv=use))

    def full_step_s(self, name: str) -> float:
        view = self.board.engines[name]
        return view.base_s + view.slope_s * self.kv


def alike(count: int) -> Fleet:
    return Fleet(*((f"e{i}", 1) for i in range(count)))


def test_equal_engines_cost_the_same_whatever_their_reports_scatter() -> None:
    fleet = alike(12)
    fleet.run(60.0, noise=0.15)
    assert {view.pace for view in fleet.board.engines.values()} == {1.0}
    assert fleet.full_step_s("e0") == pytest.approx(0.02, rel=0.05)


def test_each_of_two_kinds_of_engine_gets_its_own_costs() -> None:
    fleet = alike(8)
    fleet.factor.update(dict.fromkeys(("e0", "e1", "e2", "e3"), 0.5))
    fleet.run(60.0, noise=0.1)
    assert fleet.full_step_s("e0") == pytest.approx(0.01, rel=0.1)
    assert fleet.full_step_s("e7") == pytest.approx(0.02, rel=0.1)


def test_an_engine_that_becomes_slow_is_priced_so_step_by_step_and_the_others_are_not() -> None:
    fleet = alike(6)
    fleet.run(30.0)
    fleet.factor["e3"], prices = 3.0, []
    for _ in range(20):
        fleet.run(1.0)
        prices.append(fleet.full_step_s("e3") / 0.02)
    assert prices == sorted(prices)
    assert prices[2] < 1.5, "a few reports may be chance"
    assert prices[12] > 1.8
    fleet.run(30.0)
    assert fleet.full_step_s("e3") == pytest.approx(0.06, rel=0.1)
    assert fleet.full_step_s("e2") == pytest.approx(0.02, rel=0.05)
    fleet.factor["e3"] = 1.0
    fleet.run(60.0)
    assert fleet.board.engines["e3"].pace == 1.0, "it recovered"


def test_a_report_in_the_middle_of_a_long_prefill_is_no_observation() -> None:
    engine = EngineFit()
    engine.observe(stats(100, 5.0), 1000, WINDOW_STEPS)
    # Half a second a step, and no token counted yet.
    assert engine.observe(stats(102, 6.0), 1000, WINDOW_STEPS) is None
    window = engine.observe(stats(120, 6.5, prefill=9000), 1000, WINDOW_STEPS)
    assert window[:2] + window[3:] == (1.5, 20.0, 9000.0)


def test_weight_updates_are_no_part_of_what_steps_cost() -> None:
    made = board(("a", 1), kv=1000)
    assert made.engines["a"].decode_s == 0.0, "unknown before any report"
    for i in range(50):
        made.report("a", msgspec.structs.replace(stats(STEPS * i, 7.0 * i, kv=0.5), update_s=5.0 * i))
    assert made.engines["a"].decode_s == pytest.approx(0.1, rel=0.05)


def test_reports_that_are_all_alike_keep_the_shape_of_the_prior_but_not_its_level() -> None:
    fit, engine = ClassFit(), EngineFit()
    for i in range(50):
        if (window := engine.observe(stats(STEPS * i, 0.5 * STEPS * i, kv=0.5), 1000, 1)) is not None:
            fit.add(window, 1.0)
    base, slope, _ = fit.solve(default_costs(1, 1000))
    assert base + slope * 500 == pytest.approx(0.5, rel=0.05)
    assert base > 0.0
    assert slope > 0.0


def test_counters_of_a_rebuilt_engine_start_a_new_window() -> None:
    fit = EngineFit()
    assert fit.observe(stats(100, 5.0), 1000, 1) is None
    assert fit.observe(stats(3, 0.1), 1000, 1) is None
    assert fit.observe(stats(4, 0.2), 1000, 1) is not None


# --- naming


def named(fleet: Fleet, slow: SlowEngines, seconds: float, noise: float) -> list[list[str]]:
    found = []
    for _ in range(int(seconds)):
        fleet.run(1.0, noise)
        found.append([one.engine for one in slow.update(fleet.board, fleet.now)])
    return found


def test_equal_noisy_engines_are_never_named() -> None:
    for seed in range(3):
        fleet = Fleet(*((f"e{i}", 1 + i % 2) for i in range(8)), seed=seed)
        assert not any(named(fleet, SlowEngines(), 120.0, noise=0.3))


def test_a_slow_engine_is_named_once_it_is_sure_and_until_it_has_recovered() -> None:
    fleet, slow = alike(5), SlowEngines()
    named(fleet, slow, 60.0, noise=0.1)
    fleet.factor["e1"], began = 2.4, fleet.now
    found = named(fleet, slow, 90.0, noise=0.1)
    first = found.index(["e1"])
    assert SURE_S <= first < SURE_S + 15.0
    assert all(names == ["e1"] for names in found[first:]), "it is not named in turns"
    (one,) = slow.update(fleet.board, fleet.now)
    assert one.ratio == pytest.approx(2.4, rel=0.15)
    assert began <= one.since < began + 15.0
    fleet.factor["e1"] = 1.0
    assert named(fleet, slow, 60.0, noise=0.1)[-1] == []
    fleet.factor["e1"] = 3.0
    assert named(fleet, slow, 90.0, noise=0.0)[-1] == ["e1"]
    fleet.board.down("e1")
    assert slow.update(fleet.board, fleet.now) == [], "it is lost"


def test_an_engine_that_is_paused_most_of_the_time_is_neither_slow_nor_fast() -> None:
    fleet, slow = alike(5), SlowEngines()
    fleet.count["e1"] = 2
    assert not any(named(fleet, slow, 120.0, noise=0.1))
    assert fleet.board.engines["e1"].pace == 1.0


def test_gpus_of_another_kind_are_not_named() -> None:
    made = Board(64)
    fleet = alike(2)
    fleet.factor["e0"] = 3.0
    assert len(fleet.factor) < MIN_ENGINES
    assert not any(named(fleet, SlowEngines(), 90.0, noise=0.0)), "nobody knows which of two is right"
    for name, kv in (("h1", 300_000), ("h2", 300_000), ("h3", 300_000), ("a1", 90_000), ("a2", 90_000), ("a3", 90_000)):
        made.up(name, 1, kv, 0)
    for name, view in made.engines.items():
        view.pace = 2.5 if name[0] == "a" else 1.0
    slow = SlowEngines()
    assert not slow.update(made, 0.0)
    assert not slow.update(made, 2 * SURE_S)
