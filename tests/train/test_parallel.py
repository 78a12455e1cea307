"""Tensor and pipeline parallelism against one process: losses, first moments, weights, checkpoints across splits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from libra_hpc.protocol.trainer import SaveCheckpoint, Saved
from libra_hpc.train import checkpoint
from libra_hpc.weights.names import ReplicaPlace

from .support import (
    Replica,
    assert_same_state,
    build,
    fixed_run,
    join_all,
    make_model,
    read_tensors,
    step_all,
    train_step,
)

pytestmark = pytest.mark.engine
STEPS = 3


ONE_GROUP = {"num_key_value_heads": 1}
"""Fewer key/value heads than tensor-parallel ranks."""


@pytest.mark.parametrize(
    ("kind", "keys", "tp", "pp", "dp", "recompute"),
    [
        ("qwen3", ONE_GROUP, 2, 1, 1, "selective"),
        ("glm4", ONE_GROUP, 2, 1, 1, "none"),
        ("qwen2", {"tied": True, "layers": 3}, 1, 2, 1, "none"),
        ("qwen2", {"tied": True}, 2, 2, 1, "full"),
        ("qwen3", {"tied": True}, 1, 1, 3, "none"),
        ("qwen3", {}, 2, 1, 2, "none"),
        ("qwen2", {"tied": True, "layers": 3}, 1, 2, 2, "none"),
    ],
)
def test_a_split_replica_equals_one_process(
    tmp_path: Path, world: ReplicaPlace, kind: str, keys: dict[str, Any], tp: int, pp: int, dp: int, recompute: str
) -> None:
    model_dir = tmp_path / "model"
    make_model(kind, model_dir, **keys)
    replica = Replica(tmp_path, "split", model_dir, tp=tp, pp=pp, dp=dp, recompute=recompute)
    want, state = fixed_run(model_dir, world, STEPS)
    replica.ready()
    join_all([replica], 0, tmp_path / "meet")
    for step, reference in enumerate(want, 1):
        (done,) = step_all([replica], step, 0)
        assert done.loss == pytest.approx(reference.loss, abs=2e-6)
        assert done.grad_norm == pytest.approx(reference.grad_norm, rel=2e-5)
        assert done.entropy == pytest.approx(reference.entropy, abs=2e-5)
        assert done.ratio_mean == pytest.approx(reference.ratio_mean, rel=2e-5)
        assert (done.tokens, done.loss_tokens, done.ratio_truncated) == (
            reference.tokens,
            reference.loss_tokens,
            reference.ratio_truncated,
        )
    folder = tmp_path / "saved"
    replica.ask(SaveCheckpoint(str(folder), STEPS), Saved)
    assert_same_state(read_tensors(folder), state)

    # Across splits: one process continues from the split replica's checkpoint, and the split replica from one
    # process's.
    engine, trainer = build(model_dir, world)
    checkpoint.load_state(engine, folder)
    assert (engine.state.step, engine.state.updates) == (STEPS, STEPS)
    alone = trainer.step(train_step(STEPS + 1, 0))
    (together,) = step_all([replica], STEPS + 1, 0)
    assert alone.loss == pytest.approx(together.loss, abs=2e-6)
    assert alone.grad_norm == pytest.approx(together.grad_norm, rel=2e-5)
    checkpoint.save(engine, model_dir, tmp_path / "alone")
    assert_same_state(replica.tensors(STEPS + 1), read_tensors(tmp_path / "alone"))
    assert replica.close() == [0] * (tp * pp * dp)
    start_dir = str(tmp_path / f"reference-model-{STEPS}-1")
    split = Replica(tmp_path, "from-one-process", model_dir, tp=tp, pp=pp, dp=dp, start_dir=start_dir)
    assert split.ready().step == STEPS
    after = split.tensors(STEPS)
    assert all((after[name] == state[name]).all() for name in state)
    assert split.close() == [0] * (tp * pp * dp)
