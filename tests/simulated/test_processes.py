"""Simulated processes over their real sockets: ready, work, leave with the agent."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest

from libra_hpc.config.run import RunConfig
from libra_hpc.config.work import WorkSection
from libra_hpc.engine.settings import EngineConfig
from libra_hpc.models.devices import device
from libra_hpc.models.memory import TrainLayout
from libra_hpc.models.shapes import model_shape
from libra_hpc.models.train_seconds import TrainCost, work_of
from libra_hpc.protocol import engine as rollout
from libra_hpc.protocol import env
from libra_hpc.protocol import trainer as train
from libra_hpc.protocol.codec import pack_f32, pack_i32, unpack_i32
from libra_hpc.protocol.engine_state import EngineReady, EngineStats
from libra_hpc.protocol.trace import TrajectoryRecord, TurnRecord
from libra_hpc.simulated import tokens
from libra_hpc.simulated.state import ELEMENTS, image_shapes, offer, weights
from libra_hpc.state import state_folders as folders
from libra_hpc.traces.read import write_trace
from libra_hpc.trainer.settings import write_config
from libra_hpc.weights.delta import piece_values
from libra_hpc.weights.image import Image
from libra_hpc.weights.pieces import offer_path, payload_path, read_offer
from tests.trainer.settings import worker_config

from .link import Link, dry_run

pytestmark = pytest.mark.slow


def engine_link(folder: Path, run: RunConfig, tp: int = 1, version: int = 0, **keys: object) -> Link:
    folder.mkdir(exist_ok=True)
    config = EngineConfig(run=run.changed(rollout=keys), tp=tp, version=version)
    (folder / "engine.json").write_bytes(msgspec.json.encode(config))
    ends = {"inbound": rollout.from_engine, "outbound": rollout.to_engine}
    return Link(folder, "libra_hpc.simulated.engine_process", "--config", "engine.json", **ends)


def trainer_link(folder: Path, run: RunConfig, **fields: object) -> Link:
    folder.mkdir(exist_ok=True)
    write_config(worker_config(run, **fields), folder / "worker.json")
    ends = {"inbound": train.from_worker, "outbound": train.to_worker}
    return Link(folder, "libra_hpc.simulated.trainer_process", "--config", "worker.json", **ends)


def host_link(folder: Path, trace: str = "", **simulated: object) -> Link:
    config = dry_run(**simulated).changed(task={"work": WorkSection(trace=trace)})
    (folder / "host.json").write_bytes(msgspec.json.encode(config))
    ends = {"inbound": env.from_host, "outbound": env.to_host}
    return Link(folder, "libra_hpc.simulated.host_process", "--config", "host.json", **ends)


@pytest.mark.parametrize("name", ["engine_process", "trainer_process"])
def test_a_simulated_process_imports_nothing_slow(name: str) -> None:
    slow = "{'torch', 'transformers', 'asyncio'}"
    code = f"import sys, libra_hpc.simulated.{name}; print(sorted({slow} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_an_engine_serves_turns_and_ends_on_shutdown(tmp_path: Path) -> None:
    with engine_link(tmp_path, dry_run(speedup=100.0), tp=2, version=3, max_model_len=8192) as link:
        ready = link.until(EngineReady)
        assert (ready.version, ready.capacity.tp, ready.capacity.max_model_len) == (3, 2, 8192)
        assert ready.capacity.kv_tokens > 100_000
        for number in range(5):
            link.send(rollout.Generate(f"r{number}", pack_i32(tokens.prompt(0, number, 4000, 50 + number)), 4000))
        found = {done.rid: done for done in (link.until(rollout.Generated) for _ in range(5))}
        lengths = {rid: len(done.tokens) // 4 for rid, done in found.items()}
        assert lengths == {f"r{number}": 50 + number for number in range(5)}
        # 49 decode steps and a prefill on operator tables.
        assert found["r0"].run_s * 100.0 == pytest.approx(0.019 * 50 + 0.6, rel=0.5)
        assert link.until(EngineStats).generated_tokens == sum(range(50, 55))
        assert link.close() == 0


def test_caches_in_fp8_hold_twice_the_tokens_in_a_dry_run_too(tmp_path: Path) -> None:
    found = []
    for kv_dtype in ("auto", "fp8"):
        with engine_link(tmp_path / kv_dtype, dry_run(), tp=2, kv_dtype=kv_dtype) as link:
            found.append(link.until(EngineReady).capacity.kv_tokens)
    assert found[1] == pytest.approx(2 * found[0], abs=2)


def test_an_engine_ends_with_its_agent_and_names_an_unknown_device(tmp_path: Path) -> None:
    with engine_link(tmp_path / "a", dry_run(start_s=1e9)) as link:
        assert link.close() == 0, "also while it starts"
    with engine_link(tmp_path / "b", dry_run().changed(planner={"device": "a801"})) as link:
        assert link.process.wait(60) == 2
        assert link.process.stderr is not None
        assert "did you mean 'a800'" in link.process.stderr.read()


def sample(uid: str, count: int) -> train.Sample:
    return train.Sample(uid, pack_i32([0] * count), bytes([0, 1] * (count // 2)), pack_f32([0.0] * count), 1.0)


def step(number: int, generation: int, count: int = 1000) -> train.TrainStep:
    return train.TrainStep(number, generation, ((sample("0.0", count),),), (count // 2,))


def test_replicas_meet_train_and_carry_state_over(tmp_path: Path) -> None:
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    modelled = dry_run(speedup=5.0)
    with trainer_link(tmp_path / "a", modelled, tp=4, pp=2) as first:
        assert first.until(EngineReady).version == 0
        first.send(train.Join(1, 0, 1, str(tmp_path / "g1")))
        assert first.until(train.Joined).received_bytes == 0
        first.send(step(1, 1), step(2, 1))
        done = [first.until(train.StepDone) for _ in range(2)]
        first.send(train.SaveState(str(snapshot), 2, "snapshot"))
        assert first.until(train.Saved).tier == "snapshot"
        replies = [
            (reply.step, reply.numbers["trained_tokens"], reply.numbers["loss_tokens"], reply.numbers["reduce_s"])
            for reply in done
        ]
        assert replies == [(1, 1000, 500, 0.0), (2, 1000, 500, 0.0)]
        layout = TrainLayout(tp=4, pp=2, cp=1, ep=1, dp=1, micro_tokens=modelled.train.micro_tokens)
        shape = msgspec.structs.replace(model_shape("qwen3-14b"), dtype_bytes=4)
        step_s = TrainCost(shape, device("a800"), 8, work_of([(1000, 500)])).time(layout).total
        assert done[0].numbers["train_s"] == pytest.approx(step_s / 5.0), "at five times the speed"
        with trainer_link(tmp_path / "b", modelled, tp=4, pp=2, elastic=True) as second:
            assert second.until(EngineReady).version == -1
            for rank, link in enumerate((first, second)):
                link.send(train.Join(2, rank, 2, str(tmp_path / "g2")))
            joined = [link.until(train.Joined) for link in (first, second)]
            assert [reply.step for reply in joined] == [2, 2]
            assert joined[0].received_bytes == 0
            # 4 bytes per weight, an eighth of them for each process.
            assert joined[1].received_bytes == pytest.approx(4 * 14.77e9 / 8, rel=0.02)
            for link in (first, second):
                link.send(step(3, 2))
            assert (
                first.until(train.StepDone).numbers["reduce_s"]
                == second.until(train.StepDone).numbers["reduce_s"]
                > 0.0
            )
            second.send(step(3, 2))
            assert "at step 3" in second.until(train.StepFailed).error
            second.send(train.Standby())
            local = train.Join(3, 1, 2, str(tmp_path / "again"), weights="w", version=3)
            first.send(train.Join(3, 0, 2, str(tmp_path / "again")))
            second.send(local)
            (_, joined) = [link.until(train.Joined) for link in (first, second)]
            assert (joined.step, joined.received_bytes) == (3, 0), "its node has the weights of step 3"
        first.send(train.Join(3, 0, 2, str(tmp_path / "g3")), train.Join(4, 0, 1, str(tmp_path / "g4")))
        assert "1 of 2 members did not appear" in first.until(train.WorkerFailed).what
        assert first.until(train.Joined).generation == 4, "a newer generation ends the wait for one that cannot form"
        (tmp_path / "w").mkdir(exist_ok=True)
        first.send(train.OfferWeights(str(tmp_path / "w"), 3, 2))
        offered = first.until(train.Offered)
        offer = read_offer(offer_path(tmp_path / "w", 3, offered.writer))
        assert (offered.base, offered.size, offered.changed, offered.total) == (-1, 16384, 4096, 4096), "its first one"
        payload = payload_path(offer_path(tmp_path / "w", 3, "t0")).read_bytes()
        values = np.concatenate([piece_values(piece, payload)[1] for piece in offer.pieces])
        assert (values.view(np.float32) == weights(3)).all()
        first.send(train.SaveState(str(tmp_path / "step-3"), 3))
        first.until(train.Saved)
        first.send(train.SaveState(str(tmp_path / "step-4"), 4))
        assert "cannot save step 4" in first.until(train.SaveFailed).reason
        first.send(train.Standby())
        assert first.close() == 0
    assert folders.read_state(tmp_path / "step-3") == folders.TrainerState(3, 3)
    with (
        trainer_link(tmp_path / "d", modelled, dp=2, core_dp=2, rank=0) as one,
        trainer_link(tmp_path / "e", modelled, dp=2, core_dp=2, rank=1) as two,
    ):
        for link in (one, two):
            link.send(train.Join(1, 0, 1, str(tmp_path / "core")))
        assert [link.until(train.Joined).step for link in (one, two)] == [0, 0]
        for link in (one, two):
            samples = (sample("0.0", 1000), sample("1.0", 600))
            link.send(train.TrainStep(1, 1, (samples,), (800,)))
        done = [link.until(train.StepDone) for link in (one, two)]
        assert [reply.numbers["trained_tokens"] for reply in done] == [1600, 1600], "of the whole core"
        assert done[0].numbers["train_s"] == done[1].numbers["train_s"] > 0.0, "each waits for the slowest"
        for link in (one, two):
            link.send(*(train.TrainPortion(2, 1, at, (part,)) for at, part in enumerate(samples)))
            link.send(train.TrainStep(2, 1, ((sample("2.0", 400),),), (1000,), 2))
            assert [link.until(train.PortionDone).portion for _ in samples] == [0, 1]
            again = link.until(train.StepDone)
            assert (again.numbers["trained_tokens"], again.numbers["loss_tokens"]) == (2000, 1000), "of all parts"
            link.send(train.TrainPortion(3, 1, 1, samples))
            assert "cannot run step 3" in link.until(train.PortionDone).error, "it lacks the part before"
    with trainer_link(tmp_path / "c", modelled, start_dir=str(snapshot)) as rebuilt:
        assert rebuilt.until(EngineReady).version == 2, "from the snapshot"


def test_changes_of_steps_put_together_are_the_weights_of_the_last(tmp_path: Path) -> None:
    image = Image(tmp_path, image_shapes(), "F32")
    for base, step in ((-1, 2), (2, 3), (3, 4), (4, 7), (7, 8), (8, 30), (30, 31)):
        made, owned = offer(tmp_path, step, base, 0)
        assert owned == ELEMENTS
        assert made.size == ELEMENTS * 4 * (1 if base in (-1, 8) else (step - base) / 4)
        image.apply(step, [(made, payload_path(offer_path(tmp_path, step, "t0")).read_bytes())])
        assert (np.frombuffer(image.path.read_bytes()[image.offset :], np.float32) == weights(step)).all()


def test_a_host_replays_a_trace_and_starts_again_at_its_end(tmp_path: Path) -> None:
    turns = (TurnRecord(0, 5, "test", "error", 2.0, 1, 3, 4), TurnRecord(9, 7))
    last = TrajectoryRecord("q", 0, 30, (TurnRecord(0, 6),), None)
    write_trace(tmp_path / "t.jsonl", [TrajectoryRecord("p", 0, 20, turns, 1.0), last])
    with host_link(tmp_path, trace="t.jsonl") as link:
        link.until(env.HostReady)
        link.send(env.OpenEpisode("e", 2, 3, 0.0), env.OpenEpisode("f", 1, 0, 0.0))
        opened = [link.until(env.EpisodeOpened) for _ in range(2)]
        found = [(each.prompt_id, len(each.tokens) // 4, each.max_tokens) for each in opened]
        assert found == [("p", 20, 7), ("q", 30, 6)]
        assert tokens.read(opened[0].tokens) == tokens.SimulatedContext(2, 20, 3, 20, 5)
        link.send(env.StepEpisode("e", tokens.generated(5, complete=True), 100))
        stepped = link.until(env.EpisodeStepped)
        assert stepped.signals == (env.Signal("test", "error", 9, 2.0 / 10_000.0, 1, 3, 4),)
        assert (len(unpack_i32(stepped.tokens)), stepped.done) == (9, False)
        last_turns = tokens.generated(7, complete=True), tokens.generated(2, complete=False)
        link.send(*(env.StepEpisode(name, turn, 100) for name, turn in zip("ef", last_turns, strict=True)))
        ended = {each.episode: each for each in (link.until(env.EpisodeStepped) for _ in range(2))}
        assert (ended["e"].done, ended["e"].reward) == (True, 1.0)
        assert (ended["f"].done, ended["f"].info) == (True, {"solved": 0.0, "truncated": 1.0})
        assert link.close() == 0


def test_a_host_replays_the_samples_of_a_trajectory(tmp_path: Path) -> None:
    turns = (TurnRecord(0, 5, "test", "ok", 2.0), TurnRecord(12, 7, new_sample=True))
    write_trace(tmp_path / "t.jsonl", [TrajectoryRecord("p", 0, 20, turns, 1.0)])
    with host_link(tmp_path, trace="t.jsonl") as link:
        link.until(env.HostReady)
        link.send(env.OpenEpisode("e", 0, 3, 0.0), env.StepEpisode("e", tokens.generated(5, complete=True), 100))
        stepped = link.until(env.EpisodeStepped)
        assert (stepped.new_sample, stepped.signals[0].payload_tokens) == (True, 0)
        assert tokens.read(stepped.tokens) == tokens.SimulatedContext(0, 12, 3, 12, 7), "a context of its own"
        assert link.close() == 0


def test_generated_work_is_the_run_s_and_presets_follow_one_another(tmp_path: Path) -> None:
    with host_link(tmp_path, presets=["search", "math"]) as link:
        link.until(env.HostReady)
        link.send(*(env.OpenEpisode(f"{index}.{one}", index, one, 0.0) for index in range(8) for one in range(2)))
        opened = [link.until(env.EpisodeOpened) for _ in range(16)]
    names = [each.prompt_id for each in opened]
    assert [name.split("/")[2] for name in names] == ["search"] * 8 + ["math"] * 8
    assert names[::2] == names[1::2]
    assert len(set(names)) == 8
