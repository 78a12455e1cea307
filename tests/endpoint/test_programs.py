"""Programs of public agent libraries train at the first try: each token once, in the context where it was sampled."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from libra_hpc.files import cache_folder
from libra_hpc.tasks.tokenizer import TaskTokenizer

from .played import call, play, task_for
from .test_agents import continued

PROGRAMS = Path(__file__).with_name("programs.py")
LOOKS = (call("look", thing="door"), call("look", thing="key"), "It is a key.")
CODE = (
    'Thought: I look.\n<code>\nprint(look("key"))\n</code>',
    'I know it.\n<code>\nfinal_answer("It is a key.")\n</code>',
)
LAST = call("final_answer", answer="It is a key.")
BASH = (
    call("bash", command="printf 'It is a key.' > answer.txt"),
    call("bash", command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"),
)
REACT = [
    f"[[ ## next_thought ## ]]\nI go on.\n\n[[ ## next_tool_name ## ]]\n{tool}\n\n"
    f"[[ ## next_tool_args ## ]]\n{args}\n\n[[ ## completed ## ]]"
    for tool, args in (("look", '{"thing": "key"}'), ("finish", "{}"))
]
FOUND = "[[ ## reasoning ## ]]\nI looked.\n\n[[ ## answer ## ]]\nIt is a key.\n\n[[ ## completed ## ]]"


ENVIRONMENTS = {
    "openai-agents": "openai-agents==0.24.0",
    "langgraph": "langgraph==1.2.24 langchain==1.5.2 langchain-openai==1.7.4",
    "smolagents": "smolagents[openai]==1.26.0",
    "litellm": "litellm==1.110.2",
    "mini-swe-agent": "mini-swe-agent==2.4.6",
    "dspy": "dspy==3.4.1",
}
"""Packages of each environment of Python; nothing of ours is there."""


class Program(NamedTuple):
    """A function of `PROGRAMS`, and what the policy says to it."""

    name: str
    environment: str
    turns: tuple[str, ...] = LOOKS
    samples: int = 1
    unenforced: str = "refuse"
    """``env.unenforced``."""


TABLE = (
    Program("openai_agents", "openai-agents"),
    Program("langgraph", "langgraph"),
    Program("smolagents", "smolagents", (*LOOKS[:2], LAST), samples=3, unenforced="accept"),
    Program("smolagents_code", "smolagents", CODE, samples=2),
    Program("litellm", "litellm"),
    Program("mini_swe_agent", "mini-swe-agent", BASH),
    Program("dspy", "dspy", (*REACT, FOUND), samples=3),
)


def environment_of(program: Program) -> Path:
    """A folder that is made once, from the index of this machine."""
    folder = cache_folder() / "programs" / program.environment
    if not (folder / "made").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        packages = ENVIRONMENTS[program.environment].split()
        subprocess.run([folder / "bin/pip", "install", "--quiet", *packages], check=True)
        (folder / "made").touch()
    return folder


@pytest.mark.nightly
@pytest.mark.parametrize("program", TABLE, ids=[one.name for one in TABLE])
async def test_a_program_of_a_library_is_right(tokenizer: TaskTokenizer, tmp_path: Path, program: Program) -> None:
    folder, turns = environment_of(program), iter(program.turns)
    env = {"mounts": [str(folder), str(PROGRAMS)], "unenforced": program.unenforced, "limits": {"wall_s": 120}}
    argv, row = [f"{folder}/bin/python", "-P", str(PROGRAMS), program.name, "{prompt}"], {"prompt": "What is there?"}
    task = task_for(tokenizer, tmp_path, row, reward="found_a_key", given={"env": env}, command=argv)
    played = await play(task, lambda context: next(turns), room=16384)
    assert (played.end.info["agent_failed"], played.end.reward) == (0, 1)
    assert (len(played.turns), played.samples) == (len(program.turns), program.samples)
    assert program.samples > 1 or continued(played)
