"""AdamW on state in host memory: every bit as with it on the device, and a standby that frees all else."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch

from libra_hpc.models import memory
from libra_hpc.protocol.trainer import Freed, Standby
from libra_hpc.trainer.train_engine import TrainEngine
from libra_hpc.weights.names import ReplicaPlace

from .batches import train_step
from .settings import optimizer
from .support import Replica, build, join_all, make_model, step_all
from .test_weight_offers import Offering

PLAIN = optimizer(lr=1e-3, weight_decay=0.1, warmup_steps=3)
HOSTED = msgspec.structs.replace(PLAIN, host=True)


def bits(engine: TrainEngine) -> dict[str, torch.Tensor]:
    """The state, the weights and the marks of what changed."""
    found = {f"{kind}:{name}": t for name, one in engine.state.shards.items() for kind, t in one.kinds().items()}
    marks = {f"marks:{name}": shard._bits for name, shard in engine.state.changes.shards.items()}
    return found | marks | {name: parameter.data for name, parameter in engine.state.parameters.items()}


def assert_equal(one: TrainEngine, other: TrainEngine) -> None:
    pairs = zip(bits(one).items(), bits(other).values(), strict=True)
    assert not [name for (name, value), twin in pairs if not torch.equal(value, twin)]


@pytest.mark.parametrize(("kind", "dtype"), [("qwen3", torch.float32), ("qwen3_moe", torch.bfloat16)])
def test_updates_are_equal_to_the_bit(
    kind: str, dtype: torch.dtype, tmp_path: Path, world: ReplicaPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "HOSTED_PIECE", 304)  # many shards are several pieces, the last a part of one
    make_model(kind, tmp_path / "m")
    (engine, plain), (other, hosted) = (build(tmp_path / "m", world, dtype, one) for one in (PLAIN, HOSTED))
    engine.state.changes.offered(0)
    other.state.changes.offered(0)
    for step in (1, 2, 3):
        done = [one.step(train_step(step, 0, minibatches=2)) for one in (plain, hosted)]
        assert done[0].numbers["grad_norm"] == done[1].numbers["grad_norm"]
        assert_equal(engine, other)
    saved = other.state.capture()
    hosted.step(train_step(4, 0))
    other.state.restore(saved)
    assert other.state.updates == 6
    for one in (plain, hosted):
        one.step(train_step(4, 0))
    assert_equal(engine, other)


def test_a_standby_frees_weights_which_come_again_from_host_memory(tmp_path: Path, world: ReplicaPlace) -> None:
    run = Offering(tmp_path, world, settings=HOSTED)
    run.publish(0)
    run.train()
    run.publish(1)
    before = {name: value.clone() for name, value in bits(run.engine).items()}
    run.engine.release()
    for flat in run.engine._flat():
        flat.fill_(7.0)
    run.engine.reclaim()
    assert all(torch.equal(before[name], value) for name, value in bits(run.engine).items())
    run.train()
    assert run.publish(2).base == 1, "what changed since, as without a standby"


@pytest.mark.engine
def test_a_core_that_rested_trains_as_one_that_did_not(tmp_path: Path) -> None:
    make_model("qwen3", tmp_path / "model")
    found = []
    for name, one in (("plain", PLAIN), ("rests", HOSTED)):
        core = Replica(tmp_path, name, tmp_path / "model", dp=2, dtype="bfloat16", optimizer=one)
        core.ready()
        for step in (1, 2):
            join_all([core], step, tmp_path / f"{name}-{step}")
            step_all([core], step, step)
            if one.host:
                core.ask(Standby(), Freed)
        join_all([core], 3, tmp_path / f"{name}-3")
        found.append(core.tensors(2))
        assert core.close() == [0, 0]
    assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())
