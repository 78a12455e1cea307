"""Workers that die, wait for others that never come, or cannot go on: each says so and stays usable if it can."""

from __future__ import annotations

from pathlib import Path

import pytest

from libra_hpc.process.entry import DUMP_SIGNAL
from libra_hpc.protocol import trainer as wire
from libra_hpc.protocol.trainer import Join, Joined, Saved, SaveState, StepFailed, TrainStep, WorkerFailed
from libra_hpc.weights.names import ReplicaPlace

from .batches import train_step
from .support import WAIT_S, Replica, assert_same_state, fixed_run, join_all, make_model, step_all

pytestmark = pytest.mark.engine


def test_a_killed_worker_is_rebuilt_from_its_snapshot(tmp_path: Path, world: ReplicaPlace) -> None:
    model_dir, shm = tmp_path / "model", tmp_path / "shm"
    # With tensors that no state has.
    make_model("glm4_moe", model_dir)
    replica = Replica(tmp_path, "a", model_dir, dp=2)
    want, final = fixed_run(model_dir, world, 5)
    replica.ready()
    join_all([replica], 0, tmp_path / "g0")
    for step in range(1, 6):
        step_all([replica], step, 0)
        if step == 4:
            replica.snapshot(shm, 4)
    want_now = replica.tensors(5)
    replica.kill()

    again = Replica(tmp_path, "b", model_dir, dp=2, start_dir=str(shm))
    assert again.ready().version == 4
    join_all([again], 1, tmp_path / "g1")
    (done,) = step_all([again], 5, 1)
    assert done.numbers["loss"] == pytest.approx(want[4].numbers["loss"], abs=2e-6)
    assert_same_state(again.tensors(5), final)
    assert all((t == want_now[n]).all() for n, t in again.tensors(5).items())
    assert again.close() == [0, 0]


def test_a_newer_order_ends_the_wait_for_a_member_that_is_missing(tmp_path: Path, world: ReplicaPlace) -> None:
    model_dir = tmp_path / "model"
    make_model("qwen2", model_dir)
    first, second, third = (
        Replica(tmp_path, name, model_dir, join_timeout_s=10 * WAIT_S, elastic=name != "first")
        for name in ("first", "second", "third")
    )
    for replica in (first, second, third):
        replica.ready()
    # The third dies before it appears.  What was sent meanwhile is done afterwards, in order.
    third.kill()
    for rank, replica in enumerate((first, second)):
        replica.send(Join(1, rank, 3, str(tmp_path / "g1")))
    first.send(SaveState(str(tmp_path / "saved"), 0))
    for rank, replica in enumerate((first, second)):
        replica.send(Join(2, rank, 2, str(tmp_path / "g2")))
        error = replica.receive(WorkerFailed)
        assert (error.generation, error.fatal) == (1, False)
    assert first.receive(wire.SaveStarted).seconds >= 0
    # It is written beside what follows.
    answers = {type(answer): answer for answer in (first.receive_from(0), first.receive_from(0))}
    assert answers[Saved].step == 0
    assert [answers[Joined].generation, second.receive(Joined).generation] == [2, 2]
    assert [answer.step for answer in step_all([first, second], 1, 2)] == [1, 1]
    # So does a stop, and the end of the agent.  What the process does meanwhile can be seen from outside.
    first.send(Join(3, 0, 2, str(tmp_path / "g3")))
    while not first.alive(0).waits:
        pass
    first.processes[0].send_signal(DUMP_SIGNAL)
    while "in assemble" not in (log := (first.folder / "0.log").read_text()):
        assert first.alive(0).waits, log
    second.send(Join(4, 1, 2, str(tmp_path / "g4")))
    assert first.close() + second.close() == [0, 0]


def test_a_replica_that_cannot_join_or_train_reports_it_and_stays_usable(tmp_path: Path) -> None:
    model_dir = tmp_path / "model"
    make_model("qwen2", model_dir)
    replica = Replica(tmp_path, "split", model_dir, tp=2, join_timeout_s=2.0)
    replica.ready()
    # The other member never appears.
    error = replica.ask(Join(1, 0, 2, str(tmp_path / "g1")), WorkerFailed)
    assert not error.fatal
    assert "generation 1" in error.what
    failed = replica.ask(train_step(1, 1), StepFailed)
    assert "generation -1" in failed.error
    join_all([replica], 2, tmp_path / "g2")
    failed = replica.ask(train_step(7, 2), StepFailed)
    assert "step 0" in failed.error
    join_all([replica], 3, tmp_path / "g3")
    good = train_step(1, 3)
    broken = good.minibatches[0][0]
    short = type(broken)(broken.uid, broken.tokens, broken.loss_mask[:-1], broken.logprobs, broken.advantage)
    failed = replica.ask(TrainStep(1, 3, ((short,),), good.divisors), StepFailed)
    assert broken.uid in failed.error
    join_all([replica], 4, tmp_path / "g4")
    (done,) = step_all([replica], 1, 4)
    assert done.step == 1
    # Half a replica cannot go on: the survivor exits, and its peers see its sockets close.
    replica.processes[1].kill()
    replica.processes[1].wait()
    replica.send_to(0, train_step(2, 4))
    error = replica.receive_from(0)
    assert isinstance(error, WorkerFailed)
    assert error.fatal
    assert replica.processes[0].wait(timeout=60) == 1
