"""The grid of a sweep: what ``--over`` accepts, and how combinations are named."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra_hpc.config import grid
from libra_hpc.config.job import RunSection
from libra_hpc.errors import UserError


def names(*over: str, run_name: str = "quick") -> list[str]:
    return [one.name for one in grid.combinations(grid.parse_axes(over), run_name)]


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("1e-6,3e-6", ["1e-6", "3e-6"]),
        ("[4, 8],8", ["[4, 8]", "8"]),
        ('"a,b",c', ['"a,b"', "c"]),
        ("{a = [1, 2], b = 3},{}", ["{a = [1, 2], b = 3}", "{}"]),
        ("1,,2", ["1", "", "2"]),
    ],
)
def test_values_are_split_at_commas_outside_brackets_and_quotes(text: str, parts: list[str]) -> None:
    assert grid.split_values(text) == parts


def test_the_product_has_every_combination_once_and_values_of_their_type() -> None:
    axes = grid.parse_axes(["optimizer.lr=1e-6,3e-6", "run.seed=0,1,2"])
    found = grid.combinations(axes, "quick")
    assert grid.size(axes) == len(found) == 6
    assert found[1].name == "lr1e-6.seed1"
    assert found[1].overrides == ("optimizer.lr=1e-6", "run.seed=1")
    assert found[1].values == {"optimizer.lr": 1e-6, "run.seed": 1}
    assert len({tuple(one.values.items()) for one in found}) == 6


def test_equal_last_names_of_keys_are_written_out() -> None:
    assert names("train.tp=1", "rollout.tp=[2, 4],8") == ["train.tp1.rollout.tp2_4", "train.tp1.rollout.tp8"]


def test_a_value_of_letters_is_set_apart_from_its_key() -> None:
    assert names("algorithm.batch_order=data,finish") == ["batch_order_data", "batch_order_finish"]


def test_values_that_look_alike_or_are_too_long_give_numbers() -> None:
    assert names('model.path="a/base","b/base"') == ["001", "002"]
    assert names("optimizer.lr=1e-6,3e-6", run_name="x" * 58) == ["001", "002"]


@given(st.lists(st.text(st.characters(exclude_characters=",[]{}\"'"), min_size=1), min_size=1, max_size=4))
def test_every_name_is_a_run_name_and_unique(values: list[str]) -> None:
    try:
        axes = grid.parse_axes([f"model.path={','.join(values)}", "run.seed=0,1"])
    except UserError:
        return
    found = [one.name for one in grid.combinations(axes, "quick")]
    assert len(set(found)) == len(found)
    for name in found:
        RunSection(name=f"quick-{name}")
