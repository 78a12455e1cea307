"""Replicas that join, leave and die: what they compute together equals one fixed data-parallel run."""

from __future__ import annotations

from pathlib import Path

import pytest

from libra_hpc.process.dump import DUMP_SIGNAL
from libra_hpc.protocol.trainer import Join, Joined, SaveCheckpoint, Saved, Standby, StepFailed, TrainStep, WorkerError
from libra_hpc.train import state_folders as folders
from libra_hpc.weights.names import ReplicaPlace

from .support import WAIT_S, Replica, assert_same_state, fixed_run, join_all, make_model, step_all, train_step

pytestmark = pytest.mark.engine


def test_members_come_and_go_and_the_result_is_that_of_a_fixed_run(tmp_path: Path, world: ReplicaPlace) -> None:
    model_dir = tmp_path / "model"
    make_model("qwen2", model_dir)
    first, second = (Replica(tmp_path, name, model_dir) for name in ("first", "second"))
    want, final = fixed_run(model_dir, world, 6, minibatches=2)
    first.ready(), second.ready()

    # Step 1 alone; at step 2 a replica that was idle joins and receives the state.
    join_all([first], 1, tmp_path / "g1")
    reports = step_all([first], 1, 1, minibatches=2)
    joined = join_all([first, second], 2, tmp_path / "g2")
    assert [answer.step for answer in joined] == [1, 1]
    assert joined[0].received_bytes == 0
    assert joined[1].received_bytes == 3 * 4 * sum(t.numel() for n, t in final.items() if not n.startswith("exp_avg"))
    for step in (2, 3):
        both = step_all([first, second], step, 2, minibatches=2)
        assert both[0].loss == both[1].loss
        assert both[0].grad_norm == both[1].grad_norm
        reports.append(both[0])
    assert second.tensors(3).keys() == final.keys()
    assert all((second.tensors(3)[n] == t).all() for n, t in first.tensors(3).items())

    # A member dies in step 4: nothing is committed, the survivor is usable at once and redoes the step with all
    # samples.
    before = first.tensors(3)
    second.kill()
    first.send(train_step(4, 2, replica=0, replicas=2, minibatches=2))
    failed = first.receive(StepFailed)
    assert (failed.step, failed.generation) == (4, 2)
    assert all((t == before[n]).all() for n, t in first.tensors(3).items())
    join_all([first], 3, tmp_path / "g3")
    reports += step_all([first], 4, 3, minibatches=2)

    # A replacement, built from the model folder, catches up; the old one goes to standby, wakes, and finds itself
    # behind.
    third = Replica(tmp_path, "third", model_dir)
    third.ready()
    assert [a.step for a in join_all([third, first], 4, tmp_path / "g4")] == [4, 4]
    first.send(Standby())
    join_all([third], 5, tmp_path / "g5")
    reports += step_all([third], 5, 5, minibatches=2)
    woken = join_all([first, third], 6, tmp_path / "g6")
    assert [a.step for a in woken] == [5, 5]
    assert woken[0].received_bytes > 0
    reports += step_all([first, third], 6, 6, minibatches=2)[:1]

    for done, reference in zip(reports, want, strict=True):
        assert done.loss == pytest.approx(reference.loss, abs=2e-6)
        assert done.grad_norm == pytest.approx(reference.grad_norm, rel=5e-5)
        assert done.logprob_gap == pytest.approx(reference.logprob_gap, rel=5e-5)
    assert_same_state(first.tensors(6), final)
    assert first.close() + third.close() == [0, 0]


def test_a_killed_worker_is_rebuilt_from_its_snapshot(tmp_path: Path, world: ReplicaPlace) -> None:
    model_dir, shm = tmp_path / "model", tmp_path / "shm"
    make_model("llama", model_dir, tied=True)
    replica = Replica(tmp_path, "a", model_dir, snapshot_dir=str(shm), snapshot_every=2)
    want, final = fixed_run(model_dir, world, 5)
    replica.ready()
    join_all([replica], 0, tmp_path / "g0")
    for step in range(1, 6):
        step_all([replica], step, 0)
    want_now = replica.tensors(5)  # answered after the snapshot of step 4 was written
    replica.kill()
    newest = folders.latest(shm)
    assert newest is not None
    assert newest.name == "step-00000004"
    assert len(list(shm.iterdir())) == 1
    # What a kill in the middle of the next snapshot would leave does not hide the whole one.
    (shm / "step-00000006.partial").mkdir()
    (shm / "step-00000006.partial" / "trainer.json").write_text('{"step": 6, "updates": 6}')

    again = Replica(tmp_path, "b", model_dir, start_dir=str(shm))
    assert again.ready().step == 4
    join_all([again], 1, tmp_path / "g1")
    (done,) = step_all([again], 5, 1)
    assert done.loss == pytest.approx(want[4].loss, abs=2e-6)
    assert_same_state(again.tensors(5), final)
    assert all((t == want_now[n]).all() for n, t in again.tensors(5).items())
    assert again.abandon() == [0]


def test_a_newer_order_ends_the_wait_for_a_member_that_is_missing(tmp_path: Path, world: ReplicaPlace) -> None:
    model_dir = tmp_path / "model"
    make_model("qwen2", model_dir)
    first, second, third = (
        Replica(tmp_path, name, model_dir, join_timeout_s=10 * WAIT_S) for name in ("first", "second", "third")
    )
    for replica in (first, second, third):
        replica.ready()
    # The third dies before it appears.  What was sent meanwhile is done afterwards, in order.
    third.kill()
    for rank, replica in enumerate((first, second)):
        replica.send(Join(1, rank, 3, str(tmp_path / "g1")))
    first.send(SaveCheckpoint(str(tmp_path / "saved"), 0))
    for rank, replica in enumerate((first, second)):
        replica.send(Join(2, rank, 2, str(tmp_path / "g2")))
        error = replica.receive(WorkerError)
        assert (error.generation, error.fatal) == (1, False)
    assert first.receive(Saved).step == 0
    assert [replica.receive(Joined).generation for replica in (first, second)] == [2, 2]
    assert [answer.step for answer in step_all([first, second], 1, 2)] == [1, 1]
    # So does a stop, and the end of the agent.  What the process does meanwhile can be seen from outside.
    first.send(Join(3, 0, 2, str(tmp_path / "g3")))
    while first.alive(0).phase != "waiting for peers":
        pass
    first.processes[0].send_signal(DUMP_SIGNAL)
    while "in assemble" not in (log := (first.folder / "0.log").read_text()):
        assert first.alive(0).phase == "waiting for peers", log
    second.send(Join(4, 0, 2, str(tmp_path / "g4")))
    assert first.close() + second.abandon() == [0, 0]


def test_a_replica_that_cannot_join_or_train_reports_it_and_stays_usable(tmp_path: Path) -> None:
    model_dir = tmp_path / "model"
    make_model("qwen2", model_dir)
    replica = Replica(tmp_path, "split", model_dir, tp=2, join_timeout_s=2.0)
    replica.ready()
    # The other member never appears.
    error = replica.ask(Join(1, 0, 2, str(tmp_path / "g1")), WorkerError)
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
    failed = replica.ask(TrainStep(1, 3, ((short,),), good.total_tokens), StepFailed)
    assert broken.uid in failed.error
    join_all([replica], 4, tmp_path / "g4")
    (done,) = step_all([replica], 1, 4)
    assert done.step == 1
    # Half a replica cannot go on: the survivor exits, and its peers see its sockets close.
    replica.processes[1].kill()
    replica.processes[1].wait()
    replica.send_to(0, train_step(2, 4))
    error = replica.receive_from(0)
    assert isinstance(error, WorkerError)
    assert error.fatal
    assert replica.processes[0].wait(timeout=60) == 1
