"""The layout of a run that has lost nodes for good."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from libra_hpc.config.load import validate, with_values
from libra_hpc.preflight.fewer_nodes import fewer_nodes

A800 = {"partition": "a800", "gpus": 8, "gpu_type": "a800"}
NAMES = ("train", "hybrid", "rollout", "env")
LOSS = "node a800-3 is down"


def layout(before: Sequence[int], needed: Sequence[int], now: Sequence[int], **values: Any) -> tuple[str, list[int]]:
    """What the run does, and its nodes that train, are hybrid, roll out and have environments."""
    parts = {name: {**A800, "nodes": count} for name, count in zip(NAMES, before, strict=False)}
    config = validate({"run": {"engine": "simulated"}, "simulated": {"presets": ["search"]}, "components": parts})
    given = {"planner.model": "qwen3-4b", "components.planner.nodes": 0, **values}
    found = fewer_nodes(with_values(config, given), LOSS, needed, now)
    return found.sentence, [found.changes.get(f"components.{name}.nodes", -1) for name in NAMES]


@pytest.mark.parametrize(
    ("before", "now", "after"),
    [
        ([2, 2, 2], [1, 2, 2], [2, 2, 1, 0]),
        ([2, 2, 2], [2, 1, 1], [2, 1, 1, 0]),
        ([3, 0, 2], [3, 0, 1], [3, 0, 1, 0]),
        ([4, 0, 1], [3, 0, 1], [3, 0, 1, 0]),
        ([1, 0, 1], [1, 0, 0], [-1] * 4),
    ],
)
def test_the_core_keeps_its_nodes_for_as_long_as_others_can_be_done_without(
    before: list[int], now: list[int], after: list[int]
) -> None:
    sentence, counts = layout(before, before, now)
    assert (counts, " no layout fits " in sentence) == (after, after[0] < 0)


def test_a_core_that_its_degrees_do_not_fit_gets_others_or_the_reason_is_named() -> None:
    two_stages = {"train.tp": 8, "train.pp": 2}
    sentence, counts = layout([4, 0, 1], [5], [4], **two_stages)
    assert (sentence, counts) == (
        f"{LOSS}: going on with 4 of 5 nodes: 3 train with TP2 PP1, 0 hybrid, 1 roll out",
        [3, 0, 1, 0],
    )
    refused, _ = layout([2, 0, 1], [3], [2], **two_stages, **{"planner.model": "llama-3.1-70b", "rollout.tp": 8})
    assert f"{LOSS}: no layout fits 2 of 3 nodes (train.tp * train.pp = 16: " in refused, "one node holds no other"


def test_nodes_of_two_kinds_do_not_change_places() -> None:
    kinds = {"components.rollout.partition": "h200", "components.rollout.gpu_type": "h200"}
    assert layout([2, 2, 2], [2, 2, 2], [2, 1, 2], **kinds)[1] == [2, 1, 2, 0]
    assert layout([2, 2, 2], [2, 2, 2], [1, 2, 2], **kinds)[1] == [1, 2, 2, 0]


def test_environment_nodes_are_apart_and_lists_lose_the_entries_of_their_nodes() -> None:
    env = {"components.env.partition": "cpu", "components.env.nodes": 2}
    assert layout([2, 1, 2], [5, 2], [4, 1], **env, **{"rollout.tp": [1, 2, 4]}) == (
        f"{LOSS}: going on with 5 of 7 nodes: 2 train with TP1 PP1, 1 hybrid, 1 roll out",
        [2, 1, 1, 1],
    )
