"""Task names: built in, from a user's file, and every mistake."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from libra_hpc.errors import UserError
from libra_hpc.host.answers import tool_refs
from libra_hpc.tasks.base import build_task, task_class
from libra_hpc.tasks.tokenizer import TaskTokenizer
from tests.example_files import EXAMPLES, KEYCHAIN_TASK, keychain

EXAMPLE = EXAMPLES / "my_task.py"


def test_names_become_classes() -> None:
    assert task_class(KEYCHAIN_TASK) is keychain.KeyChain
    found = task_class(f"{EXAMPLE}:GuessNumber")
    assert found.__name__ == "GuessNumber"
    assert task_class(f"{EXAMPLE}:GuessNumber") is found
    (ref,) = tool_refs(found.tools)
    assert (ref.name, ref.file, ref.qualname) == ("weigh", str(EXAMPLE), "weigh")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("dat", r"'dat': unknown task; valid: data, agent, verifiers, reasoning_gym:NAME, .*:ClassName \(did you"),
        ("", r"task.name = '': neither a task nor rows \(task.data\) are given; valid: data, "),
        ("missing.py:Task", r"no file 'missing.py'"),
        (f"{EXAMPLE}:GuesNumber", r"= 'GuesNumber': .*my_task.py has no such Task class; valid: GuessNumber \(did you"),
        (f"{EXAMPLE}:weigh", r"task.name = 'weigh': .* has no such Task class"),
        (f"{EXAMPLE}:Task", r"'Task' does not define open"),
    ],
)
def test_wrong_names(name: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        task_class(name)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"p_mor": 0.5}, r"task.options = 'p_mor': KeyChain has no such option; valid: .*did you mean 'p_more'"),
        ({"p_more": []}, r"task.options.p_more = \[\]"),
    ],
)
def test_wrong_options(keychain_folder: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        build_task(KEYCHAIN_TASK, options, 0, TaskTokenizer(keychain_folder))


def test_option_seed_goes_before_the_runs(keychain_folder: Path) -> None:
    tokenizer = TaskTokenizer(keychain_folder)
    assert build_task(KEYCHAIN_TASK, {}, 5, tokenizer).seed == 5
    assert build_task(KEYCHAIN_TASK, {"seed": 9}, 5, tokenizer).seed == 9


def test_folder_without_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has no tokenizer\.json"):
        TaskTokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match="cannot be read"):
        TaskTokenizer(tmp_path)


def test_task_modules_import_no_engine() -> None:
    modules = "tiny_policy, base, mixture"
    heavy = ("torch", "transformers", "vllm", "mpi4py", "reasoning_gym")
    found = f"print([m for m in {heavy} if m in sys.modules])"
    code = f"import sys, libra_hpc.host.host; from libra_hpc.tasks import {modules}; {found}"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
