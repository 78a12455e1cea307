"""The training half of a node around simulated trainer processes: real processes, sockets, signals and deaths."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import msgspec
import pytest

from libra_hpc.agent import supervised
from libra_hpc.process.progress import WAITS, Stall
from libra_hpc.protocol.agents import Fatal, SnapshotPart, WeightsOffered, WeightsWanted
from libra_hpc.protocol.engine_state import Doing
from libra_hpc.protocol.layout import ResumePoint
from libra_hpc.protocol.trainer import (
    Join,
    Joined,
    OfferFailed,
    OfferWeights,
    Saved,
    SaveFailed,
    SaveStarted,
    SaveState,
    Standby,
)
from libra_hpc.state import state_folders as folders
from libra_hpc.state.store import states
from libra_hpc.trainer.settings import WorkerConfig, read_config
from libra_hpc.weights.pieces import offer_path, payload_path
from tests.agent.train_scene import Scene
from tests.stage.waiting import until

pytestmark = pytest.mark.slow


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PYTHONPATH", os.getcwd())
    monkeypatch.setattr(supervised, "WATCH_S", 0.05)
    return tmp_path


async def test_a_stopped_process_is_ended_and_the_replica_counts_as_dead(here: Path) -> None:
    async with Scene(here) as scene:
        pid = await scene.ready()
        # The join ends only once a member that never comes has appeared.
        scene.node.on_message(Join(1, 0, 2, str(here / "g1")))
        await asyncio.sleep(4.5)
        assert not scene.events("hung"), "a process that waits reports that every second"
        scene.node._trainer.slow(Stall("t1.0", "join", 7.0, 12.0, WAITS))
        os.kill(pid, signal.SIGSTOP)
        await until(lambda: scene.states("lost"))
        assert not Path(f"/proc/{pid}").exists()
    (hung,) = scene.events("hung")
    assert (hung["rank"], hung["part"]) == (1, "t1")
    reason = hung["reason"]
    assert reason.startswith("t1.0: has reported nothing for 4 s (limit 4 s); its last report: join")
    waits = [(slow["part"], slow["waits"]) for slow in scene.events("slow")]
    assert waits == [("t1", True), ("t1", False)]


async def test_a_replica_that_never_becomes_ready_fails_the_run_in_one_sentence(here: Path) -> None:
    async with Scene(here) as scene:
        await scene.ready()
        scene.node._trainer.starts = supervised.MAX_STARTS
        scene.node._trainer._exited(scene.node._trainer.children[0], 1)
        await until(lambda: scene.of(Fatal))
    assert scene.of(Fatal)[0].reason == (
        "engine t1 ended 3 times before it was ready, the last time because process t1.0 ended with 1; see"
        f" {scene.run.logs(1)}/t1.0.log"
    )


async def test_a_rebuilt_replica_starts_from_the_newest_whole_snapshot_or_checkpoint(here: Path) -> None:
    scene = Scene(here)

    def save(folder: Path, step: int) -> Path:
        partial = folder.with_name(f"{folder.name}{folders.TEMPORARY}")
        partial.mkdir(parents=True)
        (partial / folders.STATE_FILE).write_bytes(msgspec.json.encode(folders.TrainerState(step, step)))
        folders.publish(partial, folder)
        return folder / folders.STATE_FILE

    async def again() -> int:
        before = len(scene.states("lost"))
        os.kill(scene.node.pids["t1.0"], signal.SIGKILL)
        await until(lambda: len(scene.states("lost")) > before)
        await scene.ready()
        return scene.node.step

    async with scene:
        await scene.ready()
        assert scene.node.step == 0
        snapshots = scene.node.keeper.own
        save(scene.run.checkpoint(3), 3)
        save(snapshots / "step-00000004", 4)
        newest = save(snapshots / "step-00000005", 5)
        assert await again() == 5
        newest.write_bytes(newest.read_bytes().replace(b"5", b"6"))
        assert await again() == 4
        (snapshots / "step-00000004" / folders.MANIFEST_FILE).write_text("{")
        assert await again() == 3
        save(snapshots / "step-00000006", 6)
        save(scene.run.checkpoint(7), 7)
        assert await again() == 7, "a checkpoint may be newer than the newest snapshot"


async def test_the_train_leader_hears_that_a_replica_writes_its_state_and_nothing_of_other_phases(here: Path) -> None:
    async with Scene(here, tp=2) as scene:
        await scene.ready()
        for process in range(2):
            for phase in ("train step", "snapshot", "checkpoint", "write of a saved state"):
                scene.node.received(scene.node._trainer, process, Doing({phase: 1.0}))
    assert [list(alive.now) for alive in scene.answers(Doing)] == [["snapshot"], ["checkpoint"]], "once for the replica"


async def test_the_replica_answers_once_also_when_only_the_process_that_writes_fails(here: Path) -> None:
    async with Scene(here, tp=2) as scene:
        await scene.ready()
        scene.node.on_message(Join(1, 0, 1, str(here / "g1")))
        await until(lambda: scene.answers(Joined))
        payload_path(offer_path(scene.shm, 0, "t0")).mkdir()
        scene.node.on_message(OfferWeights("", 0, -1))
        await until(lambda: scene.answers(OfferFailed))
    assert len(scene.answers(OfferFailed)) == 1


def workers(scene: Scene, rank: int) -> list[WorkerConfig]:
    return [read_config(path) for path in sorted(scene.shm.parent.glob(f"t{rank}.*.json"))]


async def test_the_nodes_of_a_core_are_one_world_with_one_meeting_point(here: Path) -> None:
    found: list[WorkerConfig] = []
    for rank in (1, 2):
        folder = here / str(rank)
        folder.mkdir()
        scene = Scene(folder, tp=2, rank=rank, components=("train", "train", "rollout"))
        scene.run.path = here
        async with scene:
            await scene.node.start()
            found.extend(workers(scene, rank))
    assert [(worker.rank, worker.device_index) for worker in found] == [(0, 0), (1, 1), (2, 0), (3, 1)]
    assert {(worker.world.dp, worker.elastic) for worker in found} == {(2, False)}
    (meeting,) = {worker.world_rendezvous for worker in found}
    assert Path(meeting).parent.is_dir(), "on the shared file system"


async def test_processes_that_cannot_start_from_a_snapshot_leave_the_checkpoint_to_the_next_start(here: Path) -> None:
    scene = Scene(here, components=("train", "train", "rollout"))
    name = "step-00000004.attempt-1-7"
    part = scene.node.keeper.own / name
    partial = part.with_name("written")
    partial.mkdir(parents=True)
    (partial / folders.STATE_FILE).write_text("{")
    folders.publish(partial, part)
    scene.node._context.resume_point = ResumePoint(4, "", 8, (), snapshot=name)
    async with scene:
        await scene.node.start()
        await until(lambda: scene.of(Fatal))
    assert scene.of(Fatal)[0].restart
    assert not part.exists()


async def test_a_snapshot_of_all_processes_is_a_part_and_its_copy_goes_to_the_next_node(here: Path) -> None:
    async with Scene(here, tp=2, components=("train", "train", "rollout")) as scene:
        await scene.node.start()
        await until(lambda: scene.states("ready"))
        scene.node.on_message(SaveState("step-00000000.attempt-1-7.1", 0, "snapshot"))
        await until(lambda: scene.answers(Saved))
        scene.node.on_message(SaveState("step-00000003.attempt-1-7.2", 3, "snapshot"))
        await until(lambda: scene.answers(SaveFailed))
    (good,), (bad,) = scene.answers(Saved), scene.answers(SaveFailed)
    assert (good.folder, good.part_of, good.step, good.tier) == ("step-00000000.attempt-1-7.1", 1, 0, "snapshot")
    assert "at step 0" in bad.reason
    ((_, part),) = states(scene.node.keeper.own)
    assert folders.verify(part) == ""
    assert len(list(part.glob("snapshot-*.safetensors"))) == 2
    assert scene.of(SnapshotPart)


async def test_offers_that_were_removed_are_reported_to_the_train_leader(here: Path) -> None:
    async with Scene(here) as scene:
        await scene.ready()
        await scene.node.folder_lost("the folder was removed")
        assert not scene.answers(OfferFailed), "nothing was offered"
        scene.node.on_message(OfferWeights("", 0, -1))
        await until(lambda: scene.answers(WeightsOffered))
        await scene.node.folder_lost("the folder was removed")
    (offered,) = scene.answers(WeightsOffered)
    assert [offer.writer for offer in offered.offers] == ["t0"]
    assert scene.answers(OfferFailed) == [OfferFailed(0, "the folder was removed")]


async def test_a_core_of_several_nodes_restarts_as_a_whole(here: Path) -> None:
    async with Scene(here, components=("train", "train", "rollout")) as scene:
        os.kill(await scene.ready(), signal.SIGKILL)
        await until(lambda: scene.of(Fatal))
    (fatal,) = scene.of(Fatal)
    assert fatal.restart
    assert fatal.reason.startswith("process t1.0 was killed by signal 9; see ")


async def test_a_hybrid_node_joins_from_its_image_and_waits_for_a_version_that_is_on_its_way(here: Path) -> None:
    async with Scene(here, tp=2) as core, Scene(here / "hybrid", tp=2, rank=2) as scene:
        await core.node.start()
        await until(lambda: core.states("ready"))
        await scene.ready()
        worker, _ = workers(scene, 2)
        assert (worker.elastic, worker.start_dir) == (True, "")
        for number in (1, 2, 3):
            for place, node in enumerate((core.node, scene.node)):
                node.on_message(Join(number, place, 2, str(here / f"g{number}"), step=0))
            if number == 2:
                await asyncio.sleep(0.1)
                assert len(scene.answers(Joined)) == 1, "the image has no version yet"
                scene.weights.write(0, scene.node.on_image)
            await until(lambda number=number: len(scene.answers(Joined)) == number)
            assert len(scene.of(WeightsWanted)) == min(number, 2)
            scene.node.standby()
            await scene.node.start()
    received = [(joined.source, joined.received_bytes) for joined in scene.answers(Joined)]
    assert received[0] == ("core", pytest.approx(2 * 8.19e9, rel=0.01)), "half of the weights by each process"
    assert received[1:] == [("image", 0)] * 2


async def test_a_checkpoint_is_answered_once_by_processes_and_carrier_together(here: Path) -> None:
    scene = Scene(here)
    first, second, third = (str(here / name) for name in ("first", "second", "third"))
    async with scene:
        await scene.ready()
        scene.node.on_message(SaveState(first, 0))
        await until(lambda: scene.answers(SaveStarted))
        await asyncio.sleep(0.1)
        assert not scene.answers(Saved), "its image has no version yet"
        scene.weights.write(0, lambda: None)
        await until(lambda: scene.answers(Saved))
        # The processes refuse, and the carrier would wait for that step.
        scene.node.on_message(SaveState(second, 5))
        await until(lambda: scene.answers(SaveFailed))
        scene.weights.write(1, lambda: None)
        scene.node.on_message(SaveState(third, 0))
        await until(lambda: len(scene.answers(SaveStarted)) == 3)
        scene.weights.drop_policy()
        await until(lambda: len(scene.answers(SaveFailed)) == 2)
    (saved,) = scene.answers(Saved)
    assert saved.files.keys() == {"policy/model.safetensors", "trainer.json"}
    folders.publish(Path(first), here / "step-000000", saved.files)
    assert folders.verify(here / "step-000000") == ""
    reasons = [(failed.folder, failed.reason) for failed in scene.answers(SaveFailed)]
    assert reasons == [
        (second, "this replica is at step 0, it cannot save step 5"),
        (third, "it is not needed any more"),
    ]
    assert not (Path(second) / "policy").exists()


async def test_answers_to_an_order_that_was_replaced_complete_no_other(here: Path) -> None:
    """Some processes joined the generation before, the others saw the newer order first."""
    async with Scene(here, tp=2) as scene:
        await scene.ready()
        (trainer,) = scene.node._engines.values()
        for local_rank, generation in ((0, 7), (1, 8), (0, 8)):
            scene.node.received(trainer, local_rank, Joined(generation, 0, 0, 0.0, attempt=generation))
        assert [answer.generation for answer in scene.answers(Joined)] == [8]


async def test_a_core_that_rests_keeps_its_state_and_forms_the_next_generation(here: Path) -> None:
    async with Scene(here) as scene:
        await scene.ready()
        for number in (1, 2):
            scene.node.on_message(Join(number, 0, 1, str(here / f"g{number}")))
            await until(lambda number=number: len(scene.answers(Joined)) == number)
            scene.node.on_message(Standby())
            await asyncio.sleep(0)
            assert len(scene.states("standby")) == number
            await scene.node.start()
            await asyncio.sleep(0)
            assert len(scene.states("ready")) == 1 + number
    assert [(joined.source, joined.received_bytes) for joined in scene.answers(Joined)] == [("own", 0)] * 2


async def test_trainers_that_the_kernel_kills_for_memory_twice_fail_the_run_in_one_sentence(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Scene(here) as scene:
        monkeypatch.setattr(scene.node.memory, "cause", lambda pid: f"out of memory: {pid}")
        for fatal in ([], [False]):
            pid = await scene.ready()
            os.kill(pid, signal.SIGKILL)
            await until(lambda: scene.node._trainer.state == "lost")
            assert [one.restart for one in scene.of(Fatal)] == fatal
    helps = f"out of memory: {pid}; more of components.train.mem or a smaller train.micro_tokens helps"
    assert scene.of(Fatal)[0].reason == f"engine t1 ended a second time: process t1.0 was killed by signal 9: {helps}"
