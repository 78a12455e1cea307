"""Environment hosts that die, and environments that fail: every step has its groups, and an outage ends no run."""

from __future__ import annotations

import asyncio
import random
from array import array
from typing import Any

import pytest

from libra_hpc.protocol.agents import Fatal
from libra_hpc.protocol.codec import unpack_i32
from libra_hpc.protocol.env import CloseEpisode, HostLost, OpenEpisode, StepEpisode
from libra_hpc.state.state_folders import DataOrder
from tests.rollout.plant import STOP, Broken, Plant, sampling

NAN, INF = float("nan"), float("inf")


def opening(index: int, *samples: int) -> Broken:
    """Samples of a prompt that cannot be opened."""
    return lambda message: (
        "KeyError: 'x'"
        if isinstance(message, OpenEpisode) and message.index == index and message.sample in samples
        else None
    )


def stepping(message: Any) -> str | None:
    """No episode can take a step."""
    return "KeyError: 'x'" if isinstance(message, StepEpisode) else None


async def test_an_environment_that_answers_differently_has_its_trajectory_sampled_again() -> None:
    plant = await sampling(turns=3)
    plant.serve()
    await plant.settle()
    plant.tool = 6
    plant.kill_host()
    await plant.batch()
    assert sorted(plant.finished) == ["0.0.1", "0.1.1", "1.0.1", "1.1.1"]
    assert all(5 not in unpack_i32(sample.tokens)[3:] for sample in plant.samples())
    assert [fields["reason"] for kind, fields in plant.events] == [
        "its environment did not answer as it had when its turns were replayed"
    ] * 4


async def test_a_turn_that_ends_its_host_is_sent_twice_and_no_more() -> None:
    plant = await sampling(turns=3)
    deaths = 0
    for _ in range(200):
        if any(isinstance(message, StepEpisode) and message.episode == "1.1.0" for message in plant.host):
            deaths += 1
            plant.kill_host()
        plant.environment()
        plant.serve(1)
        await asyncio.sleep(0)
        if plant.batches:
            break
    assert deaths == 2
    assert "1.1.1" in plant.finished
    assert plant.sizes() == [2, 2]


async def test_a_step_that_never_ends_is_a_failed_attempt_and_its_episode_is_closed() -> None:
    plant = Plant().start()
    plant.host_up(30.0)
    await plant.run(lambda: plant.inbox)
    plant.serve(1)
    step = plant.take_step()
    plant.watch_after(39.0)
    assert not plant.kinds("trajectory_failed")
    plant.leader.discount(5.0)
    plant.watch_after(5.0)
    assert not plant.kinds("trajectory_failed"), "nobody could have read its answer"
    plant.watch_after(2.0)
    (failed,) = plant.kinds("trajectory_failed")
    assert failed["failure"] == "timeout"
    assert failed["error"] == "The environment has not answered for 41 s (limit 40 s)."
    assert [m.episode for m in plant.host if isinstance(m, CloseEpisode)] == [step.episode]
    plant.end_step(step)
    assert (await plant.batch_within(10)).stats["retried"] == 1.0
    assert plant.sizes() == [2, 2]


async def test_a_host_that_starts_slowly_has_its_episodes_time_counted_from_when_it_is_up() -> None:
    plant = Plant().start()
    plant.host_up(30.0)
    await plant.run(lambda: plant.inbox)
    plant.host.clear()
    plant.leader.on_host(0, HostLost("killed"))
    plant.watch_after(500.0)
    plant.host_up(30.0)
    plant.watch_after(39.0)
    assert not plant.kinds("trajectory_failed")
    plant.watch_after(2.0)
    assert len(plant.kinds("trajectory_failed")) == 4


async def test_a_task_with_too_many_numbers_keeps_the_first_ones_and_hears_it_once() -> None:
    plant = await sampling(turns=1)
    for _ in range(2):
        plant.serve(1)
        plant.end_step(plant.take_step(), reward=1.0, info={f"n{number}": 1.0 for number in range(100)})
    stats = (await plant.batch_within(10)).stats
    assert [name for name in stats if name.startswith("n")] == sorted(f"n{number}" for number in range(64))
    (cut,) = plant.kinds("numbers_cut")
    assert cut["reason"] == "info has 100 names; 64 of at most 100 characters are kept, the first that came"


SAMPLED = [7, 8, STOP], [-1.0, -2.0, -3.0]


@pytest.mark.parametrize(
    ("tokens", "logprobs", "end", "failure", "error"),
    [
        (*SAMPLED, {"reward": NAN}, "reward", "The reward is nan."),
        (*SAMPLED, {"reward": -INF}, "reward", "The reward is -inf."),
        (*SAMPLED, {"reward": 0.0, "info": {"a": INF}}, "reward", "info['a'] is inf."),
        (*SAMPLED, {"reward": 1e300}, "reward", ""),
        ([7, STOP], [-1.0, NAN], None, "logprobs", ""),
        ([7, STOP], [-1.0], None, "logprobs", ""),
        ([STOP], [-INF], None, "logprobs", ""),
        ([], [], {}, "engine", "No token was generated."),
    ],
)
async def test_what_is_not_finite_or_missing_is_a_failed_attempt_and_never_in_a_batch(
    tokens: list[int], logprobs: list[float], end: dict[str, Any] | None, failure: str, error: str
) -> None:
    plant = await sampling(turns=1)
    plant.answer(*plant.inbox[0], tokens, logprobs=logprobs)
    if end is not None:
        plant.end_step(plant.take_step(), **end)
    stats = (await plant.batch_within(10)).stats
    (failed,) = plant.kinds("trajectory_failed")
    assert (failed["failure"], failed["task"], failed["prompt"]) == (failure, "toy", "p0")
    assert not error or failed["error"] == error
    assert (stats["reward"], plant.sizes(), "a" in stats) == (0.5, [2, 2], False)
    assert all(-9.0 < value <= 0.0 for sample in plant.samples() for value in array("f", sample.logprobs))
    assert all(any(sample.loss_mask) for sample in plant.samples())


async def test_a_trajectory_its_task_cannot_run_leaves_its_group_after_three_tries_with_time_between_them() -> None:
    plant = Plant(broken=opening(0, 1)).start()
    began = plant.now
    stats = (await plant.batch_within(20)).stats
    assert plant.sizes() == [1, 2]
    assert [(e["trajectory"], e["given_up"], e["failure"]) for e in plant.kinds("trajectory_failed")] == [
        ("0.1.0", False, "raised"),
        ("0.1.1", False, "raised"),
        ("0.1.2", True, "raised"),
    ]
    assert plant.now - began >= 3.0, "1 s, then 2 s"
    assert (stats["failed"], stats["retried"], stats["trajectories"]) == (1, 2, 3)
    assert plant.leader.report().failures == (("raised", 3, "KeyError: 'x'"),)
    assert not plant.kinds("admission_paused"), "one prompt is no outage"


@pytest.mark.parametrize(("eta", "in_order"), [(0, True), (1, False), (1, True)])
async def test_a_prompt_that_fails_as_a_whole_gives_its_place_to_the_next_and_is_not_sampled_again(
    eta: int, in_order: bool
) -> None:
    plant = Plant(eta=eta, in_order=in_order, broken=opening(3, 0, 1)).start()
    for step in range(1, 5):
        batch = await plant.batch_within(60, step)
        assert len(batch.groups) == 2
        assert all(group.samples for group in batch.groups)
        plant.commit(batch)
    assert sorted(g.index for b in plant.batches for g in b.groups) == [0, 1, 2, 4, 5, 6, 7, 8]
    assert [index for b in plant.batches for index in b.given_up] == [3]
    assert max(b.stats["staleness_max"] for b in plant.batches) <= eta
    assert [e["index"] for e in plant.kinds("prompt_given_up")] == [3]
    order = DataOrder()
    for batch in plant.batches[:2]:
        order.trained([*(g.index for g in batch.groups), *batch.given_up])
    resumed = Plant(eta=eta, in_order=in_order, broken=plant.broken).start(order.low, tuple(order.extra), 2)
    for count in (1, 2):
        resumed.commit(await resumed.batch_within(60, count))
    await resumed.pass_time(5)
    trained = [g.index for b in (*plant.batches[:2], *resumed.batches) for g in b.groups]
    assert len(set(trained)) == len(trained) == 8
    assert (3 in order.extra or order.low > 3) == (not resumed.kinds("trajectory_failed"))


async def test_a_judge_that_is_down_for_15_s_costs_no_trajectory() -> None:
    plant = Plant(eta=1, steps=20, prompts=4, group=4).start()
    await plant.batch_within(60)
    down = plant.now
    plant.broken = lambda m: (
        "ConnectionError" if isinstance(m, StepEpisode) and down <= plant.now < down + 15.0 else None
    )
    for step in range(1, 21):
        plant.commit(await plant.batch_within(120, step))
    assert all(len(group.samples) == 4 for batch in plant.batches for group in batch.groups)
    assert plant.now - down < 60.0
    (paused,), (_,) = plant.kinds("admission_paused"), plant.kinds("admission_resumed")
    assert "the most frequent error (raised" in paused["reason"]
    assert paused["reason"].count("ConnectionError") == 1
    assert plant.leader.report().paused == ""


async def test_an_environment_that_always_raises_ends_the_run_with_its_error_and_trains_nothing() -> None:
    plant = Plant(eta=1, steps=20, prompts=4, group=4, broken=stepping).start()
    began = plant.now
    await plant.pass_time(2000, lambda: plant.of(Fatal))
    (fatal,) = plant.of(Fatal)
    assert fatal.rank == 5
    assert "KeyError: 'x'" in fatal.reason
    assert "max_failed_share = 0.2" in fatal.reason
    assert 600.0 <= plant.now - began < 700.0
    assert plant.batches == []
    assert plant.leader.report().paused
    assert len(plant.kinds("trajectory_failed")) < 60, "a probe a minute, and no flood of events"
    await plant.pass_time(300)
    assert len(plant.of(Fatal)) == 1
    assert not plant.inbox, "nothing is sampled any more"


async def test_without_an_engine_the_patience_of_a_pause_does_not_run_out() -> None:
    plant = Plant(eta=1, steps=20, prompts=4, group=4, broken=stepping).start()
    await plant.pass_time(30, lambda: plant.kinds("admission_paused"))
    for name in ("e0", "e1"):
        plant.down(name)
    await plant.pass_time(2000)
    assert not plant.of(Fatal)
    plant.up("e0", rank=3)
    await plant.pass_time(500)
    assert not plant.of(Fatal)
    await plant.pass_time(300)
    assert plant.of(Fatal)


async def test_two_prompts_that_fail_at_once_end_no_run_whose_other_trajectories_take_long() -> None:
    plant = Plant(
        turns=50, prompts=64, group=4, broken=lambda m: opening(62, *range(4))(m) or opening(63, *range(4))(m)
    )
    plant.start()
    for _ in range(70):
        plant.leader.report()
        await plant.settle()
        plant.serve()
        plant.now += 60.0
        if plant.batches:
            break
    assert not plant.of(Fatal)
    assert len(plant.kinds("admission_paused")) == len(plant.kinds("admission_resumed")) <= 2
    assert len(plant.kinds("prompt_given_up")) == 2


def faults(plant: Plant, pick: random.Random) -> Broken:
    """A share of all steps, one prompt always, and everything for some seconds."""
    share, bad, since, seconds = (
        pick.choice((0.0, 0.05, 0.1)),
        pick.randrange(20),
        plant.now + pick.randrange(30),
        pick.randrange(20),
    )

    def broken(message: Any) -> str | None:
        if isinstance(message, CloseEpisode):
            return None
        fails = int(message.episode.split(".")[0]) == bad or pick.random() < share or 0.0 <= plant.now - since < seconds
        return "Error" if fails else None

    return broken


async def test_whatever_fails_every_step_has_its_groups_and_no_prompt_is_trained_and_given_up() -> None:
    given_up = dropped = 0
    for seed in range(24):
        pick = random.Random(seed)
        eta, in_order, steps, prompts = seed % 3, seed % 2 == 0, 6, pick.choice((1, 2, 4))
        plant = Plant(eta=eta, steps=steps, in_order=in_order, prompts=prompts, group=pick.choice((2, 4)))
        plant.broken = faults(plant, pick)
        plant.start()
        trained: list[int] = []
        for step in range(1, steps + 1):
            batch = await plant.batch_within(590, step)
            assert (batch.step, len(batch.groups)) == (step, prompts)
            assert all(any(any(s.loss_mask) for s in group.samples) for group in batch.groups)
            assert batch.stats["staleness_max"] <= eta
            assert plant.leader._order.gate.outstanding <= (eta + 1) * prompts
            trained += [group.index for group in batch.groups]
            dropped += int(batch.stats["failed"])
            if pick.random() < 0.2:
                plant.down("e0")
                plant.up("e0", rank=3)
            if pick.random() < 0.2:
                plant.kill_host()
            plant.commit(batch)
        gone = [index for batch in plant.batches for index in batch.given_up]
        assert len(set(trained) | set(gone)) == len(trained) + len(gone)
        assert not plant.of(Fatal)
        given_up += len(gone)
        await plant.pass_time(80)
        assert plant.leader._order.gate.outstanding == 0
        assert not plant.leader._environments.episodes, "nothing is sampled for steps that do not come"
    assert given_up > 5
    assert dropped > 0
