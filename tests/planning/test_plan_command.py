"""`libra-hpc plan`: tables that fit, JSON, sweeps, pictures, and mistakes in one sentence."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
from libra_hpc_cli.plan_tables import short_s

from libra_hpc.config.load import validate
from libra_hpc.facts.rundir import RunDir
from libra_hpc.models.shapes import model_shape
from libra_hpc.models.step_times.train_speed import TrainSpeed, save_speed
from libra_hpc.planning.layout_space import LayoutSpace
from libra_hpc.planning.request import DevicePool
from libra_hpc.planning.scaling_curve import ScalingPoint, knee, steps
from libra_hpc.protocol.trace import TrajectoryRecord, TurnRecord
from libra_hpc.traces.read import write_trace
from tests.models.support import device_file
from tests.policies.control.plant_costs import A800, QWEN, fake, question
from tests.slurm.test_examples import model_folder

from .conftest import RUN, Call, run_file


@pytest.mark.parametrize("more", [("--explain",), ("--gpus", "16..32")])
def test_tables_fit_a_hundred_columns(call: Call, more: tuple[str, ...]) -> None:
    out = call.shown(*more)
    assert max(map(len, out.splitlines())) <= 100
    assert "TP8" in out
    assert "tokens/s" in out


def test_the_default_shows_split_limits_and_sources(call: Call) -> None:
    out = call.shown()
    for fact in (
        "qwen3-14b on 48 x a800 (6 nodes of 8), steps from operator tables\n128 trajectories a batch, eta 1 (stages",
        "note: engines run 256 of 384 turns, no step ahead; an update drops KV caches\n",
        "lengths: assumed: 8 turns, prompts of 2,048 tokens, 512 tokens a turn, 128 of a tool, ",
        "TP, PP, CP, EP, DP: tensor, pipeline, context, expert, data parallel",
        "rollout steps: operator tables",
        "played in the simulator, 4 batches of the first row; ±: two errors",
    ):
        assert fact in out
    assert re.search(r"not fit \(--explain for all\).*GB over", out, re.DOTALL)


@pytest.mark.parametrize(
    ("more", "note"),
    [
        (("-o", "task.work.tool_s=600"), "rollout waits for its longest trajectory"),
        (("-o", "planner.model=llama-3.1-70b"), "fits on hybrid nodes too, so it has none"),
    ],
)
def test_a_long_trajectory_and_hybrid_nodes_that_are_left_out_are_noted(
    call: Call, more: tuple[str, ...], note: str
) -> None:
    assert note in " ".join(call.shown(*more).split())
    assert note not in " ".join(call.shown("--gpus", "16").split())


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "0 ms"), (0.00123, "1.2 ms"), (0.0096, "10 ms"), (0.23, "230 ms"), (0.9996, "1.0 s"), (74.26, "74.3 s")],
)
def test_milliseconds_are_whole_where_they_have_two_digits(seconds: float, text: str) -> None:
    assert short_s(seconds) == text


def test_small_figures_keep_two_digits_and_an_empty_exclusion_list_is_stated(call: Call, tmp_path: Path) -> None:
    heads = {"heads": 2, "kv_heads": 2, "head_dim": 32}
    tiny = {"layers": 2, "hidden": 64, "intermediate": 128, "vocab": 256, **heads}
    model_folder(tmp_path / "tiny", msgspec.structs.replace(model_shape("qwen3-4b"), **tiny))
    out = call.shown("-o", "planner.model=tiny", "--explain")
    assert re.search(r"products of layers +\d[.\d]* ms +\d+%", out)
    assert re.search(r"weights +0\.000\d+ ", out)
    assert "nothing was excluded" in out
    assert "because" not in out


def test_json_is_the_whole_result(call: Call) -> None:
    found = call.json("--best", "1")
    (best,) = found["plans"]
    layout = best["train"]["layout"]
    assert layout["tp"] * layout["pp"] * layout["cp"] * layout["dp"] == 8 * best["nodes"]
    assert best["seconds"] > best["train"]["time"]["parts"]["products"]
    assert found["request"]["pools"] == [{"device": "a800", "nodes": 6, "node_devices": 8}]


def test_components_of_two_kinds_are_two_pools(call: Call) -> None:
    found = call.json("-o", "components.rollout.gpu_type=h100")
    pools = [(pool["device"], pool["nodes"], pool["node_devices"]) for pool in found["request"]["pools"]]
    assert pools == [("a800", 4, 8), ("h100", 2, 8)]
    assert {s["pool"] for s in found["plans"][0]["engines"]} <= {0, 1}
    out = call.shown("-o", "components.rollout.gpu_type=h100")
    assert "32 x a800 (4 nodes of 8) + 16 x h100 (2 nodes of 8)" in out
    assert max(map(len, out.splitlines())) <= 100


def test_a_sweep_is_a_curve_with_its_knee(call: Call, tmp_path: Path) -> None:
    found = call.json("--gpus", "16..64", "--plot", "curve.svg")
    assert [p["devices"] for p in found["points"]] == list(range(16, 65, 8))
    speeds = [p["plan"]["tokens_s"] for p in found["points"]]
    assert all(more > 0.9 * fewer for fewer, more in pairwise(speeds)), "each is one play"
    assert 16 < found["knee"] < 64
    assert f">knee at {found['knee']} GPUs</text>" in (tmp_path / "curve.svg").read_text()


def test_a_device_of_the_users_own(call: Call, tmp_path: Path) -> None:
    device_file(tmp_path / "more.toml", memory_bytes=96e9)
    out = call.shown("-o", "planner.devices=more.toml", "-o", "planner.device=mi250x", "--gpus", "32")
    assert out.startswith("qwen3-14b on 32 x mi250x (4 nodes of 8), steps from roofline\n")


FAMILIES = {
    "gemma3_text": {"sliding_window": 1024, "query_pre_attn_scalar": 256},
    "gpt_oss": {"num_local_experts": 32, "num_experts_per_tok": 4, "sliding_window": 128},
    "glm4_moe": {"n_routed_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 1024},
    "qwen3_next": {
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
    },
}


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_family_without_a_table_is_planned_by_the_roofline_and_that_is_said(
    call: Call, tmp_path: Path, kind: str
) -> None:
    sizes = {"hidden_size": 2560, "intermediate_size": 6144, "num_hidden_layers": 24, "vocab_size": 65536}
    sizes |= {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 65536}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, **sizes, **FAMILIES[kind]}))
    shown = call.shown("-o", f"planner.model={tmp_path}", "--gpus", "24")
    assert " on 24 x a800 (3 nodes of 8), steps from roofline\n" in shown


MISTAKES: dict[tuple[str, ...], str] = {
    ("-o", "planner.devices=absent"): "/absent': No such file or directory; valid: ",
    ("--gpus", "99999999"): "--gpus = '99999999': too many to search through; valid: at most 65536.",
    ("-o", "planner.device=a80"): "device = 'a80': unknown device; valid: ",
    ("-o", "components.train.gpu_type=a80"): "components.train.gpu_type = 'a80': unknown device; valid: ",
    ("-o", "planner.model=qwen3-14"): "(did you mean 'qwen3-14b'?)",
    ("-o", "model.path="): "model.path = '': not given; valid: a model folder",
    ("--gpus", "20"): "gpus = 20: nodes have 8 of them and each stage needs a node; valid: a multiple of 8 from 16.",
    ("--gpus", "8..64"): "gpus = 8: nodes have 8",
    ("--gpus", "64..16"): "--gpus = '64..16': an empty range",
    ("--gpus", "many"): "--gpus = 'many': malformed; valid: a number such as 48 or a range such as 16..128.",
    ("-o", "task.work.trace=absent.jsonl"): "absent.jsonl cannot be read",
    ("-o", "task.work.spread=50"): "task.work.spread = 50: out of range; valid: a number >= 0 and <= 5.",
    ("-o", "task.work.turns=0.5"): "task.work.turns = 0.5: out of range; valid: 0, or a number >= 1.",
    ("-o", "task.work.answer_tokens=9e4"): "8 turns of them and a prompt of 2,048 are more than rollout.max_model_len",
    ("-o", "task.work.turn=2"): "task.work.turn = 2: unknown key in [task.work]; valid: ",
    ("-o", "components.hybrid.gpus=0"): "components.hybrid.gpus = 0: the other components have GPUs",
    ("-o", "components.rollout.gpu_type="): "components.rollout.gpu_type = '': the planner has to know the GPU",
    ("--plot", "no/such/folder.svg"): "no/such/folder.svg cannot be written (No such file or directory).",
    ("--plot", "curve.png"): "curve.png: pictures are SVG files; name it curve.svg.",
}


@pytest.mark.parametrize("arguments", MISTAKES)
def test_mistakes_are_one_sentence(call: Call, arguments: tuple[str, ...]) -> None:
    assert MISTAKES[arguments] in call.refused(*arguments)


def test_a_dry_run_is_planned_for_what_it_simulates(call: Call, tmp_path: Path) -> None:
    dry_run = RUN.replace('[model]\npath = "qwen3-14b"\n', '[planner]\nmodel = "qwen3-8b"\n')
    (tmp_path / "run.toml").write_text('[run]\nengine = "simulated"\n' + dry_run)
    assert call.json()["request"]["model"] == "qwen3-8b"


def test_a_model_that_cannot_be_trained_is_planned_for_study(call: Call) -> None:
    cannot = "this version cannot train mixtral-8x7b (a mixture of experts"
    note = f"{cannot} of another kind than Qwen3's); the plan is for study"
    study = ("-o", "planner.model=mixtral-8x7b")
    assert note in " ".join(call.shown(*study).split())
    assert note in call.json(*study)["request"]["notes"]
    assert "cannot train" not in call.shown()


def test_no_gpus_anywhere(call: Call, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text('[model]\npath = "qwen3-14b"\n')
    assert (
        "no GPUs to plan for; valid: a number of GPUs and a gpu_type, or --gpus and planner.device." in call.refused()
    )
    assert "16 x a800" in call.shown("--gpus", "16", "-o", "planner.device=a800")


def test_nothing_heavy_is_imported() -> None:
    code = (
        "import sys, libra_hpc_cli.plan, libra_hpc.models.step_times.lookup as room\n"
        "room.lookup('a800', 'qwen3-14b', 4)\n"
        "print([m for m in ('torch', 'numpy', 'pandas', 'vllm', 'mpi4py') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_points_of_a_sweep() -> None:
    assert steps(2, 6) == [2, 3, 4, 5, 6]
    first, *between, last = steps(2, 1280)
    assert (first, last, len(between)) == (2, 1280, 6)


@pytest.mark.parametrize(
    ("speeds", "found"),
    [
        ((100, 200, 300, 310, 320), 2),
        ((100, 100.2, 100.3, 100.3), 0),
        ((100, 100, 100), 0),
        ((100, 200, 300, 400), None),
        ((100, 110, 130, 200), None),
        ((100, 200), None),
    ],
)
def test_the_knee_is_where_more_devices_stop_to_pay(speeds: tuple[float, ...], found: int | None) -> None:
    made = next(LayoutSpace(question(QWEN, DevicePool(A800, 4, 8), trajectories=64), fake).plans([4], 0))
    points = [ScalingPoint(8 * i, msgspec.structs.replace(made, tokens_s=s)) for i, s in enumerate(speeds, 1)]
    assert knee(points) == found


def test_a_measured_training_speed_replaces_the_assumed_one(call: Call, tmp_path: Path) -> None:
    speed = TrainSpeed(device="a800", model="m", layout="TP8", tokens_s=1.0, mfu=0.2, factor=2.0, samples=())
    save_speed(speed, tmp_path / "speed.json")
    save_speed(msgspec.structs.replace(speed, device="h200"), tmp_path / "other.json")
    assert re.search(
        r"training speed: assumed, \d+% MFU \(measured ones: planner.train_speed\)", call.shown("--best", "1")
    )
    plain, measured = call.json(), call.json("-o", "planner.train_speed=speed.json")
    assert measured["request"]["train_factor"] == 2.0
    assert measured["plans"][0]["train"]["time"]["mfu"] < plain["plans"][0]["train"]["time"]["mfu"]
    assert "measured on h200; valid: one of a800" in call.refused("-o", "planner.train_speed=other.json")


def test_a_run_says_how_fast_its_training_was_and_what_new_weights_took(call: Call, tmp_path: Path) -> None:
    run = RunDir(tmp_path / "earlier")
    run.path.mkdir()
    run.write_json(run.config, validate(run_file()).as_data())
    turns = (TurnRecord(new_tokens=0, gen_tokens=900),)
    write_trace(run.trajectories, [TrajectoryRecord(f"{i}", 0, 100, turns, 1.0) for i in range(8)])
    update = {"diff_s": 0.25, "wire_s": 0.5, "image_s": 0.25, "stage_s": 1.0, "pause_s": 0.125}
    line = {"trained_tokens": 512_000, "train_s": 60.0, "replicas": 1, **update}
    run.metrics.write_text("".join(json.dumps({"step": step, **line}) + "\n" for step in (1, 2, 3)))
    out = call.shown("-o", "planner.train_speed=earlier")
    assert "(2 steps of earlier)" in out
    assert re.search(r"new weights \(measured\): [\d.]+ s until engines at TP\d have them, pause [\d.]+ s", out)
    found = call.json("-o", "planner.train_speed=earlier")["plans"][0]
    assert found["update"]["wire_s"] == 0.75
    assert found["update"]["diff_s"] == pytest.approx(0.25 * 2 / found["nodes"]), "of two nodes"
    assert "new weights (assumed, 3% changed): " in call.shown()
