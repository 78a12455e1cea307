"""Programs of public agent libraries train at the first try: each token once, in the context where it was sampled."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from libra_hpc.endpoint.agent_task import AgentEnvironment, AgentTask
from libra_hpc.files import cache_folder
from libra_hpc.tasks.tokenizer import TaskTokenizer

from .played import call, play, write_rows
from .test_agents import AGENTS, continued

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
    "openai": "openai==3.57.0 anthropic==2.14.0",
    "openai-agents": "openai-agents==0.24.0 mcp==2.3.0",
    "pydantic-ai": "pydantic-ai-slim[openai,anthropic]==2.68.0",
    "langgraph": "langgraph==1.2.24 langchain==1.5.2 langchain-openai==1.7.4",
    "smolagents": "smolagents[openai]==1.26.0",
    "litellm": "litellm==1.110.2",
    "mini-swe-agent": "mini-swe-agent==2.4.6",
    "autogen": "autogen-agentchat==0.7.5 autogen-ext[openai]==0.7.5",
    "strands": "strands-agents[openai]==1.62.0",
    "dspy": "dspy==3.4.1",
    "google-adk": "google-adk==2.13.0 litellm==1.110.2",
    "crewai": "crewai==1.15.30",
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
    refused: str = ""
    """The field that the endpoint's answer names; empty: the program is right."""


TABLE = (
    Program("openai_chat", "openai"),
    Program("openai_streamed", "openai"),
    Program("openai_required", "openai", refused="tool_choice"),
    Program("openai_responses", "openai"),
    Program("anthropic_messages", "openai"),
    Program("anthropic_runner", "openai"),
    Program("openai_agents", "openai-agents"),
    Program("openai_agents_chat", "openai-agents"),
    Program("mcp_tool", "openai-agents"),
    Program("pydantic_ai", "pydantic-ai"),
    Program("pydantic_ai_responses", "pydantic-ai"),
    Program("pydantic_ai_anthropic", "pydantic-ai"),
    Program("langgraph", "langgraph"),
    Program("smolagents", "smolagents", (*LOOKS[:2], LAST), samples=3, unenforced="accept"),
    Program("smolagents_code", "smolagents", CODE, samples=2),
    Program("litellm", "litellm"),
    Program("mini_swe_agent", "mini-swe-agent", BASH),
    Program("autogen", "autogen"),
    Program("strands", "strands"),
    Program("dspy", "dspy", (*REACT, FOUND), samples=3),
    Program("google_adk", "google-adk"),
    Program("crewai", "crewai"),
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
@pytest.mark.parametrize(
    "program", [pytest.param(one, id=one.name, marks=pytest.mark.xdist_group(one.environment)) for one in TABLE]
)
async def test_a_program_is_right_or_is_refused_by_name(
    tokenizer: TaskTokenizer, tmp_path: Path, program: Program
) -> None:
    folder, turns = environment_of(program), iter(program.turns)
    env = {"mounts": [str(folder), str(PROGRAMS)], "unenforced": program.unenforced, "limits": {"wall_s": 120}}
    task = AgentTask(
        tokenizer,
        data=write_rows(tmp_path, {"prompt": "What is there?"}),
        command=[f"{folder}/bin/python", "-P", str(PROGRAMS), program.name, "{prompt}"],
        reward=f"{AGENTS}:found_a_key",
    ).make({"env": env})
    assert isinstance(task, AgentEnvironment)
    if program.refused:
        with pytest.raises(RuntimeError, match=program.refused):
            await play(task, lambda context: next(turns))
        return
    played = await play(task, lambda context: next(turns), room=16384)
    assert (played.end.info["agent_failed"], played.end.reward) == (0, 1)
    assert (len(played.turns), played.samples) == (len(program.turns), program.samples)
    assert program.samples > 1 or continued(played)
