"""Training worlds that cannot run are refused in one sentence; those that can are described in one."""

from __future__ import annotations

from typing import Any

import pytest

from libra_hpc.config.load import with_values
from libra_hpc.config.run import RunConfig
from libra_hpc.preflight.checks import problems
from libra_hpc.preflight.job_checks import describe_worlds

from .test_checks import MODEL

MOE = {**MODEL, "model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
NODES = {f"components.{name}.gpus": 8 for name in ("train", "hybrid", "rollout")}


def configured(nodes: tuple[int, int], **train: Any) -> RunConfig:
    counts = {"components.train.nodes": nodes[0], "components.hybrid.nodes": nodes[1], "slurm.device": "cuda"}
    return with_values(RunConfig(), {**NODES, **counts, **{f"train.{key}": value for key, value in train.items()}})


def test_hybrid_nodes_that_move_together_are_whole_groups() -> None:
    together = {"components.hybrid.nodes_per_replica": 2}
    (found,) = problems(with_values(configured((2, 3), tp=8, pp=2), together), MODEL)
    assert str(found) == (
        "components.hybrid.nodes_per_replica = 2: so many hybrid nodes move together, and there are 3; valid: divisors"
        " of 3."
    )
    config = with_values(configured((2, 4), tp=8, pp=2), together)
    assert list(problems(config, MODEL)) == []
    assert describe_worlds(config).endswith("hybrid: 4 nodes x 8 GPUs, 1 replica on each 2")


def test_pieces_without_a_token_are_refused() -> None:
    config = with_values(configured((2, 0), tp=2, cp=8, micro_tokens=64), {"rollout.max_model_len": 16})
    assert list(problems(config, MODEL)) == []
    config = with_values(config, {"train.tp": 8, "train.micro_tokens": 64, "components.train.nodes": 8})
    (found,) = problems(config, MODEL)
    assert str(found) == (
        "train.cp = 8: 16 pieces for 8 tensor ranks need 128 tokens, and a micro-batch has 64; valid: 1 to 4."
    )


@pytest.mark.parametrize(
    ("nodes", "train", "sentence"),
    [
        ((2, 0), {"ep": 3}, "train.ep = 3: it does not divide the model's 8 experts"),
        ((2, 0), {"tp": 2, "etp": 1}, "train.etp = 1: without expert parallelism"),
        ((2, 0), {"tp": 4, "ep": 2, "etp": 2}, "train.etp = 2: it must be 1 or tp = 4"),
        ((1, 0), {"pp": 4, "ep": 4}, "train.ep = 4: ep x etp = 4 does not divide the 2 processes of a stage"),
        ((2, 1), {"pp": 4, "ep": 4}, "train.ep = 4: on hybrid nodes, ep x etp = 4 does not divide the 2 processes"),
    ],
)
def test_experts_fit_the_core_and_hybrid_nodes(nodes: tuple[int, int], train: dict[str, Any], sentence: str) -> None:
    (found,) = problems(configured(nodes, **train), MOE)
    assert str(found).startswith(sentence)
    assert list(problems(configured(nodes, **{**train, "ep": 1, "etp": 0}), MOE)) == []


@pytest.mark.parametrize(
    ("nodes", "train", "words"),
    [
        ((4, 0), {"tp": 8, "pp": 2}, "core: 4 nodes x 8 GPUs, TP8 PP2, 2 replicas"),
        (
            (1, 2),
            {"tp": 2, "cp": 2, "ep": 4, "etp": 1},
            "core: 1 node x 8 GPUs, TP2 PP1 CP2 EP4 ETP1, 2 replicas; hybrid: 2 nodes x 8 GPUs, 2 replicas each",
        ),
        ((2, 0), {"tp": 3}, "core: 2 nodes x 6 GPUs, TP3 PP1, 4 replicas"),
    ],
)
def test_a_layout_in_words(nodes: tuple[int, int], train: dict[str, Any], words: str) -> None:
    assert describe_worlds(configured(nodes, **train)) == words
