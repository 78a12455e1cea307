"""Cross-field checks as pure functions of configuration and model shape, and the checks of files."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import pytest

from libra_hpc.config.run import RunConfig
from libra_hpc.errors import UserError
from libra_hpc.preflight import checks
from libra_hpc.tasks.registry import BUILTIN, task_class

MODEL = {
    "model_type": "qwen3", "hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 96,
    "vocab_size": 128, "num_hidden_layers": 6, "max_position_embeddings": 8192,
}  # fmt: skip


GPUS = {"train": 8, "hybrid": 8, "rollout": 4}


def configured(**sections: Any) -> RunConfig:
    return RunConfig.model_validate(sections)


def messages(config: RunConfig, model: dict[str, Any] | None = MODEL) -> list[str]:
    return [str(error) for error in checks.problems(config, model)]


def test_the_default_configuration_has_no_problem() -> None:
    assert messages(RunConfig()) == []


@pytest.mark.parametrize(
    ("sections", "sentence"),
    [
        ({"components": {"planner": {"nodes": 2}}}, "components.planner.nodes = 2: rank 0 is the one planner; valid: 1."),
        ({"components": {"train": {"nodes": 0}}}, "components.train.nodes = 0"),
        ({"components": {"rollout": {"nodes": 0}}}, "components.rollout.nodes = 0"),
        ({"rollout": {"policy": "cmlqf"}}, "(did you mean 'cmlfq'?)"),
        ({"rollout": {"policy": "oracle"}}, "rollout.policy = 'oracle': this policy runs in the simulator only"),
        ({"algorithm": {"prompts_per_step": 2, "group_size": 2, "minibatches": 5}}, "algorithm.minibatches = 5: a global batch has 4 trajectories"),
        ({"slurm": {"time_limit": "1h"}}, "slurm.time_limit = '1h': malformed"),
        ({"slurm": {"time_limit": "0"}}, "slurm.time_limit = '0': no time at all"),
        ({"train": {"tp": 3}}, "train.tp = 3: does not divide the model's num_attention_heads = 8; valid: 1, 2, 4, 8."),
        ({"train": {"tp": 8}}, "train.tp = 8: does not divide the model's num_key_value_heads = 4"),
        ({"train": {"pp": 4}}, "train.pp = 4: does not divide the model's num_hidden_layers = 6; valid: 1, 2, 3, 6."),
        ({"rollout": {"tp": 3}}, "rollout.tp = 3: does not divide"),
        ({"rollout": {"tp": [1, 3]}}, "rollout.tp = 3: does not divide"),
        (
            {"rollout": {"tp": [1, 2, 4]}, "components": {"hybrid": {"nodes": 1}}},
            "rollout.tp = [1, 2, 4]: a list has one entry for each of the 1 hybrid and 1 rollout nodes, in this order, and this one has 3;",
        ),
        ({"rollout": {"engines_per_node": []}}, "rollout.engines_per_node = []: a list has one entry for each"),
        (
            {
                "slurm": {"device": "cuda"}, "rollout": {"tp": [1, 2, 8]},
                "components": {"train": {"gpus": 1}, "hybrid": {"nodes": 1, "gpus": 2}, "rollout": {"nodes": 2, "gpus": 4}},
            },
            "rollout.tp = 8: rollout.tp * rollout.engines_per_node needs 8 GPUs and components.rollout has 4 per node",
        ),
        ({"rollout": {"max_model_len": 9000}}, "rollout.max_model_len = 9000: the model's max_position_embeddings is 8192"),
        (
            {"slurm": {"device": "cuda"}, "rollout": {"tp": 2, "engines_per_node": 4}, "components": {n: {"gpus": g} for n, g in GPUS.items()}},
            "rollout.engines_per_node = 4: rollout.tp * rollout.engines_per_node needs 8 GPUs and components.rollout has 4 per node",
        ),
        ({"slurm": {"device": "cuda"}, "components": {"hybrid": {"nodes": 0}, "rollout": {"gpus": 1}}}, "train.tp = 1: train.tp * train.pp needs 1 GPUs"),
    ],
)  # fmt: skip
def test_problems_name_field_value_and_limit(sections: dict[str, Any], sentence: str) -> None:
    found = messages(configured(**sections))
    assert found
    assert any(sentence in message for message in found), found
    assert all(message.endswith(".") for message in found)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"model_type": "mistral"}, "model.path: model_type = 'mistral': this version cannot train this architecture; valid: llama, qwen2, qwen3."),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "model.path: type = 'yarn': the trainer has no such rotary embedding; valid: default, llama3."),
        ({"hidden_size": None}, "model.path: the model's config has no 'hidden_size'; valid: an integer >= 1."),
        ({"num_hidden_layers": "six"}, "model.path: num_hidden_layers = 'six': is no count; valid: an integer >= 1."),
    ],
)
def test_a_model_that_cannot_be_trained_is_refused_before_its_parallelism(change: dict[str, Any], sentence: str) -> None:
    assert str(next(checks.problems(configured(train={"tp": 3}), {**MODEL, **change}))) == sentence


def test_nodes_of_different_degree_that_fit_are_no_problem() -> None:
    gpus = {"train": {"gpus": 1}, "hybrid": {"nodes": 1, "gpus": 2}, "rollout": {"nodes": 2, "gpus": 4}}
    assert messages(configured(slurm={"device": "cuda"}, rollout={"tp": [2, 1, 2], "engines_per_node": [1, 4, 2]}, components=gpus)) == []
    swapped = messages(configured(slurm={"device": "cuda"}, rollout={"tp": [4, 1, 1], "engines_per_node": 1}, components=gpus))
    assert swapped == ["rollout.tp = 4: rollout.tp * rollout.engines_per_node needs 4 GPUs and components.hybrid has 2 per node; valid: a product <= 2."]


def test_more_processes_than_cpus_is_no_problem() -> None:
    assert messages(configured(train={"tp": 4}, components={"train": {"cpus": 1}})) == []


def model_folder(tmp_path: Path, without: str = "") -> str:
    folder = tmp_path / "model"
    folder.mkdir()
    for name, text in {"config.json": json.dumps(MODEL), "tokenizer.json": "{}", "model.safetensors": ""}.items():
        if name != without:
            (folder / name).write_text(text)
    return str(folder)


def test_a_complete_model_folder(tmp_path: Path) -> None:
    assert checks.read_model_config(configured(model={"path": model_folder(tmp_path)})) == MODEL


@pytest.mark.parametrize("without", ["config.json", "tokenizer.json", "model.safetensors"])
def test_incomplete_model_folders(tmp_path: Path, without: str) -> None:
    with pytest.raises(UserError, match=r"model\.path = .*the folder has no "):
        checks.read_model_config(configured(model={"path": model_folder(tmp_path, without)}))


def test_task_files_are_parsed_and_never_run(tmp_path: Path) -> None:
    task = tmp_path / "task.py"
    task.write_text("raise SystemExit('imported')\nclass Mine: pass\n")
    checks.check_task(f"{task}:Mine")
    with pytest.raises(UserError, match=r"defines no class 'Mien'; valid: Mine \(did you mean 'Mine'\?\)"):
        checks.check_task(f"{task}:Mien")
    task.write_text("class Mine:\n    def __init__(self, tokenizer, turns, *, seed=0): pass\nclass Any:\n    def __init__(self, tokenizer, **options): pass\n")
    checks.check_task(f"{task}:Mine", ["turns", "seed"])
    checks.check_task(f"{task}:Any", ["whatever"])
    with pytest.raises(UserError, match=r"task\.options = 'trns': Mine has no such option; valid: turns, seed \(did you mean 'turns'\?\)"):
        checks.check_task(f"{task}:Mine", ["trns"])
    task.write_text("class Mine(:\n")
    with pytest.raises(UserError, match="is not valid Python"):
        checks.check_task(f"{task}:Mine")
    with pytest.raises(UserError, match=r"unknown task; valid: .*\(did you mean 'keychain'\?\)"):
        checks.check_task("keychian")


@pytest.mark.parametrize("name", sorted(BUILTIN))
def test_options_of_a_builtin_task_are_those_its_constructor_names(name: str) -> None:
    taken = list(inspect.signature(task_class(name)).parameters)[1:]
    checks.check_task(name, taken)
    with pytest.raises(UserError, match=f"has no such option; valid: {', '.join(taken)}"):
        checks.check_task(name, ["chess"])


def test_run_directory_checks_make_nothing(tmp_path: Path) -> None:
    checks.check_run_dir(configured(run={"dir": str(tmp_path / "a" / "b")}))
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"run\.dir = .*file is not a folder"):
        checks.check_run_dir(configured(run={"dir": str(tmp_path / "file" / "b")}))


def test_a_warm_start_that_is_not_there_is_named(tmp_path: Path) -> None:
    config = configured(run={"dir": str(tmp_path)}, rollout={"warm_start": str(tmp_path / "absent")}, model={"path": model_folder(tmp_path)})
    with pytest.raises(UserError, match=r"rollout\.warm_start = .*absent does not exist"):
        checks.check_run(config)
