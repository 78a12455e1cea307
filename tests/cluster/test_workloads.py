"""The workloads of the pages as one run on real parts: rows and a reward function, chats with tools, reasoning-gym."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from libra_hpc.facts.rundir import read_lines
from libra_hpc.rollout.records import transcripts
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
def test_what_a_mixture_of_workloads_samples_is_what_it_trains(chat_policy: Path, tmp_path: Path) -> None:
    case = Case(tmp_path, chat_policy, "local", steps=STEPS, hybrid=0)
    toy = f'[task]\nname = "{KEYCHAIN_TASK}"\n[task.options]\np_more = 0.5\nnotes = 0\n'
    names = ["shop", "sums", "rows", "legs", "agent", "program"]
    case.run_file.write_text(case.run_file.read_text().replace(toy, "") + TASKS)
    run = case.submit("-o", f"algorithm.prompts_per_step={len(names)}")
    assert case.ended() == "completed", case.logs()

    lines = list(read_lines(run.metrics))
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    for line, path in zip(lines, transcripts.steps(run.transcripts).values(), strict=True):
        records = list(transcripts.read(path))
        assert Counter(one.task for one in records) == dict.fromkeys(names, 4)
        said = [len(ids) for one in records for who, ids in one.segments() if who == "policy"]
        assert sum(said) == line["gen_tokens"] == line["loss_tokens"], "tokens trained are the tokens sampled"
        # Older samples have another policy, which training has changed.
        assert line["staleness_max"] or line["logprob_gap"] < 1e-3, "in the context in which they were sampled"
        assert {"shop/reward", "sums/tool_calls", "rows/brief", "legs/turns"} <= line.keys()
        assert (line["program/turns"], line["program/samples"]) == (2, 1)
        assert not [key for key, value in line.items() if key.endswith("/agent_failed") and value]
    assert sum(line["shop/tool_calls"] for line in lines) > 0
    texts = case.cli("show", str(run.path), "--step", "1", "--task", "shop").stdout
    assert "What does this cost" in texts
    evaluated = list(read_lines(run.evaluations))
    assert [(line["task"], line["step"], line["prompts"], line["failed"]) for line in evaluated] == [
        ("held", 0, 4, 0),
        ("held", STEPS, 4, 0),
    ]
