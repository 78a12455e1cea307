"""No agent forges its reward, and none escapes a reward of 0 by what it does to its box."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from libra_hpc.boxes.box import Box
from libra_hpc.boxes.providers import chosen
from libra_hpc.config.job import EnvSection
from libra_hpc.tasks.base import Turn
from libra_hpc.tasks.tokenizer import TaskTokenizer

from . import attacks
from .played import play, task_for

PROGRAM = """
import json, os, sys, urllib.request
body = json.dumps({"model": "policy", "messages": [{"role": "user", "content": "Solve."}]}).encode()
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
urllib.request.urlopen(urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers))
os.environ["PROGRAM"] = sys.orig_argv[-2]
os.execv("/bin/sh", ["sh", "-c", sys.argv[1]])
"""
"""An agent: one turn, then a command."""
TESTS = """
import solution, unittest
class Tests(unittest.TestCase):
    def test_answer(self): self.assertEqual(solution.answer, 42)
"""


async def ended(tokenizer: TaskTokenizer, folder: Path, sandbox: str, answer: int, command: str) -> Turn:
    """The end of an agent that leaves a solution with ``answer``, and then runs ``command``."""
    (folder / "tests").mkdir()
    (folder / "tests/test_hidden.py").write_text(TESTS)
    (folder / "secret").write_text("42\n")
    command = (
        f"echo 42 > answer.txt; echo answer = {answer} > solution.py; {command.replace('SECRET', f'{folder}/secret')}"
    )
    wait_s = 0.6 * command.endswith("sleep 0.1")
    row = {"prompt": command, "tests": str(folder / "tests"), "mounted": sandbox != "none", "wait_s": wait_s}
    argv, judge = [sys.executable, "-IS", "-c", PROGRAM, "{prompt}"], f"{attacks.__file__}:judged"
    task = task_for(tokenizer, folder, row, reward=judge, given={"env": {"sandbox": sandbox}}, command=argv)
    return (await play(task, lambda context: "yes")).end


@pytest.mark.parametrize("sandbox", ["bwrap", "none"])
@pytest.mark.parametrize("name", attacks.ATTACKS)
async def test_no_reward_is_forged_and_no_zero_escaped(
    tokenizer: TaskTokenizer, tmp_path: Path, name: str, sandbox: str
) -> None:
    end = await ended(tokenizer, tmp_path, sandbox, 41, attacks.ATTACKS[name])
    assert (end.done, end.reward, end.info["turns"]) == (True, 0.0, 1)
    if sandbox == "bwrap":
        assert end.info.get("moved_aside", 0.0) == (name in attacks.PLANTED)


@pytest.mark.parametrize("sandbox", ["bwrap", "none"])
@pytest.mark.parametrize("name", attacks.HONEST)
async def test_an_honest_solution_keeps_its_reward(
    tokenizer: TaskTokenizer, tmp_path: Path, name: str, sandbox: str
) -> None:
    assert (await ended(tokenizer, tmp_path, sandbox, 42, attacks.HONEST[name])).reward == 1.0


async def test_the_judge_of_the_page_counts_what_an_exit_code_does_not_show(tmp_path: Path) -> None:
    code = re.search(
        r"^async def counted.*?^```", Path(__file__, "../../../docs/agents.md").resolve().read_text(), re.M | re.S
    )
    assert code is not None
    exec(code[0].removesuffix("```"), judge := dict[str, Any]())
    row = {"cases": [{"input": "1", "output": "1\n"}, {"input": "2", "output": "4\n"}]}
    found = []
    for solution in ("import sys; print(int(sys.argv[1]) ** 2)", "import os; os._exit(0)", "print(1)"):
        box = Box(tmp_path, chosen(EnvSection()), EnvSection())
        await box.write("solution.py", solution)
        found.append((await judge["counted"](row, box))["cases"])
        await box.close()
    assert found == [1.0, 0.0, 0.5]
