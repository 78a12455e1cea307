"""A step waits for the experts of what its node trains, and no longer than for a leader that is gone."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from libra_hpc.agent import expert_pull
from libra_hpc.agent.expert_pull import ExpertPull
from libra_hpc.protocol.agents import ExpertsWanted, SampleExperts
from libra_hpc.protocol.trainer import Sample, TrainPortion, TrainStep
from libra_hpc.trainer.shards import spread
from tests.stage.node_parts import Outbox
from tests.trainer.batches import samples
from tests.trainer.settings import algorithm, worker_config

SAMPLES = tuple(replace(one, routed=b"\1" * len(one.loss_mask)) for one in samples(1, 8))
LEADER = 2


class Scene(Outbox):
    """The second node of a core of two, each with two data-parallel ranks of two context ranks."""

    def __init__(self, folder: Path, floor_s: float = 60.0) -> None:
        super().__init__()
        config = algorithm().changed(deadlines={"floor_s": floor_s})
        self.forwarded: list[Any] = []
        self.pull = ExpertPull(self.context_of(folder, 1, config=config), self.forwarded.append)
        self.pull.of([worker_config(rank=rank, cp=2, dp=4) for rank in range(4, 8)])

    def wanted(self) -> tuple[str, ...]:
        rank, message = self.sent[-1]
        assert (rank, type(message), message.rank) == (LEADER, ExpertsWanted, 1)
        return message.samples

    def answer(self, uids: tuple[str, ...]) -> None:
        for uid in uids:
            self.pull.on_experts(SampleExperts(uid, uid.encode()))


def own(given: tuple[Sample, ...]) -> set[str]:
    return {sample.uid for rank in (2, 3) for sample in spread(given, 4)[rank]}


async def test_a_portion_and_its_step_go_on_in_order_with_what_their_node_trains(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    scene.pull.hold(TrainPortion(1, 0, 0, SAMPLES[:4]))
    first = scene.wanted()
    assert {*first} == own(SAMPLES[:4])
    scene.pull.hold(TrainStep(1, 0, (SAMPLES[4:],), (7,), 1))
    assert scene.wanted() == first
    scene.answer(first)
    assert {*scene.wanted()} == own(SAMPLES[4:])
    scene.answer(scene.wanted())
    portion, step = scene.forwarded
    for given, got in ((SAMPLES[:4], portion.samples), (SAMPLES[4:], step.minibatches[0])):
        assert [one.experts for one in got] == [one.uid.encode() if one.uid in own(given) else b"" for one in given]
    assert (step.divisors, step.portions) == ((7,), 1)


async def test_nothing_is_asked_for_without_experts_and_a_new_generation_drops_what_waits(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    plain = TrainStep(1, 0, (tuple(samples(1, 8)),), (7,))
    scene.pull.hold(plain)
    assert scene.forwarded == [plain]
    scene.pull.hold(TrainStep(1, 0, (SAMPLES,), (7,)))
    scene.pull.drop()
    scene.answer(scene.wanted())
    assert len(scene.forwarded) == 1


@pytest.mark.parametrize("most", [expert_pull.MOST_BYTES, 3])
async def test_a_step_goes_on_without_experts_that_do_not_come_or_do_not_fit(
    tmp_path: Path, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expert_pull, "MOST_BYTES", most)
    scene = Scene(tmp_path, floor_s=0.05)
    scene.pull.hold(TrainStep(1, 0, (SAMPLES,), (7,)))
    one, *others = scene.wanted()
    scene.answer((one,) if most > 3 else (one, *others))
    if most > 3:
        assert not scene.forwarded
        await asyncio.sleep(0.2)
    (step,) = scene.forwarded
    assert [sample.experts for sample in step.minibatches[0] if sample.experts] == [one.encode()]
