"""A restart of the rollout leader goes on with the trajectories that are there and samples only the rest."""

from __future__ import annotations

import random
from collections import Counter

from libra_hpc.protocol.agents import Batch
from libra_hpc.protocol.codec import unpack_i32
from libra_hpc.rollout.trajectory import Trajectory
from tests.rollout.plant import Plant
from tests.rollout.restarts import STEPS, restarted


async def test_a_new_start_goes_on_with_what_is_there_and_samples_only_the_rest() -> None:
    """All ranks restart many times, from the last step or the one before.

    Recovered trajectories go through their records, as in the recovery log.
    """
    total = Counter[str]()
    for seed in range(12):
        pick, batches, fresh = random.Random(seed), dict[int, Batch](), seed // 4
        options = {"in_order": seed % 2 == 1, "turns": 3 if fresh else 2, "fresh": fresh}
        async for plant, recovered in restarted(pick, batches, seed % 3, notice=0.7, **options):
            groups: dict[int, dict[str, bytes]] = {}
            for sample in (sample for batch in plant.batches for group in batch.groups for sample in group.samples):
                whole = groups.setdefault(int(sample.uid.split(".")[0]), {})
                whole[sample.trajectory] = whole.get(sample.trajectory, b"") + sample.tokens
            for member, (finished, tokens) in recovered.items():
                total["recovered" if finished else "gone on with"] += finished or member.index in groups
                assert not (finished and member.episode in plant.steps_of), "it is not sampled again"
                if member.index in groups:
                    known = groups[member.index][member.uid]
                    assert known == tokens if finished else known.startswith(tokens)
            assert not plant.kinds("experience_refused")
            assert len({(line.index, line.sample) for line in plant.lines}) == len(plant.lines)
        assert {batch.stats["trajectories"] for batch in batches.values()} == {4}
        assert sorted(group.index for batch in batches.values() for group in batch.groups) == list(range(2 * STEPS))
    assert total["recovered"] > 100
    assert total["gone on with"] > 20


async def test_a_batch_recovered_whole_needs_no_turn_and_waits_for_the_engines() -> None:
    first = Plant(eta=1).start()
    await first.run(lambda: len(first.ended) == 8)
    recovered: dict[int, list[Trajectory]] = {}
    for trajectory in first.ended:
        recovered.setdefault(trajectory.index, []).append(trajectory)
    plant = Plant(eta=1, engines=0).start(recovered=recovered)
    await plant.settle()
    assert not plant.batches, "the trainers may not be there yet"
    plant.up("e0", rank=3)
    await plant.settle()
    assert [batch.step for batch in plant.batches] == [1, 2]
    assert [[g.index for g in batch.groups] for batch in plant.batches] == [[0, 1], [2, 3]]
    assert not plant.inbox
    assert plant.lines == [], "an earlier start has written them"
    plant.commit(plant.batches[0])
    await plant.run(lambda: plant.inbox)
    assert {unpack_i32(request.prompt)[2] for _, request in plant.inbox} == {4, 5}


async def test_what_comes_too_late_for_the_bound_is_sampled_again() -> None:
    first = Plant().start()
    await first.run(lambda: len(first.ended) == 4)
    plant = Plant().start(step=1, recovered={0: first.ended[:2]})
    assert (await plant.batch()).stats["staleness_max"] == 0.0
    assert plant.events == [("experience_refused", {"index": 0, "trajectories": 2})]
