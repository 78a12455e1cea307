"""The workloads of the pages as one run on real parts: rows and a reward function, chats with tools, reasoning-gym."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from libra_hpc.facts.rundir import read_lines
from libra_hpc.rollout.records import transcripts
from tests.endpoint.verifiers_environment import GREETINGS, verifiers_python
from tests.example_files import EXAMPLES, KEYCHAIN_TASK

from .runs import ENGINE_MARKS, Case

pytestmark = ENGINE_MARKS
STEPS = 3
PROGRAM = """
import json, os, sys, urllib.request
messages = [dict(role='user', content=sys.argv[1])]
for _ in range(2):
    body = json.dumps(dict(model='policy', messages=messages, max_tokens=16)).encode()
    headers = dict(Authorization='Bearer ' + os.environ['OPENAI_API_KEY'])
    request = urllib.request.Request(os.environ['OPENAI_BASE_URL'] + '/chat/completions', body, headers)
    answer = json.load(urllib.request.urlopen(request))['choices'][0]['message']
    messages += [answer, dict(role='user', content='go on')]
"""
"""An agent of two turns that has only Python."""
TASKS = f"""
[[task.train]]
name = "shop"
task = "{EXAMPLES}/my_chat_task.py:Shop"
options = {{ articles = 2 }}
[[task.train]]
name = "sums"
task = "{EXAMPLES}/my_gym_task.py:Sums"
[[task.train]]
name = "rows"
data = "{EXAMPLES}/my_data.jsonl"
prompt = "problem"
reward = "{EXAMPLES}/my_reward.py:score"
options = {{ max_tokens = 24 }}
[[task.train]]
name = "legs"
task = "reasoning_gym:leg_counting"
options = {{ max_tokens = 24 }}
[[task.train]]
name = "agent"
agent = "{EXAMPLES}/my_agent.py:run"
data = "{EXAMPLES}/my_data.jsonl"
reward = "{EXAMPLES}/my_agent.py:solved"
options = {{ max_tokens = 32 }}
[[task.train]]
name = "program"
command = ["{sys.executable}", "-IS", "-c", {json.dumps(PROGRAM)}, "{{problem}}"]
data = "{EXAMPLES}/my_data.jsonl"
reward = "{EXAMPLES}/my_agent.py:solved"
[[task.eval]]
name = "held"
task = "{EXAMPLES}/my_gym_task.py:Sums"
prompts = 4
"""
SCRIPT = """
curl -s $OPENAI_BASE_URL/chat/completions -H "Authorization: Bearer $OPENAI_API_KEY" \
  -d "{\\"messages\\": [{\\"role\\": \\"user\\", \\"content\\": \\"$1\\"}], \\"max_tokens\\": 16}" >answer.txt
"""
ANTHROPIC = """
from anthropic import AsyncAnthropic
async def run(row, endpoint, box):
    async with AsyncAnthropic(base_url=endpoint.url.removesuffix("/v1"), api_key=endpoint.key) as client:
        messages = [{"role": "user", "content": row["problem"]}]
        for _ in range(2):
            made = await client.messages.create(model="policy", max_tokens=16, messages=messages)
            content = [one.model_dump(exclude_none=True) for one in made.content]
            messages += [{"role": "assistant", "content": content}, {"role": "user", "content": "go on"}]
"""
TESTS = f"""
async def tests(row, box):
    ran = await box.run("test -s answer.txt && ls /tests/my_agent.py", mount={{"/tests": "{EXAMPLES}"}})
    return {{"reward": float(ran.exit_code == 0), "seen": float("my_agent" in ran.output)}}
"""
"""The reward of `SCRIPT`, by files that it could not see."""
ENV_NODES = """
planner = { nodes = 0 }
env = { partition = "cpu", nodes = 2, cpus = 1, mem = "4G", seats = 24 }
"""
LOST = 4
"""Rank of the second environment node."""
AGENTS = f"""
[[task.train]]
name = "anthropic"
agent = "claude.py:run"
data = "{EXAMPLES}/my_data.jsonl"
reward = "{EXAMPLES}/my_agent.py:solved"
[[task.train]]
name = "repair"
command = ["sh", "-c", {json.dumps(SCRIPT)}, "sh", "{{problem}}"]
data = "{EXAMPLES}/my_data.jsonl"
reward = "repair.py:tests"
[[task.train]]
name = "verifiers"
verifiers = {{ taskset = "{GREETINGS}", python = "PYTHON" }}
"""
"""Beside `TASKS`, what takes long for what it adds."""
WARM_START = """
from pathlib import Path
from bench.chat_model import Lesson, make_chat_model, shopper, summer
shop, sums = "{0}/my_chat_task.py:Shop", "{0}/my_gym_task.py:Sums"
lessons = [Lesson(shop, {{"articles": 2}}, shopper), Lesson(sums, {{}}, summer)]
make_chat_model(Path("{1}"), lessons, steps=120)
"""


@pytest.fixture
def chat_policy(tmp_path: Path) -> Path:
    """A chat model that has just learned how a tool is called."""
    folder = tmp_path / "policy"
    root = EXAMPLES.parent
    subprocess.run([sys.executable, "-c", WARM_START.format(EXAMPLES, folder)], check=True, cwd=root)
    return folder


@pytest.mark.nightly
@pytest.mark.parametrize("more", [False, pytest.param(True, marks=pytest.mark.timeout(2400))], ids=["some", "all"])
def test_what_a_mixture_of_workloads_samples_is_what_it_trains(
    chat_policy: Path, tmp_path: Path, more: bool, request: pytest.FixtureRequest
) -> None:
    """All of them run on two environment nodes, of which one is killed."""
    steps = 2 * STEPS if more else STEPS
    case = Case(tmp_path, chat_policy, "slurm" if more else "local", steps=steps, hybrid=0)
    toy = f'[task]\nname = "{KEYCHAIN_TASK}"\n[task.options]\np_more = 0.5\nnotes = 0\n'
    text = case.run_file.read_text().replace(toy, "")
    names = ["shop", "sums", "rows", "legs", "agent", "program"]
    if more:
        request.getfixturevalue("cluster")
        (tmp_path / "claude.py").write_text(ANTHROPIC)
        (tmp_path / "repair.py").write_text(TESTS)
        text = text.replace('\nplanner = { partition = "cpu", mem = "2G" }\n', ENV_NODES)
        text += AGENTS.replace("PYTHON", str(verifiers_python()))
        names += ["anthropic", "repair", "verifiers"]
    case.run_file.write_text(text + TASKS)
    run = case.submit("-o", f"algorithm.prompts_per_step={len(names)}")
    if more:
        case.wait(case.steps, "the first step")
        (agent,) = [event["pid"] for event in case.events("agent_joined") if event["rank"] == LOST]
        os.kill(agent, signal.SIGKILL)
        case.wait(lambda: case.events("node_lost"), "the loss")
        case.wait(lambda: len(case.steps()) >= STEPS, "steps without the node")
    assert case.ended() == "completed", case.logs()

    lines = list(read_lines(run.metrics))
    assert [line["step"] for line in lines] == list(range(1, steps + 1))
    assert [event["rank"] for event in case.events("node_lost")] == ([LOST] if more else [])
    assert not case.events("recovered"), "the ranks did not restart"
    for line, path in zip(lines, transcripts.steps(run.transcripts).values(), strict=True):
        records = list(transcripts.read(path))
        assert Counter(one.task for one in records) == dict.fromkeys(names, 4)
        said = [len(ids) for one in records for who, ids in one.segments() if who == "policy"]
        assert sum(said) == line["gen_tokens"] == line["loss_tokens"], "tokens trained are the tokens sampled"
        # Older samples have another policy, which training has changed.
        assert line["staleness_max"] or line["logprob_gap"] < 1e-3, "in the context in which they were sampled"
        assert {"shop/reward", "sums/tool_calls", "rows/brief", "legs/turns"} <= line.keys()
        assert (line["program/turns"], line["program/samples"]) == (2, 1)
        failed = {key for key, value in line.items() if key.endswith("/agent_failed") and value}
        assert failed <= {"verifiers/agent_failed"}, "the task of Eve"
        for name, turns in {"anthropic": 2, "repair": 1, "verifiers": 2}.items() if more else ():
            assert (line[f"{name}/turns"], line[f"{name}/samples"]) == (turns, 1)
        assert not more or line["repair/seen"] == 1, "files for the reward alone"
    assert sum(line["shop/tool_calls"] for line in lines) > 0
    texts = case.cli("show", str(run.path), "--step", "1", "--task", "shop").stdout
    assert "What does this cost" in texts
    evaluated = list(read_lines(run.evaluations))
    assert [(line["task"], line["step"], line["prompts"], line["failed"]) for line in evaluated] == [
        ("held", 0, 4, 0),
        ("held", steps, 4, 0),
    ]
