"""Fifty versions of a trainer in real engines: tokens and log-probabilities are those of an engine that loads the last.

The rows cover every two values that can occur together of: kind of family, tied, TP of the engine, TP, PP, DP, EP and
ETP of the trainer.  `tests.trainer.test_fifty_updates` compares weights for the whole product.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import msgspec
import pytest

from libra_hpc.models.architecture import read_shape
from libra_hpc.protocol.engine import UpdateWeights
from libra_hpc.weights.image import IMAGE_FILE
from libra_hpc.weights.names import ReplicaPlace
from tests.trainer.support import make_model
from tests.trainer.test_fifty_updates import UPDATES, Run

from .engine_harness import EngineUnderTest, Model, engine_config

NAMES = ("family", "tied", "engine", "tp", "pp", "dp", "ep", "etp")
VALUES = (("qwen2", "phi3", "qwen3_moe"), (False, True), *((1, 2),) * 6)
ROWS = [
    ("qwen3_moe", False, 1, 2, 2, 1, 2, 1),
    ("qwen2", True, 2, 1, 1, 1, 1, 1),
    ("qwen3_moe", False, 2, 1, 2, 2, 1, 2),
    ("qwen3_moe", True, 1, 2, 1, 2, 2, 2),
    ("phi3", True, 2, 2, 2, 2, 1, 1),
    ("phi3", False, 1, 1, 1, 1, 1, 1),
    ("qwen2", False, 1, 2, 2, 2, 1, 1),
    ("qwen3_moe", True, 2, 1, 1, 2, 2, 1),
    ("qwen3_moe", False, 1, 2, 2, 1, 1, 2),
]


def possible(row: tuple[object, ...]) -> bool:
    family, _, _, tp, _, dp, ep, etp = row
    if family != "qwen3_moe":
        return ep == etp == 1
    return tp * dp % (ep * etp) == 0  # type: ignore[operator]


def pairs(row: tuple[object, ...]) -> set[tuple[tuple[str, object], ...]]:
    return set(itertools.combinations(zip(NAMES, row, strict=True), 2))


def test_the_rows_have_every_pair() -> None:
    product = [row for row in itertools.product(*VALUES) if possible(row)]
    assert set().union(*map(pairs, ROWS)) == set().union(*map(pairs, product))


@pytest.mark.chaos
@pytest.mark.vllm
@pytest.mark.timeout(900)
@pytest.mark.parametrize("row", ROWS, ids=lambda row: "-".join(map(str, row)))
def test_fifty_versions_are_as_a_full_load_of_the_last(
    row: tuple[str, bool, int, *tuple[int, ...]], tmp_path: Path
) -> None:
    family, tied, engine_tp, tp, pp, dp, ep, etp = row
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 2, "vocab_size": 128}
    heads = {"head_dim": 64} if family == "qwen3_moe" else {}
    ids = {"bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 1024}
    experts = {"moe_intermediate_size": 64} if family == "qwen3_moe" else {}
    reference = make_model(family, tmp_path / "model", tied=tied, layers=3, **sizes, **heads, **ids, **experts)
    model = Model(tmp_path / "model", reference)
    run = Run(tmp_path, read_shape(model.folder), seed=ROWS.index(row))
    run.move(ReplicaPlace(tp=tp, tp_rank=0, pp=pp, pp_rank=0, dp=dp, ep=ep, etp=etp))
    image = str(tmp_path / IMAGE_FILE)
    run.version = 0
    config = engine_config(model, tp=engine_tp, dtype="bfloat16")
    engine = EngineUnderTest(tmp_path / "engine", config)
    try:
        engine.ready()
        first = engine.greedy()
        for _ in range(UPDATES):
            run.train()
            run.publish()
            assert engine.apply(UpdateWeights(image, run.version)).version == run.version
        updated = engine.greedy()
    finally:
        engine.close()
    loaded = EngineUnderTest(tmp_path / "loaded", msgspec.structs.replace(config, weights=image, version=run.version))
    try:
        loaded.ready()
        assert loaded.greedy() == updated != first
    finally:
        loaded.close()
