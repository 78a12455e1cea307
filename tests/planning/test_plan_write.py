"""`libra-hpc plan --write`: every row that `plan` prints is a run file that passes `check`."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import msgspec
import pytest

from libra_hpc.config.load import load_run_file, validate, with_values
from libra_hpc.config.run_file_text import edited
from libra_hpc.errors import UserError
from libra_hpc.models.host_memory import HostRoom, NodeWork, node_memory
from libra_hpc.models.shapes import model_shape
from libra_hpc.planning.best_plan import best_plans
from libra_hpc.planning.initial import row_values
from libra_hpc.planning.request import request
from libra_hpc.preflight import checked_run
from libra_hpc.preflight.checks import check_run
from libra_hpc.preflight.host_memory_needs import check_hosts, host_needs, node_rooms
from libra_hpc.slurm.queue.query import Partition
from tests.slurm.test_examples import model_folder

from .conftest import Call, run_file

EXAMPLES = Path(__file__).parents[2] / "examples"


def rows(call: Call, *arguments: str) -> int:
    """Plans of the last table: of the split where the planner fills it in."""
    return len(re.findall(r"^ *\S*\d+\+\d+ +TP", call.shown(*arguments).rpartition("train as")[2], re.MULTILINE))


@pytest.mark.parametrize(
    ("example", "model", "nodes", "split"),
    [
        ("a800-48-qwen3-14b", "qwen3-14b", (2, 2, 2), "explicit"),
        ("a800-48-qwen3-8b", "qwen3-4b", (1, 1, 1), "auto"),
        ("a800-8", "qwen3-4b", (1, 0, 1), "auto"),
        ("dry-run", "qwen3-14b", (2, 1, 3), "auto"),
        ("a800-48-qwen3-14b", "qwen3-30b-a3b", (2, 1, 1), "auto"),
    ],
)
def test_every_row_can_be_written_and_passes_the_checks(
    example: str, model: str, nodes: tuple[int, int, int], split: str, tmp_path: Path, call: Call
) -> None:
    folder = model_folder(tmp_path / "policy", model_shape(model))
    set_nodes = [
        f"components.{name}.nodes={count}"
        for name, count in zip(("train", "hybrid", "rollout"), nodes, strict=True)
        if (example, name) != ("a800-8", "hybrid")
    ]
    lines = (EXAMPLES / f"{example}.toml").read_text().splitlines()
    if split == "auto":
        lines = [line for line in lines if line.partition(" =")[0] not in ("tp", "pp", "engines_per_node")]
    (tmp_path / "run.toml").write_text("\n".join(lines) + "\n")
    overrides = [f"components.split={split}", f"model.path={folder}", f"run.dir={tmp_path}", *set_nodes]
    arguments = [part for value in overrides for part in ("-o", value)]
    count = rows(call, *arguments)
    assert count >= 1
    for row in {1, count}:
        call.shown(*arguments, "--write", "chosen.toml", "--choose", str(row), "--force")
        config = load_run_file(tmp_path / "chosen.toml")
        assert config.components.split == "explicit"
        stated = tomllib.loads((tmp_path / "chosen.toml").read_text())
        assert {"tp", "pp", "micro_tokens", "recompute"} <= stated["train"].keys()
        assert {"tp", "engines_per_node"} <= stated["rollout"].keys()
        check_run(config)


@pytest.mark.parametrize("memory_gb", [512, 1024, 2048])
@pytest.mark.parametrize("model", ["qwen3-8b", "qwen3-14b", "qwen3-32b", "qwen3-30b-a3b", "llama-3.1-70b"])
def test_every_plan_fits_in_the_memory_of_real_nodes(model: str, memory_gb: int) -> None:
    known = [Partition("gpu", True, "up", 6, 6, 128, memory_gb * 1000, {"a800": 8}, None)]
    config = validate(run_file(model={"path": model}, algorithm={"prompts_per_step": 64}))
    rooms, shape = node_rooms(config, known), model_shape(model)
    asked = request(config, rooms=rooms)
    if rooms["train"].limit(node_memory(shape, NodeWork(core_nodes=5))) is not None:
        with pytest.raises(UserError, match=r"GB of .* a node, most for weight (image|offers)"):
            best_plans(asked)
        return
    result = best_plans(asked)
    for plan in result.plans:
        written = with_values(config, row_values(config, asked.pools, plan))
        assert check_hosts(host_needs(written, shape, known)) == []
        assert written.train.snapshot_every == (4 if plan.snapshots else 0)
        if not plan.snapshots:
            kept = written.changed(train={"snapshot_every": 4})
            assert rooms["train"].limit(node_memory(shape, NodeWork(snapshots=True, core_nodes=plan.nodes))) is not None
            with pytest.raises(UserError):
                best_plans(request(kept, rooms=rooms), trainers=(0,), nodes=[plan.nodes + 1])


def test_a_plan_whose_nodes_lack_room_for_snapshots_has_none(
    tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = [Partition("gpu", True, "up", 6, 6, 128, 420_000, {"a800": 8}, None)]
    monkeypatch.setattr(checked_run, "slurm_environment", dict)
    monkeypatch.setattr(checked_run, "partitions", lambda environment, *_: known)
    folder = model_folder(tmp_path / "policy", model_shape("qwen3-14b"))
    cuda = ("-o", "slurm.device=cuda", "-o", f"model.path={folder}")
    out = call.shown(*cuda, "--write", "chosen.toml")
    assert "note: its nodes have too little memory for snapshots: train.snapshot_every = 0" in out
    assert load_run_file(tmp_path / "chosen.toml").train.snapshot_every == 0
    err = call.refused(*cuda, "-o", "train.snapshot_every=4")
    assert err.startswith("error: No training layout fits beside a rollout node; nearest: training on 5 nodes, ")


TWO_KINDS = """
# Two kinds of GPU.
[slurm]
device = "cuda"
[components.train]
nodes = 2  # the fast ones
gpus = 8
gpu_type = "h200"
[components.rollout]
nodes = 2
gpus = 8
gpu_type = "a800"
[algorithm]
prompts_per_step = 16
"""


def test_training_on_either_kind_of_node_can_be_written(tmp_path: Path, call: Call) -> None:
    folder = model_folder(tmp_path / "policy", model_shape("qwen3-4b"))
    (tmp_path / "run.toml").write_text(TWO_KINDS)
    arguments = ("-o", f"model.path={folder}", "-o", f"run.dir={tmp_path}", "--best", "9")
    found = call.json(*arguments)["plans"]
    assert {plan["pool"] for plan in found} == {0, 1}
    for row, plan in enumerate(found, start=1):
        call.shown(*arguments, "--write", "chosen.toml", "--choose", str(row), "--force")
        config = load_run_file(tmp_path / "chosen.toml")
        parts = config.components
        assert parts.train.gpu_type == ("a800" if plan["pool"] else "h200")
        assert (parts.train.nodes, parts.train.nodes + parts.hybrid.nodes, parts.rollout.nodes) == (plan["nodes"], 2, 2)
        check_run(config)


def test_comments_survive_and_a_file_is_replaced_by_order_only(tmp_path: Path, call: Call) -> None:
    folder = model_folder(tmp_path / "policy", model_shape("qwen3-4b"))
    (tmp_path / "run.toml").write_text(TWO_KINDS)
    arguments = ("-o", f"model.path={folder}", "--write")
    call.shown(*arguments, "chosen.toml")
    text = (tmp_path / "chosen.toml").read_text()
    assert text.startswith("\n# Two kinds of GPU.\n")
    assert "  # the fast ones\n" in text
    exists = "error: --write = 'chosen.toml': the file exists; valid: another name, or --force.\n"
    assert call.refused(*arguments, "chosen.toml") == exists
    assert (tmp_path / "chosen.toml").read_text() == text


@pytest.mark.parametrize(
    ("options", "sentence"),
    [(("--choose", "99"), "--choose = 99: the table has"), (("--gpus", "16..32"), "a range of --gpus has no one plan")],
)
def test_what_cannot_be_written_is_one_sentence(
    options: tuple[str, ...], sentence: str, tmp_path: Path, call: Call
) -> None:
    folder = model_folder(tmp_path / "policy", model_shape("qwen3-4b"))
    (tmp_path / "run.toml").write_text(TWO_KINDS.replace("h200", "a800"))
    assert sentence in call.refused("-o", f"model.path={folder}", "--write", "chosen.toml", *options)
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


def test_a_plan_counts_the_reference_policys_memory_and_its_pass() -> None:
    model = "qwen3-14b"
    plain = validate(run_file(model={"path": model}))
    config = plain.changed(algorithm={"reference_kl_coef": 0.001})
    before, asked, shape = request(plain), request(config), model_shape(model)
    assert (before.batch.reference, asked.batch.reference) == (None, asked.shape)
    (pool,) = before.pools
    core = msgspec.structs.replace(before.hosts.core, snapshots=False, core_nodes=pool.nodes - 1)
    rooms = dict.fromkeys(("train", "hybrid", "rollout"), HostRoom(node_memory(shape, core).total))
    assert best_plans(request(plain, rooms=rooms)).plans[0].nodes == pool.nodes - 1
    with pytest.raises(UserError, match="of host memory a node"):
        best_plans(request(config, rooms=rooms))
