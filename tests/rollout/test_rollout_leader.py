"""The rollout leader with scripted engines and environment: every prompt is trained once, in time."""

from __future__ import annotations

import asyncio
import random

import pytest

from libra_hpc.protocol.agents import Turns
from libra_hpc.protocol.codec import unpack_i32
from libra_hpc.protocol.engine import Generate
from libra_hpc.protocol.env import EpisodeFailed, HostLost, OpenEpisode, StepEpisode, TruncateEpisode
from tests.rollout.emptiest import Emptiest
from tests.rollout.plant import Plant, engine_stats, sampling


async def test_a_line_has_what_turns_and_their_tools_were() -> None:
    plant = Plant().start()
    await plant.batch()
    line = plant.lines[0]
    assert line.prompt_tokens == 3
    assert [(t.new_tokens, t.gen_tokens, t.tool, t.outcome) for t in line.turns] == [
        (0, 3, "tool", "ok"),
        (1, 3, "tool", "ok"),
    ]
    assert [(t.exit_code, t.passed, t.failed) for t in line.turns] == [(1, 3, None), (1, None, None)]
    assert line.started_at <= line.finished_at


@pytest.mark.parametrize("seed", range(8))
async def test_asynchronous_staleness_never_exceeds_eta_under_random_order(seed: int) -> None:
    pick = random.Random(seed)
    eta, in_order = seed % 3, seed >= 4
    plant = Plant(eta=eta, steps=8, in_order=in_order).start()
    trained: list[int] = []
    for step in range(1, 9):
        batch = await plant.batch(step, pick)
        assert batch.stats["staleness_max"] <= eta
        assert len(plant.leader._order.groups) <= (eta + 1) * 2
        trained += [group.index for group in batch.groups]
        plant.commit(batch)
    assert sorted(trained) == list(range(16))
    assert not in_order or [sorted(trained[i : i + 2]) for i in range(0, 16, 2)] == [
        [i, i + 1] for i in range(0, 16, 2)
    ]


async def test_every_turn_names_the_weights_at_the_admission_of_its_group() -> None:
    plant = Plant(eta=1, steps=3).start()
    seen: dict[int, set[int]] = {}
    for step in (1, 2, 3):
        before = len(plant.sent)
        plant.commit(await plant.batch(step))
        for message in plant.sent[before:]:
            if isinstance(message, Turns):
                for _, request in message.items:
                    if isinstance(request, Generate):
                        seen.setdefault(int(request.rid.partition(".")[0]), set()).add(request.admitted)
    # Two prompts a step; with eta = 1 those of two steps are admitted at version 0.
    assert seen == {index: {max(0, index // 2 - 1)} for index in range(6)}


async def test_every_turn_sent_is_a_decision_with_reason_and_numbers() -> None:
    plant = await sampling(engines=1)
    assert plant.inbox[0][1].priority == 3
    await plant.batch()
    turns = [(d["trajectory"], d["turn"]) for d in plant.decisions]
    assert turns[:4] == [("0.0.0", 0), ("0.1.0", 0), ("1.0.0", 0), ("1.1.0", 0)]
    second = plant.decisions[1]
    assert (second["engine"], second["level"], second["priority"], second["from"]) == ("e0", 0, 3, "")
    assert (second["reason"], second["numbers"]) == ("3 tokens at e0", {"tokens": 3, "engine": "e0"})
    assert sorted(turns) == [(f"{i}.{s}.0", t) for i in (0, 1) for s in (0, 1) for t in (0, 1)]
    assert all(d["from"] == "e0" and d["context_tokens"] == 7 for d in plant.decisions if d["turn"] == 1)


async def test_the_board_counts_what_is_in_flight_and_only_that() -> None:
    plant = Plant(eta=1, engines=0).start()
    plant.up("low", rank=3, tp=1)
    plant.up("high", rank=4, tp=2)
    await plant.run(lambda: len(plant.inbox) == 8)
    assert plant.leader.report().buckets == ((1, 1, 4, 4, 0.0), (2, 1, 4, 4, 0.0))
    plant.leader.on_engine_load("high", engine_stats(generated=0, prefilled=0, steps=1))
    plant.leader.on_host(0, HostLost("killed"))
    assert plant.leader.report().buckets == ((1, 1, 4, 4, 0.0), (2, 1, 4, 4, 0.25)), (
        "turns go on while environments are replayed"
    )
    plant.serve()
    plant.host_up()
    await plant.run(lambda: len(plant.inbox) == 8)
    plant.down("high")
    report = plant.leader.report()
    assert (report.buckets, report.waiting_turns, report.inflight) == (((1, 1, 4, 4, 0.0),), 4, 4)
    await plant.batch(2)
    assert plant.leader.report().buckets == ((1, 1, 0, 0, 0.0),)


async def test_a_policy_learns_from_every_end_and_forgets_what_is_given_up() -> None:
    policy = Emptiest()
    plant = await sampling(4, policy=policy)
    for attempt in range(3):
        plant.leader.on_host(0, EpisodeFailed(f"0.0.{attempt}", "KeyError"))
        plant.now += 20.0
        plant.leader.report()
        await plant.settle()
    await plant.batch()
    assert policy.given_up == [f"0.0.{attempt}" for attempt in range(3)]
    assert sorted(record.trajectory for record in policy.learned) == ["0.1.0", "1.0.0", "1.1.0"]
    learned = next(record for record in policy.learned if record.trajectory == "1.1.0")
    assert (learned.generated_tokens, learned.turns, learned.at_signal, learned.context_tokens) == (6, 2, (3, 6), 10)


async def test_the_task_gives_reward_and_numbers_of_a_truncated_trajectory() -> None:
    plant = Plant(turns=50, max_model_len=20).start()
    plant.truncated_reward, plant.truncated_info = 0.5, {"solved": 0.25}
    stats = (await plant.batch()).stats
    assert all(len(unpack_i32(sample.tokens)) <= 20 for sample in plant.samples())
    assert [line.clipped for line in plant.lines] == [1] * 4
    assert (stats["truncated"], stats["reward"], stats["solved"]) == (1.0, 0.5, 0.25)
    assert [line.info for line in plant.lines] == [{"solved": 0.25, "truncated": 1.0}] * 4
    assert len(plant.lines[0].turns) == len(plant.ended[0].signals) + 1, "the end of the context is no tool call"


async def test_a_truncated_trajectory_whose_host_dies_is_replayed_and_asked_again() -> None:
    plant = Plant(turns=50, max_model_len=20).start()
    plant.truncated_reward = 0.5
    await plant.run(lambda: any(isinstance(message, TruncateEpisode) for message in plant.host))
    plant.kill_host()
    assert (await plant.batch()).stats["reward"] == 0.5
    assert {trajectory.attempt for trajectory in plant.ended} == {0}, "none is sampled again"
    assert not plant.kinds("resubmitted")


async def test_an_episode_learns_the_room_behind_its_turn_and_the_versions_of_its_tokens() -> None:
    plant = await sampling(turns=3)
    plant.serve(1)
    step = plant.take_step()
    assert (step.room, step.versions) == (1000 - 3 - 3, ((0, 3),))


async def test_no_context_ever_exceeds_the_longest_one_whatever_the_environment_answers() -> None:
    clipped = 0
    for seed in range(20):
        pick = random.Random(seed)
        longest = pick.randrange(5, 60)
        plant = Plant(steps=2, max_model_len=longest).start()
        for _ in range(120):
            pending, plant.host = plant.host, []
            for message in pending:
                if isinstance(message, OpenEpisode):
                    lengths = (1, 2, longest - 1, longest, longest + 9) if message.sample else (1, 2)
                    plant.open_episode(message, [1] * pick.choice(lengths), pick.randrange(1, 9))
                elif isinstance(message, StepEpisode):
                    answer = [5] * pick.choice((0, 1, 3, longest, 1000))
                    fresh = bool(answer) and pick.random() < 0.3
                    plant.end_step(message, answer, done=pick.random() < 0.2, new_sample=fresh)
                elif isinstance(message, TruncateEpisode):
                    plant.end_step(message)
            await asyncio.sleep(0)
            for engine, request in tuple(plant.inbox):
                assert 0 < request.max_tokens <= longest - len(unpack_i32(request.prompt))
                tokens = pick.randrange(1, request.max_tokens + 1)
                plant.answer(engine, request, [7] * tokens, pick.choice(("stop", "length", "abort")))
            plant.now += 1.0
            plant.leader.report()
            every = (*plant.leader._environments.episodes.values(), *plant.ended)
            assert all(t.context <= longest for t in every)
        assert plant.batches
        clipped += sum(line.clipped > 0 for line in plant.lines)
        assert {e["failure"] for e in plant.kinds("trajectory_failed")} <= {"answer"}
        assert all("rollout.max_model_len = " in e["error"] for e in plant.kinds("trajectory_failed"))
    assert clipped > 10
