"""Nodes that serve both stages in turn: one switch a batch, nothing runs in both stages, unfinished turns go on."""

from __future__ import annotations

import pytest

from bench.controlled_simulation import ControlledSimulation
from libra_hpc.protocol.trace import TrajectoryRecord
from libra_hpc.simulator.result import SimulationResult
from libra_hpc.simulator.settings import SimulationSettings
from libra_hpc.simulator.simulate import simulate

from .toys import Linear, Spread, single, spec, turn


def with_(**settings: object) -> SimulationSettings:
    """Five seconds of training, three of switches."""
    return SimulationSettings(
        **{"block_size": 4, "send_s": 0.0, "answer_s": 0.0, "train_s": 5.0, "switch_s": 3.0, **settings}  # type: ignore[arg-type]
    )


def shared(work: list[TrajectoryRecord], **settings: object) -> SimulationResult:
    return simulate(work, [spec("e", Linear(400, prefill=2.0**-4))], Spread(), with_(**settings))


def test_synchronous_batches_take_turns_with_training_and_pay_one_pair_of_switches() -> None:
    result = shared([single(f"p{i}", 4, 10 + i) for i in range(4)], batch_groups=2, eta=0)
    # Ten or eleven tokens a batch, the first after a prefill of eight; then 5 s of training and 3 s of switches.
    assert result.finish_s == [10.5, 11.5, 11.5 + 8 + 12.5, 11.5 + 8 + 13.5]
    assert [(step.start_at, step.end_at, step.staleness) for step in result.steps] == [(11.5, 16.5, 0), (33.0, 38.0, 0)]


def test_an_unfinished_turn_is_computed_again_after_training_and_ends() -> None:
    result = shared([single("short", 4, 4), single("long", 4, 20)], batch_groups=1, eta=1)
    first, second = result.steps
    # The step in progress ends at 5.5 s, after 5 of 20 tokens; they begin again at 13.5 s with a prefill of 9.
    assert (first.start_at, first.end_at) == (5.5, 10.5)
    assert result.finish_s == [4.5, 13.5 + 15 + 9 * 2.0**-4]
    assert (second.staleness, result.generated_tokens) == (1, 24)
    assert sum(engine.generated_tokens for engine in result.engines) == 24


def test_a_kept_cache_saves_the_second_prefill() -> None:
    work = [single("short", 4, 4), single("long", 40, 20)]
    lost, kept = (shared(work, batch_groups=1, eta=1, keep_kv=keep) for keep in (False, True))
    assert kept.finish_s[0] == lost.finish_s[0]
    # Eleven whole blocks of 45 tokens are found again.
    assert lost.finish_s[1] - kept.finish_s[1] == 44 * 2.0**-4


def test_two_complete_batches_are_trained_with_one_pair_of_switches() -> None:
    result = shared([single("p", 4, 4), single("q", 4, 4), single("r", 4, 4)], batch_groups=1, eta=1)
    # p and q end together.
    assert [(step.start_at, step.end_at) for step in result.steps[:2]] == [(4.5, 9.5), (9.5, 14.5)]
    assert result.finish_s[2] == 14.5 + 3.0 + 4.25


@pytest.mark.parametrize("eta", [0, 1, 2])
def test_no_engine_works_while_nodes_train_and_nothing_is_lost(eta: int) -> None:
    seen = [0, 0]

    def watch(simulation: ControlledSimulation, now: float) -> None:
        if any(engine.requests for engine in simulation.engines.values()):
            seen[simulation.training.idle] += 1

    work = [
        TrajectoryRecord(f"p{i}", s, 8, (turn(3 + 5 * (i * s % 7), tool_s=float(i % 5)), turn(6, new=4, tool=None)))
        for i in range(12)
        for s in range(2)
    ]
    engines = [spec(f"e{i}", Linear(400, prefill=2.0**-4)) for i in range(2)]
    limits = with_(batch_groups=3, eta=eta)
    result = ControlledSimulation(work, engines, Spread(), limits, controller=watch, controller_s=0.125).run()
    assert len(result.steps) == 4
    assert result.generated_tokens == sum(one.generated for one in work)
    assert max(step.staleness for step in result.steps) <= eta
    assert seen[0] == 0 < seen[1]
