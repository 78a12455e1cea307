"""A node's carrier as its agent's child: what follows from its reports, and one answer to who wants a policy."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from libra_hpc.agent.node_carrier import NodeCarrier
from libra_hpc.config.load import validate
from libra_hpc.facts.rundir import RunDir
from libra_hpc.mesh.agent_context import AgentContext
from libra_hpc.mesh.rank_layout import RankLayout
from libra_hpc.protocol.agents import FromReplica, Log, WeightsHere
from libra_hpc.protocol.carriers import Peer, PieceRefused, PolicySaved, Publish, SavePolicy
from libra_hpc.protocol.layout import ResumePoint
from libra_hpc.protocol.trainer import OfferFailed
from libra_hpc.simulated.state import offer
from libra_hpc.weights.pieces import WHOLE
from tests.weights.nodes import node_folders


class Scene:
    def __init__(self, folder: Path, shm: Path) -> None:
        config = validate(
            {
                "run": {"engine": "simulated"},
                "simulated": {"model": "qwen3-8b", "device": "a800", "presets": ["math"]},
                "components": {"train": {"gpus": 8}, "rollout": {"gpus": 8}},
            }
        )
        self.sent: list[Any] = []
        self.answers: list[PolicySaved] = []
        (folder / "run").mkdir(exist_ok=True)
        context = AgentContext(
            1,
            RankLayout(("planner", "train", "rollout")),
            config,
            RunDir(folder / "run"),
            1,
            lambda rank, message: self.sent.append(message),
            ResumePoint(0, "", 0, ()),
            folder,
            shm,
            secret=b"secret",
        )
        self.shm, self.limit_s = shm, config.deadlines.storage_s
        self.carrier = NodeCarrier(context, lambda: None)

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(60.0):
            while not condition():
                await asyncio.sleep(0.01)

    async def serving(self, count: int) -> Peer:
        """That of the carrier's start number ``count``."""
        started: list[WeightsHere] = []

        def found() -> bool:
            started[:] = [message for message in self.sent if isinstance(message, WeightsHere) and message.carrier]
            return len(started) == count

        await self.until(found)
        peer = started[-1].carrier
        assert peer is not None
        return peer

    def publish(self, version: int, peer: Peer) -> None:
        offer(self.shm, version, WHOLE, 0)
        self.carrier.publish(Publish(version, WHOLE, (("t0", 1),), (peer,)))

    def play(self, script: Callable[[], Any]) -> None:
        async def main() -> None:
            await self.carrier.start()
            try:
                await script()
            finally:
                await self.carrier.stop()

        asyncio.run(main())


def test_a_carrier_that_starts_again_writes_the_policy_that_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.getcwd())
    policy = tmp_path / "step-000001" / "policy" / "model.safetensors"
    with node_folders() as shm:
        scene = Scene(tmp_path, shm)

        async def script() -> None:
            peer = await scene.serving(1)
            scene.publish(0, peer)
            await scene.until(lambda: scene.carrier.version == 0)
            scene.carrier.save_policy(SavePolicy(1, str(policy)), scene.answers.append)
            os.kill(next(iter(scene.carrier.pids.values())), signal.SIGKILL)
            peer = await scene.serving(2)
            assert not scene.answers
            for version in (1, 2):
                scene.publish(version, peer)
            await scene.until(lambda: scene.carrier.version == 2)
            await scene.until(lambda: scene.answers)
            assert policy.read_bytes() != scene.carrier.image.read_bytes()

        scene.play(script)
    (answer,) = scene.answers
    assert (answer.path, answer.size, answer.reason) == (str(policy), policy.stat().st_size, "")


def test_a_policy_that_does_not_come_is_answered_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.getcwd())
    with node_folders() as shm:
        scene = Scene(tmp_path, shm)

        async def script() -> None:
            carrier = scene.carrier
            carrier.save_policy(SavePolicy(3, "before"), scene.answers.append)
            carrier.drop_policy()
            assert [answer.path for answer in scene.answers] == ["before"], "no carrier has it"
            await scene.serving(1)
            carrier.save_policy(SavePolicy(3, "dropped"), scene.answers.append)
            carrier.drop_policy()
            await scene.until(lambda: len(scene.answers) == 2)
            carrier.save_policy(SavePolicy(3, "late"), scene.answers.append)
            await carrier.check(time.monotonic() + scene.limit_s - 1.0)
            assert len(scene.answers) == 2
            for _ in range(2):
                await carrier.check(time.monotonic() + scene.limit_s + 1.0)

        scene.play(script)
    assert [answer.path for answer in scene.answers] == ["before", "dropped", "late"]
    assert all(answer.reason for answer in scene.answers)
    assert scene.answers[-1].reason.startswith("late: write of a saved state has not ended after 90")


def carrier_alone(folder: Path, sent: list[Any]) -> NodeCarrier:
    """A carrier without a process, whose agent's messages are ``sent``."""
    layout, point = RankLayout(("planner", "train")), ResumePoint(0, "", 0, ())
    context = AgentContext(
        1, layout, validate({}), RunDir(folder), 1, lambda rank, message: sent.append(message), point, folder, folder
    )
    return NodeCarrier(context, lambda: None)


def test_an_own_offer_that_is_not_whole_is_told_to_the_train_leader_once_for_each_publication(tmp_path: Path) -> None:
    sent: list[Any] = []
    carrier = carrier_alone(tmp_path, sent)

    def refused(own: bool) -> None:
        carrier.received(cast(Any, None), 0, PieceRefused(3, "t0", "torn", own))

    refused(own=False)
    assert [message.kind for message in sent] == ["weights_corrupt"], "it comes again from its writer"
    for _ in range(3):
        refused(own=True)
    assert [message for message in sent if not isinstance(message, Log)] == [FromReplica(1, OfferFailed(3, "torn"))]
    carrier.publish(Publish(3, -1, (("t0", 1),), ()))
    refused(own=True)
    assert sum(isinstance(message, FromReplica) for message in sent) == 2
