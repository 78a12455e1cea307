"""From a run file to the settings of the simulated processes; every mistake one sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from libra_hpc.agent.child_start import child_command
from libra_hpc.config.load import load_run_file, validate
from libra_hpc.config.run import RunConfig
from libra_hpc.errors import UserError
from libra_hpc.preflight.checks import check_run
from libra_hpc.protocol.trace import TrajectoryRecord, TurnRecord
from libra_hpc.simulated.dry_run import in_wall_time, modelled
from libra_hpc.simulated.workload import Groups
from libra_hpc.traces.read import write_trace

EXAMPLE = Path(__file__).parents[2] / "examples" / "dry-run.toml"


def run_file(folder: Path, **sections: dict[str, Any]) -> RunConfig:
    node = {"partition": "a800", "gpus": 8, "gpu_type": "a800"}
    whole: dict[str, dict[str, Any]] = {
        "run": {"engine": "simulated", "dir": str(folder / "runs"), "steps": 4},
        "components": {"train": node, "hybrid": {"nodes": 1, **node}, "rollout": {**node, "gpu_type": "h100"}},
        "algorithm": {"prompts_per_step": 4, "group_size": 2},
        "train": {"tp": 8},
        "rollout": {"tp": 2, "engines_per_node": 4, "max_model_len": 16384},
        "planner": {"model": "qwen3-14b"},
    }
    for name, fields in sections.items():
        whole[name] = {**whole.get(name, {}), **fields}
    return validate(whole)


def test_the_example_is_good_and_has_48_gpus(tmp_path: Path) -> None:
    config = load_run_file(EXAMPLE, [f"run.dir={tmp_path}"])
    check_run(config)
    parts = config.components
    assert sum(part.nodes * part.gpus for part in (parts.train, parts.hybrid, parts.rollout)) == 48


def test_each_component_has_its_device_and_no_model_folder_is_needed(tmp_path: Path) -> None:
    config = run_file(tmp_path)
    check_run(config)
    assert (modelled(config, "train")[0], modelled(config, "rollout")[0]) == ("a800", "h100")
    named = run_file(tmp_path, planner={"device": "h200", "model": "qwen3-8b"})
    assert modelled(named, "train") == ("h200", "", "qwen3-8b")


def test_only_command_lines_distinguish_a_dry_run_from_a_real_run(tmp_path: Path) -> None:
    simulated, real = run_file(tmp_path), run_file(tmp_path, run={"engine": "real"})
    path = Path("/p/r3.0.json")
    for kind, module in (("engine", "engine"), ("trainer", "trainer.worker"), ("host", "host.host")):
        command = child_command(real, kind, path)
        assert command[1:] == ["-m", f"libra_hpc.{module}", "--config", str(path)]
        assert child_command(simulated, kind, path)[2] == f"libra_hpc.simulated.{kind}_process"


def test_planner_times_are_divided_by_the_speedup(tmp_path: Path) -> None:
    seconds = {"interval_s": 10.0, "horizon_s": 500.0, "min_dwell_s": 40.0}
    fields: dict[str, Any] = {**seconds, "margin": 2.0, "moves_per_hour": 6}
    config = in_wall_time(run_file(tmp_path, planner=fields, simulated={"speedup": 20.0}))
    planner = config.planner
    assert (planner.interval_s, planner.horizon_s, planner.min_dwell_s, planner.margin) == (0.5, 25.0, 2.0, 2.0)
    assert planner.moves_per_hour == 120
    assert config.task.name == "simulated"
    real = run_file(tmp_path, run={"engine": "real"}, planner=fields)
    assert in_wall_time(real) is real


def test_generated_work_fills_the_run_and_a_trace_is_grouped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("libra_hpc.simulated.workload.MOST_PROMPTS", 4)
    groups = Groups(run_file(tmp_path, simulated={"presets": ["search", "math", "r2e"]}))
    made = [groups[index] for index in range(17)]
    assert {len(group) for group in made} == {2}
    kinds = [group[0].prompt_id.split("/")[2] for group in made]
    assert kinds == ["search"] * 6 + ["math"] * 5 + ["r2e"] * 5 + ["search"]
    assert made[4] == made[0] == made[16] != made[1], "four are made of each preset"
    assert max(spec.context for group in made for spec in group) <= 16384
    records = [TrajectoryRecord(name, sample, 9, (TurnRecord(0, 5),)) for sample in range(3) for name in "ab"]
    write_trace(tmp_path / "t.jsonl.gz", records)
    groups = Groups(run_file(tmp_path, task={"work": {"trace": str(tmp_path / "t.jsonl.gz")}}))
    grouped = [[(spec.prompt_id, spec.sample) for spec in groups[index]] for index in range(2)]
    assert grouped == [[(name, n) for n in range(3)] for name in "ab"]


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"planner": {"model": "qwen3-15b"}}, r"model = 'qwen3-15b'.*qwen3-14b"),
        ({"planner": {"model": ""}}, r"planner\.model = ''.*model\.path"),
        ({"planner": {"device": "a900"}}, r"device = 'a900'.*did you mean 'a800'"),
        ({"simulated": {"presets": ["maths"]}}, r"simulated\.presets = 'maths'.*did you mean 'math'"),
        ({"task": {"work": {"trace": "/nowhere.jsonl"}}}, r"task\.work\.trace = '/nowhere\.jsonl': cannot be read"),
        ({"simulated": {"calibration": "/nowhere.json"}}, r"/nowhere\.json"),
        ({"simulated": {"speedup": 0.0}}, r"simulated\.speedup = 0\.0: out of range; valid: a number > 0"),
        ({"run": {"engine": "simulate"}}, r"run\.engine = 'simulate'.*did you mean 'simulated'"),
        ({"train": {"tp": 3}}, r"tp = 3"),
        ({"train": {"tp": 1, "ep": 2}}, r"train\.ep = 2: the model has no experts"),
        ({"rollout": {"tp": 4}}, r"rollout\.tp = 4: rollout\.tp \* rollout\.engines_per_node needs 16 GPUs"),
        ({"rollout": {"max_model_len": 1_000_000}}, r"max_model_len = 1000000: the KV cache of qwen3-14b on 2 x a800"),
        (
            {"rollout": {"max_model_len": 8000}, "simulated": {"presets": ["r2e"]}},
            r"rollout.max_model_len = 8000: the longest prompt leaves no room",
        ),
    ],
)
def test_mistakes_are_found_before_anything_is_queued(
    sections: dict[str, dict[str, Any]], message: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=message):
        check_run(run_file(tmp_path, **sections))
