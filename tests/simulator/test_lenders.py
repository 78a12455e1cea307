"""Borrowed engines in a simulation: users come first, turns go elsewhere and are not lost, and without them nothing
changes."""

from __future__ import annotations

import statistics
from typing import Any

from msgspec.structs import replace

from libra_hpc.policies.scheduling.availability import Availability
from libra_hpc.policies.scheduling.cmlfq.causal_mlfq import CausalMlfq
from libra_hpc.policies.scheduling.engine_loads import EngineLoads
from libra_hpc.policies.scheduling.slow_engines import SlowEngines
from libra_hpc.policies.serving.pauses import LONGEST_S, STAND_S
from libra_hpc.policies.serving.step_gate import GateLimits
from libra_hpc.protocol.trace import TrajectoryRecord
from libra_hpc.simulator.result import SimulationResult
from libra_hpc.simulator.serving_traffic import ServingRequest
from libra_hpc.simulator.settings import EngineSpec, LenderSpec, SimulationSettings
from libra_hpc.simulator.simulate import Simulation
from libra_hpc.traces.generate import Dials, generate
from tests.policies.scheduling.boards import board, turn

from .toys import Linear, Spread, single

STEP = Linear(100_000, base=0.01, prefill=1e-4)
SETTINGS = SimulationSettings()
ALWAYS = tuple(ServingRequest(0.5 * at, 100, 100) for at in range(4000))
"""Somebody is served all the time."""


def own(count: int = 2) -> list[EngineSpec]:
    return [EngineSpec(f"own-{number}", 1, STEP) for number in range(count)]


def lent(count: int = 1, **terms: object) -> list[EngineSpec]:
    terms = {"join_s": 0.0, **terms}
    return [EngineSpec(f"lent-{number}", 1, STEP, lender=LenderSpec(**terms)) for number in range(count)]  # type: ignore[arg-type]


def work(count: int = 64) -> list[TrajectoryRecord]:
    return generate("search", Dials(trajectories=count, max_context=20_000))


def played(
    engines: list[EngineSpec],
    trajectories: list[TrajectoryRecord] | None = None,
    policy: Any = None,
    settings: SimulationSettings = SETTINGS,
) -> tuple[Simulation, SimulationResult]:
    simulation = Simulation(trajectories or work(), engines, policy or Spread(), settings)
    return simulation, simulation.run()


def tokens(result: SimulationResult, prefix: str) -> int:
    return sum(engine.generated_tokens for engine in result.engines if engine.engine.startswith(prefix))


def test_a_lender_without_room_changes_no_decision() -> None:
    _, without = played(own(), policy=CausalMlfq())
    _, beside = played([*own(), *lent(away=((0.0, 1e9),))], policy=CausalMlfq())
    assert without.decisions > 100
    assert replace(beside, engines=without.engines) == without


def test_users_wait_for_one_step_at_most() -> None:
    requests = tuple(ServingRequest(1.0 + 3.0 * at, 200, 20) for at in range(30))
    limits = GateLimits(0.5)
    simulation, result = played([*own(1), *lent(requests=requests, limits=limits)])
    served = simulation.lenders.lenders["lent-0"].served
    alone = STEP.base + 200 * STEP.prefill
    assert tokens(result, "lent") > 0
    assert len(served.ttft_s) >= 20
    assert min(served.ttft_s) >= alone
    # Some arrive while a rollout step runs.
    assert 1e-6 < max(served.ttft_s) - alone <= 1.2 * limits.share * limits.ttft_s
    assert statistics.fmean(served.tpot_s) < 1.01 * STEP.base, "no step of a rollout begins between their tokens"


def test_who_always_serves_lends_nothing() -> None:
    assert tokens(played([*own(1), *lent(requests=ALWAYS)])[1], "lent") < 100


def test_nothing_is_lost_when_an_engine_is_taken_back_and_returns() -> None:
    whole = work()
    simulation, result = played([*own(1), *lent(2, away=((3.0, 9.0), (20.0, 31.0)))], whole)
    assert result.trajectories == len(whole)
    assert result.generated_tokens == sum(one.generated for one in whole)
    assert simulation.lenders.leaves >= 2
    assert sum(engine.engine == "lent-0" for engine in result.engines) == 3, "it was there three times"
    assert tokens(result, "lent") > 0


def test_who_stands_still_goes_elsewhere() -> None:
    engines = [*own(1), *lent(requests=(ServingRequest(1.0, 100, 5000),))]
    simulation, result = played(engines, [single("a", 100, 500), single("b", 100, 500)])
    assert simulation.lenders.leaves == 1
    assert result.moves == 1
    assert result.makespan_s < 15.0, "the server is busy for 50 s"


def test_training_waits_for_own_engines_only() -> None:
    settings = SimulationSettings(batch_groups=2, train_s=1.0)
    assert len(played([*own(1), *lent(away=((2.0, 5000.0),))], settings=settings)[1].steps) == 4


def test_share_leaves_and_patience_follow_what_happens() -> None:
    found = Availability()
    assert (found.share, found.leaves_per_s) == (1.0, 0.0)
    for _ in range(200):
        found.passed(4.0, True)
        found.passed(1.0, False)
        found.paused(1.0)
    assert abs(found.share - 0.8) < 0.02
    own_alone = board(("own", 1), cap=8)
    assert abs(found.patience_s(own_alone, 100) - 2.0) < 1e-6, "twice the usual pause"
    assert Availability().patience_s(own_alone, 100) < 0.1, "its prefill elsewhere"
    assert Availability().patience_s(own_alone, 10**6) == STAND_S
    for _ in range(200):
        found.paused(100.0)
    assert found.patience_s(own_alone, 100) == LONGEST_S
    for _ in range(3):
        found.left()
    assert found.leaves_per_s > 0.009
    found.passed(3000.0, True)
    assert found.leaves_per_s < 1e-4


def test_who_may_have_to_leave_goes_to_an_own_engine() -> None:
    def at_own(leaves_per_s: float, share: float) -> int:
        """Out of three turns."""
        made, policy = board(("own", 1), cap=8), CausalMlfq()
        made.up("lent", 1, 100_000, 0, borrowed=True)
        made.lends("lent", share, leaves_per_s)
        chosen = []
        for number in range(3):
            chosen.append(policy.route(turn(f"t{number}", f"p{number}", sample=0, context=4000), made, 0.0).engine)
            made.sent(chosen[-1], 4000)
        return chosen.count("own")

    assert at_own(0.0, 1.0) in (1, 2)
    assert at_own(10.0, 1.0) == 3, "its turns leave ten times a second"
    assert at_own(0.0, 0.02) == 3, "its steps take 50 times as long"


def test_a_borrowed_engine_is_dearer_not_slow_and_its_cache_may_shrink() -> None:
    made, loads = board(("a", 1), ("b", 1), ("c", 1), cap=8), EngineLoads()
    view = made.up("lent", 1, 100_000, 0, borrowed=True)
    before = made.engines["a"].base_s
    made.lends("lent", 0.25, 0.0)
    assert view.base_s == 4 * before
    assert made.engines["a"].base_s == before
    assert SlowEngines().update(made, 0.0) == SlowEngines().update(made, 100.0) == []
    loads.sync(made)
    load = loads.get("lent")
    made.resize("lent", 30_000)
    loads.sync(made)
    assert loads.get("lent") is load, "what is placed there stays"
    assert (load.kv_capacity, load.cache.capacity) == (30_000, 30_000)
