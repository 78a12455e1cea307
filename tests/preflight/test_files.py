"""The checks of the policy's folder, the task file and the run directory."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest

from libra_hpc.config.learn import EvalPart, TaskSection
from libra_hpc.errors import UserError
from libra_hpc.preflight import named_files
from libra_hpc.preflight.checks import check_files
from libra_hpc.tasks.task_registry import task_class
from tests.example_files import KEYCHAIN_TASK

from .test_checks import MODEL, configured, write_model


def test_a_complete_model_folder(tmp_path: Path) -> None:
    assert named_files.read_model_config(configured(model={"path": str(write_model(tmp_path / "model"))})) == MODEL


@pytest.mark.parametrize("without", ["config.json", "tokenizer.json", "model.safetensors"])
def test_incomplete_model_folders(tmp_path: Path, without: str) -> None:
    with pytest.raises(UserError, match=r"model\.path = .*the folder has no "):
        named_files.read_model_config(configured(model={"path": str(write_model(tmp_path / "model", without=without))}))


def test_task_files_are_parsed_and_never_run(tmp_path: Path) -> None:
    task = tmp_path / "task.py"
    task.write_text("raise SystemExit('imported')\nclass Mine: pass\n")
    named_files.check_tasks(TaskSection(name=f"{task}:Mine"))
    with pytest.raises(UserError, match=r"defines no class 'Mien'; valid: Mine \(did you mean 'Mine'\?\)"):
        named_files.check_tasks(TaskSection(name=f"{task}:Mien"))
    mine, other = "self, tokenizer, turns, *, seed=0", "self, tokenizer, **options"
    task.write_text(f"class Mine:\n def __init__({mine}): pass\nclass Any:\n def __init__({other}): pass\n")
    named_files.check_tasks(TaskSection(name=f"{task}:Mine", options=dict.fromkeys(["turns", "seed"])))
    named_files.check_tasks(TaskSection(name=f"{task}:Any", options=dict.fromkeys(["whatever"])))
    sentence = r"task\.options = 'trns': Mine has no such option; valid: turns, seed \(did you mean 'turns'\?\)"
    with pytest.raises(UserError, match=sentence):
        named_files.check_tasks(TaskSection(name=f"{task}:Mine", options=dict.fromkeys(["trns"])))
    task.write_text("class Mine(:\n")
    with pytest.raises(UserError, match="is not valid Python"):
        named_files.check_tasks(TaskSection(name=f"{task}:Mine"))
    with pytest.raises(UserError, match="unknown task; valid: data, reasoning_gym:NAME, "):
        named_files.check_tasks(TaskSection(name="keychian"))


def test_data_and_reward_of_a_run_file_are_there(tmp_path: Path) -> None:
    rows, score = tmp_path / "rows.jsonl", tmp_path / "my.py"
    rows.write_text("{}")
    score.write_text("raise SystemExit('imported')\nasync def judge(row, text): pass\nclass Mine: pass\n")

    def check(**changes: Any) -> None:
        named_files.check_tasks(TaskSection(**{"data": str(rows), "reward": f"{score}:judge", **changes}))

    check()
    for changes, why in (
        ({"data": "/nope.jsonl"}, "task.data = '/nope.jsonl': no such file or folder"),
        ({"data": "", "name": "data"}, "task.data = '': not given; valid: a JSONL"),
        ({"reward": ""}, "task.reward = '': not given; valid: path/to/file.py:function"),
        ({"reward": "judge"}, "task.reward = 'judge': unknown; valid: path/to/file.py:function"),
        ({"reward": "/nope.py:f"}, "task.reward = '/nope.py:f': /nope.py cannot be read"),
        ({"reward": f"{score}:juge"}, "has no function 'juge'; valid: judge."),
        ({"name": f"{score}:Mine", "options": {}}, ""),
        ({"name": KEYCHAIN_TASK}, "task = 'data': KeyChain has no such option"),
    ):
        if not why:
            check(**changes)
            continue
        with pytest.raises(UserError) as found:
            check(**changes)
        assert why in str(found.value)


def test_options_of_a_task_are_those_its_constructor_names() -> None:
    taken = list(inspect.signature(task_class(KEYCHAIN_TASK)).parameters)[1:]
    named_files.check_tasks(TaskSection(name=KEYCHAIN_TASK, options=dict.fromkeys(taken)))
    with pytest.raises(UserError, match=f"has no such option; valid: {', '.join(taken)}"):
        named_files.check_tasks(TaskSection(name=KEYCHAIN_TASK, options={"chess": 1}))


def test_run_directory_checks_make_nothing(tmp_path: Path) -> None:
    named_files.check_run_dir(configured(run={"dir": str(tmp_path / "a" / "b")}))
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"run\.dir = .*file is not a folder"):
        named_files.check_run_dir(configured(run={"dir": str(tmp_path / "file" / "b")}))


def test_a_warm_start_that_is_not_there_is_named(tmp_path: Path) -> None:
    config = configured(
        run={"dir": str(tmp_path)},
        rollout={"warm_start": str(tmp_path / "absent")},
        model={"path": str(write_model(tmp_path / "model"))},
    )
    with pytest.raises(UserError, match=r"rollout\.warm_start = .*absent does not exist"):
        check_files(config)


def test_a_loop_of_links_as_data_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    rows = {"name": "data", "data": f"{tmp_path}/loop", "reward": "r.py:f"}
    with pytest.raises(UserError, match=r"task\.data = '.*loop': no such file or folder"):
        named_files.check_tasks(configured(task=rows).task)


@pytest.mark.parametrize("name", ["reward", "step_s"])
def test_an_evaluation_has_no_name_of_a_metric(name: str) -> None:
    task = TaskSection(name="keychain", eval=[EvalPart(name=name, task="keychain")])
    with pytest.raises(UserError, match=rf"task\.eval\.0\.name = '{name}': a column of metrics\.jsonl has this name"):
        named_files.check_tasks(task)
