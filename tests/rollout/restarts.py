"""A run whose ranks restart many times, from the last step or the one before; trajectories go through their records."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from typing import Any

from libra_hpc.protocol.agents import Batch
from libra_hpc.protocol.layout import ResumePoint
from libra_hpc.rollout.recovery.recovery_log import RecordedStart, drop_reason, gather, records
from libra_hpc.rollout.trajectory import Trajectory
from libra_hpc.state.state_folders import DataOrder
from tests.rollout.plant import Plant

STEPS = 9


async def restarted(
    pick: random.Random, batches: dict[int, Batch], eta: int, notice: float = 0.0, **options: Any
) -> AsyncIterator[tuple[Plant, dict[Trajectory, tuple[bool, bytes]]]]:
    """The plant at the end of each start, and what that start had recovered: whether it was finished, and its tokens.

    ``batches`` gets every trained step. ``notice``: how often a start that ends may write unfinished trajectories.
    """
    starts, found, step = [RecordedStart(0, "same")], list[tuple[int, Trajectory]](), 0
    while step < STEPS:
        order = DataOrder()
        for at in range(1, step + 1):
            order.trained((*(group.index for group in batches[at].groups), *batches[at].given_up))
        position = ResumePoint(step, "", order.low, tuple(order.extra))
        recovered = gather(
            (record, drop_reason(record, start, starts, position=position, eta=eta)) for start, record in found
        )
        before = {one: (one.place == "done", one.tokens) for group in recovered.groups.values() for one in group}
        plant = Plant(eta=eta, steps=STEPS, **options)
        plant.start(order.low, tuple(order.extra), step, recovered.groups)
        begun, last = step, min(STEPS, step + pick.randrange(1, 4))
        while step < last:
            batch = await plant.batch(step - begun + 1, pick)
            assert batch.step == step + 1
            assert batch.stats["staleness_max"] <= eta
            batches[batch.step] = batch
            plant.commit(batch)
            step += 1
            await plant.settle()
            plant.serve(pick.randrange(20), pick)
            await plant.settle()
        yield plant, before
        unfinished = plant.leader.unfinished() if pick.random() < notice else []
        found += [(len(starts) - 1, records.decode(records.encode(one))) for one in (*plant.ended, *unfinished)]
        step = max(begun, step - pick.randrange(2)) if step < STEPS else step
        starts.append(RecordedStart(step, "same"))
