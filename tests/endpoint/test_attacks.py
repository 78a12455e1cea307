"""No agent forges its reward, and none escapes a reward of 0 by what it does to its box."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from libra_hpc.endpoint.agent_task import AgentEnvironment, AgentTask
from libra_hpc.tasks.base import Turn
from libra_hpc.tasks.tokenizer import TaskTokenizer
from tests.chat.chat_folder import write_chat_folder

from . import attacks
from .played import play, write_rows

PROGRAM = """
import json, os, sys, urllib.request
body = json.dumps({"model": "policy", "messages": [{"role": "user", "content": "Solve."}]}).encode()
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
urllib.request.urlopen(urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers))
os.execv("/bin/sh", ["sh", "-c", sys.argv[1]])
"""
"""An agent: one turn, then a command."""
TESTS = """
import solution, unittest
class Tests(unittest.TestCase):
    def test_answer(self): self.assertEqual(solution.answer, 42)
"""


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> TaskTokenizer:
    return TaskTokenizer(write_chat_folder(tmp_path_factory.mktemp("policy")))


async def ended(tokenizer: TaskTokenizer, folder: Path, sandbox: str, answer: int, command: str) -> Turn:
    """The end of an agent that leaves a solution with ``answer``, and then runs ``command``."""
    (folder / "tests").mkdir()
    (folder / "tests/test_hidden.py").write_text(TESTS)
    (folder / "secret").write_text("42\n")
    command = (
        f"echo 42 > answer.txt; echo answer = {answer} > solution.py; {command.replace('SECRET', f'{folder}/secret')}"
    )
    row = {"prompt": command, "tests": str(folder / "tests"), "mounted": sandbox != "none"}
    task = AgentTask(
        tokenizer,
        data=write_rows(folder, row),
        command=[sys.executable, "-IS", "-c", PROGRAM, "{prompt}"],
        reward=f"{attacks.__file__}:judged",
    ).make({"env": {"sandbox": sandbox}})
    assert isinstance(task, AgentEnvironment)
    return (await play(task, lambda context: "yes")).end


@pytest.mark.parametrize("sandbox", ["bwrap", "none"])
@pytest.mark.parametrize("name", attacks.ATTACKS)
async def test_no_reward_is_forged_and_no_zero_escaped(
    tokenizer: TaskTokenizer, tmp_path: Path, name: str, sandbox: str
) -> None:
    end = await ended(tokenizer, tmp_path, sandbox, 41, attacks.ATTACKS[name])
    assert (end.done, end.reward, end.info["turns"]) == (True, 0.0, 1)
    if sandbox == "bwrap":
        assert end.info["moved_aside"] == (name in attacks.PLANTED)


@pytest.mark.parametrize("sandbox", ["bwrap", "none"])
@pytest.mark.parametrize("name", attacks.HONEST)
async def test_an_honest_solution_keeps_its_reward(
    tokenizer: TaskTokenizer, tmp_path: Path, name: str, sandbox: str
) -> None:
    assert (await ended(tokenizer, tmp_path, sandbox, 42, attacks.HONEST[name])).reward == 1.0
