"""Laws that hold for any workload: nothing is lost, nothing is counted twice, and taking many steps in one event
changes nothing."""

from __future__ import annotations

from typing import NamedTuple

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.controlled_simulation import ControlledSimulation
from libra_hpc.protocol.trace import TrajectoryRecord, TurnRecord
from libra_hpc.simulator.result import SimulationResult
from libra_hpc.simulator.settings import SimulationSettings
from libra_hpc.simulator.simulate import Simulation

from .toys import Linear, Spread, engine, exchange, play, request, spec

EIGHTH = st.integers(0, 16).map(lambda n: n / 8)


@st.composite
def workloads(draw: st.DrawFn) -> list[TrajectoryRecord]:
    work = []
    for prompt in range(draw(st.integers(1, 4))):
        tokens = draw(st.integers(1, 30))
        for sample in range(draw(st.integers(1, 6))):
            turns = tuple(
                TurnRecord(
                    new := draw(st.integers(0, 12)) if i else 0,
                    draw(st.integers(1, 8)) * 5,
                    "tool",
                    "ok",
                    draw(EIGHTH),
                    new_sample=new > 0 and draw(st.booleans()),
                )
                for i in range(draw(st.integers(1, 4)))
            )
            work.append(TrajectoryRecord(f"p{prompt}", sample, tokens, turns))
    return work


class Rules(msgspec.Struct, frozen=True):
    """Settings, and when engine b is exchanged for c, if it is: (seconds, delay of c)."""

    settings: SimulationSettings
    exchange: tuple[float, float] | None


@st.composite
def rules(draw: st.DrawFn) -> Rules:
    limits = SimulationSettings(
        block_size=4,
        max_num_seqs=draw(st.integers(1, 6)),
        max_num_batched_tokens=draw(st.integers(6, 64)),
        max_inflight=draw(st.integers(1, 12)),
        send_s=2**-9,
        answer_s=2**-8,
        batch_groups=draw(st.integers(0, 2)),
        eta=draw(st.integers(0, 2)),
        train_s=draw(EIGHTH),
        sync_s=draw(EIGHTH) / 4,
    )
    return Rules(limits, draw(st.none() | st.tuples(EIGHTH, EIGHTH)))


def run(work: list[TrajectoryRecord], rules: Rules, capacity: int) -> tuple[Simulation, SimulationResult]:
    engines = [
        spec("a", Linear(capacity, 2**-4, 2**-18, 2**-10)),
        spec("b", Linear(capacity + 8, 2**-4, 2**-18, 2**-10, tp=2)),
    ]
    sim = Simulation(work, engines, Spread(), rules.settings)
    if rules.exchange is not None:
        at_s, delay_s = rules.exchange
        control = exchange("b", spec("c", Linear(400, 2**-4, 2**-18, 2**-9)), delay_s)
        sim = ControlledSimulation(
            work, engines, Spread(), rules.settings, controller=control, controller_s=at_s + 0.125
        )
    return sim, sim.run()


ROOM = 244
"""KV tokens that hold the longest trajectory there can be, 30 + 4 * 40 + 3 * 12 and a block to spare, but not two of
them: preemption happens."""


@settings(max_examples=120, deadline=None)
@given(workloads(), rules(), st.sampled_from([ROOM, 400, 4000]))
def test_nothing_is_lost_nothing_counted_twice_and_stretches_equal_single_steps(
    work: list[TrajectoryRecord], rules: Rules, capacity: int
) -> None:
    sim, result = run(work, rules, capacity)
    seen: Spread = sim._policy  # type: ignore[assignment]
    turns = sum(len(one.turns) for one in work)
    wanted = sum(one.generated for one in work)
    assert result.generated_tokens == wanted == sum(engine.generated_tokens for engine in result.engines)
    assert result.trajectories == len(work)
    assert sorted(record.context_tokens for record in seen.records) == sorted(one.context for one in work)
    assert result.turns == result.decisions == turns
    contexts = sum(turn.context_tokens for turn in seen.turns)
    decided = result.prefilled_tokens + result.cached_tokens
    assert decided == contexts if not result.preemptions and not result.recomputed else decided >= contexts
    assert 0 <= result.reprefilled_tokens <= result.prefilled_tokens
    assert 0.0 <= result.idle_share <= 1.0
    assert result.finish_s[-1] <= result.makespan_s
    assert all(step.staleness <= rules.settings.eta for step in result.steps)
    assert all(one.snapshot().kv_use == 0.0 for one in sim.engines.values()), "no request has KV blocks any more"
    assert sim._agents.in_flight == len(sim._queue) == 0
    # One decode step an event.
    stepwise = Rules(msgspec.structs.replace(rules.settings, max_stretch=1), rules.exchange)
    slow, stepped = run(work, stepwise, capacity)
    assert result == stepped
    assert sim._events.count <= slow._events.count


class Arrival(NamedTuple):
    """A turn that reaches an engine; steps of 1/16 s without a term in KV tokens make arrivals meet boundaries."""

    at: int
    tokens: int
    left: int
    priority: int
    prompt: int


ARRIVALS = st.lists(
    st.builds(Arrival, *(st.integers(*ends) for ends in ((0, 60), (1, 24), (1, 56), (0, 2), (0, 3)))), max_size=14
)


def crowd(arrivals: list[Arrival], kv: float, max_stretch: int) -> tuple[list[tuple[float, str]], list[object], float]:
    """Many turns on one engine of 25 blocks: who ended when, all counters, and the share of the blocks held at the
    end."""
    e = engine(Linear(100, 2**-4, kv, 2**-10 if kv else 0.0), max_stretch=max_stretch)

    turns = [
        (a.at / 16, request(f"t{i}", 4 * a.prompt + a.tokens, a.left, f"p{a.prompt}", 4 * a.prompt, a.priority))
        for i, a in enumerate(arrivals)
    ]
    done = play(e, *turns, (1.25, lambda e, now: e.swap(1, 0.5, now)))
    counters = [getattr(e.counters, name) for name in dir(e.counters) if not name.startswith("_")]
    return done, counters, e.snapshot().kv_use


@settings(max_examples=150, deadline=None)
@given(ARRIVALS, st.sampled_from([0.0, 2**-12]))
def test_a_crowded_engine_is_the_same_step_by_step(arrivals: list[Arrival], kv: float) -> None:
    done, counters, held = crowd(arrivals, kv, 1 << 30)
    assert (done, counters, held) == crowd(arrivals, kv, 1)
    assert held == 0.0
    assert sorted(name for _, name in done) == sorted(f"t{i}" for i in range(len(arrivals)))
