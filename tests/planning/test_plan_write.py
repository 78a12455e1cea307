"""`libra-hpc plan --write`: every row that `plan` prints is a run file that passes `check`."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest

from libra_hpc.config.edit import edited
from libra_hpc.config.load import load_run_file
from libra_hpc.models.shapes import model_shape
from libra_hpc.preflight.checks import check_run
from tests.slurm.test_examples import model_folder

from .conftest import Call

EXAMPLES = Path(__file__).parents[2] / "examples"


def rows(call: Call, *arguments: str) -> int:
    """Plans of the last table: of the split where the planner fills it in."""
    code, out, err = call(*arguments)
    assert code == 0, err
    return len(re.findall(r"^ *\S*\d+\+\d+ +TP", out.rpartition("train as")[2], re.MULTILINE))


@pytest.mark.parametrize(
    ("example", "model", "nodes"),
    [
        ("a800-48-qwen3-14b", "qwen3-14b", (2, 2, 2)),
        ("a800-48-qwen3-14b", "qwen3-8b", (1, 0, 3)),
        ("a800-48-qwen3-8b", "qwen3-8b", (2, 2, 2)),
        ("a800-48-qwen3-8b", "qwen3-4b", (1, 1, 1)),
        ("a800-8", "qwen3-4b", (1, 0, 1)),
        ("dry-run", "qwen3-14b", (2, 1, 3)),
        ("a800-48-qwen3-14b", "qwen3-30b-a3b", (2, 1, 1)),
    ],
)
@pytest.mark.parametrize("split", ["auto", "explicit"])
def test_every_row_can_be_written_and_passes_the_checks(
    example: str, model: str, nodes: tuple[int, int, int], split: str, tmp_path: Path, call: Call
) -> None:
    folder = model_folder(tmp_path / "policy", model_shape(model))
    names = ("train", "hybrid", "rollout")
    counts = dict(zip(names, nodes, strict=True))
    if example == "a800-8":
        del counts["hybrid"]
    set_nodes = [f"components.{name}.nodes={count}" for name, count in counts.items()]
    lines = (EXAMPLES / f"{example}.toml").read_text().splitlines()
    if split == "auto":
        lines = [line for line in lines if line.partition(" =")[0] not in ("tp", "pp", "engines_per_node")]
    (tmp_path / "run.toml").write_text("\n".join(lines) + "\n")
    overrides = [f"components.split={split}", f"model.path={folder}", f"run.dir={tmp_path}", *set_nodes]
    arguments = [part for value in overrides for part in ("-o", value)]
    count = rows(call, *arguments)
    assert count >= 1
    for row in range(1, count + 1):
        code, _, err = call(*arguments, "--write", "chosen.toml", "--choose", str(row), "--force")
        assert code == 0, err
        config = load_run_file(tmp_path / "chosen.toml")
        assert config.components.split == "explicit"
        stated = tomllib.loads((tmp_path / "chosen.toml").read_text())
        assert {"tp", "pp", "micro_tokens", "recompute"} <= stated["train"].keys()
        assert {"tp", "engines_per_node"} <= stated["rollout"].keys()
        check_run(config)


TWO_KINDS = """
# Two kinds of GPU.
[slurm]
device = "cuda"
[components.train]
nodes = 2  # the small ones
gpus = 8
gpu_type = "a800"
[components.rollout]
nodes = 2
gpus = 8
gpu_type = "h200"
[algorithm]
prompts_per_step = 16
"""


def test_training_on_either_kind_of_node_can_be_written(tmp_path: Path, call: Call) -> None:
    folder = model_folder(tmp_path / "policy", model_shape("qwen3-4b"))
    (tmp_path / "run.toml").write_text(TWO_KINDS)
    arguments = ("-o", f"model.path={folder}", "-o", f"run.dir={tmp_path}", "--best", "9")
    found = json.loads(call(*arguments, "--json")[1])["plans"]
    assert {plan["pool"] for plan in found} == {0, 1}
    for row, plan in enumerate(found, start=1):
        code, _, err = call(*arguments, "--write", "chosen.toml", "--choose", str(row), "--force")
        assert code == 0, err
        config = load_run_file(tmp_path / "chosen.toml")
        parts = config.components
        assert parts.train.gpu_type == ("h200" if plan["pool"] else "a800")
        assert (parts.train.nodes, parts.train.nodes + parts.hybrid.nodes, parts.rollout.nodes) == (plan["nodes"], 2, 2)
        check_run(config)


def test_comments_survive_and_a_file_is_replaced_by_order_only(tmp_path: Path, call: Call) -> None:
    folder = model_folder(tmp_path / "policy", model_shape("qwen3-4b"))
    (tmp_path / "run.toml").write_text(TWO_KINDS)
    arguments = ("-o", f"model.path={folder}", "--write")
    assert call(*arguments, "chosen.toml")[0] == 0
    text = (tmp_path / "chosen.toml").read_text()
    assert text.startswith("\n# Two kinds of GPU.\n")
    assert "  # the small ones\n" in text
    code, _, err = call(*arguments, "chosen.toml")
    assert (code, err) == (2, "error: --write = 'chosen.toml': the file exists; valid: another name, or --force.\n")
    assert (tmp_path / "chosen.toml").read_text() == text


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--choose", "99"), "--choose = 99: the table has"),
        (("--gpus", "16..32"), "a range of --gpus has no one plan"),
        (("--layouts", "any"), "--layouts any has layouts that no run has"),
        (("--model", "qwen3-4b"), "--model = 'qwen3-4b': a run needs the weights"),
    ],
)
def test_what_cannot_be_written_is_one_sentence(
    options: tuple[str, ...], sentence: str, tmp_path: Path, call: Call
) -> None:
    folder = model_folder(tmp_path / "policy", model_shape("qwen3-4b"))
    (tmp_path / "run.toml").write_text(TWO_KINDS.replace("h200", "a800"))
    code, _, err = call("-o", f"model.path={folder}", "--write", "chosen.toml", *options)
    assert code == 2
    assert sentence in err
    assert not (tmp_path / "chosen.toml").exists()


def test_values_keep_their_place_and_comment() -> None:
    text = '[a]\n# above\nx = 1  # why\nlist = [\n  1, # one\n  2,\n]\ns = "a # b" # c\n\n[a.b]\ny = 2\n'
    made = edited(text, {"a.x": 5, "a.list": [3], "a.s": "d", "a.new": True, "a.b.z": 1.5, "c.w": "v"})
    assert made == (
        '[a]\n# above\nx = 5  # why\nlist = [3]\ns = "d"  # c\nnew = true\n\n[a.b]\ny = 2\nz = 1.5\n\n[c]\nw = "v"\n'
    )


@pytest.mark.parametrize("text", ["a = { x = 1 }\n", "a.x = 1\n", "[[a]]\nx = 1\n"])
def test_other_forms_are_left_to_a_whole_new_text(text: str) -> None:
    assert edited(text, {"a.x": 2}) is None
