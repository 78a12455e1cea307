"""A node's carrier as its agent's child: what follows from its reports, and one answer to who wants a policy."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any, cast

import pytest

from libra_hpc.agent.node_carrier import NodeCarrier
from libra_hpc.config.load import validate
from libra_hpc.facts.rundir import RunDir
from libra_hpc.protocol.agents import FromReplica, WeightsHere
from libra_hpc.protocol.carriers import Peer, PieceRefused, PolicySaved, Publish, SavePolicy
from libra_hpc.protocol.trainer import OfferFailed
from libra_hpc.simulated.state import offer
from libra_hpc.weights.pieces import WHOLE
from tests.stage.node_parts import Outbox
from tests.stage.waiting import until
from tests.weights.nodes import node_folders


class Scene(Outbox):
    def __init__(self, folder: Path, shm: Path) -> None:
        config = validate(
            {
                "run": {"engine": "simulated"},
                "planner": {"model": "qwen3-8b", "device": "a800"},
                "simulated": {"presets": ["math"]},
                "components": {"train": {"gpus": 8}, "rollout": {"gpus": 8}},
            }
        )
        super().__init__()
        self.answers: list[PolicySaved] = []
        (folder / "run").mkdir(exist_ok=True)
        places = {"run": RunDir(folder / "run"), "shared_memory": shm}
        context = self.context_of(folder, 1, config=config, secret=b"secret", **places)
        self.shm, self.limit_s = shm, config.deadlines.storage_s
        self.carrier = NodeCarrier(context, lambda: None)

    async def serving(self, count: int) -> Peer:
        """That of the carrier's start number ``count``."""

        def started() -> list[Peer]:
            return [here.carrier for here in self.of(WeightsHere) if here.carrier]

        await until(lambda: len(started()) == count)
        return started()[-1]

    def publish(self, version: int, peer: Peer) -> None:
        offer(self.shm, version, WHOLE, 0)
        self.carrier.publish(Publish(version, WHOLE, (("t0", 1),), (peer,)))

    async def __aenter__(self) -> Scene:
        await self.carrier.start()
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self.carrier.stop()


async def test_a_carrier_that_starts_again_writes_the_policy_that_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.getcwd())
    policy = tmp_path / "step-000001" / "policy" / "model.safetensors"
    with node_folders() as shm:
        async with Scene(tmp_path, shm) as scene:
            peer = await scene.serving(1)
            scene.publish(0, peer)
            await until(lambda: scene.carrier.version == 0)
            scene.carrier.save_policy(SavePolicy(1, str(policy)), scene.answers.append)
            os.kill(next(iter(scene.carrier.pids.values())), signal.SIGKILL)
            peer = await scene.serving(2)
            assert not scene.answers
            for version in (1, 2):
                scene.publish(version, peer)
            await until(lambda: scene.carrier.version == 2)
            await until(lambda: scene.answers)
            assert policy.read_bytes() != scene.carrier.image.read_bytes()
    (answer,) = scene.answers
    assert (answer.path, answer.size, answer.reason) == (str(policy), policy.stat().st_size, "")


async def test_a_policy_that_does_not_come_is_answered_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.getcwd())
    with node_folders() as shm:
        async with Scene(tmp_path, shm) as scene:
            carrier = scene.carrier
            carrier.save_policy(SavePolicy(3, "before"), scene.answers.append)
            carrier.drop_policy()
            assert [answer.path for answer in scene.answers] == ["before"], "no carrier has it"
            await scene.serving(1)
            carrier.save_policy(SavePolicy(3, "dropped"), scene.answers.append)
            carrier.drop_policy()
            await until(lambda: len(scene.answers) == 2)
            carrier.save_policy(SavePolicy(3, "late"), scene.answers.append)
            await carrier.check(time.monotonic() + scene.limit_s - 1.0)
            assert len(scene.answers) == 2
            for _ in range(2):
                await carrier.check(time.monotonic() + scene.limit_s + 1.0)
    assert [answer.path for answer in scene.answers] == ["before", "dropped", "late"]
    assert all(answer.reason for answer in scene.answers)
    assert scene.answers[-1].reason.startswith("late: write of a saved state has not ended after 90")


def test_an_own_offer_that_is_not_whole_is_told_to_the_train_leader_once_for_each_publication(tmp_path: Path) -> None:
    box = Outbox()
    carrier = NodeCarrier(box.context_of(tmp_path, 1), lambda: None)

    def refused(own: bool) -> None:
        carrier.received(cast(Any, None), 0, PieceRefused(3, "t0", "torn", own))

    refused(own=False)
    assert len(box.sent) == len(box.events("weights_corrupt")) == 1, "it comes again from its writer"
    for _ in range(3):
        refused(own=True)
    assert box.of(FromReplica) == [FromReplica(1, OfferFailed(3, "torn"))]
    carrier.publish(Publish(3, -1, (("t0", 1),), ()))
    refused(own=True)
    assert len(box.of(FromReplica)) == 2
