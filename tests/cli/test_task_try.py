"""`libra-hpc task try`: one episode with the turns of a script."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.example_files import EXAMPLES, GUESS, write_text_tokenizer

from .conftest import Cli, one_line


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("policy")
    write_text_tokenizer(folder)
    return str(folder)


def script(folder: Path, *turns: str) -> str:
    path = folder / "turns.txt"
    path.write_text("\n---\n".join(turns) + "\n")
    return str(path)


def test_an_episode_is_printed_with_its_tool_results_and_the_parts_of_its_reward(
    cli: Cli, policy: str, tmp_path: Path
) -> None:
    turns = script(tmp_path, "I say 101", "Then none")
    outcome = cli("task", "try", GUESS, "--policy", policy, "--script", turns)
    assert outcome.code == 0
    parts = [line for line in outcome.out.splitlines() if line.startswith(("--", "=="))]
    assert parts[:-1] == ["-- prompt", "-- policy", "-- tool", "-- environment", "-- policy"]
    assert parts[-1] == "== reward 0, turns 2"
    assert ", 101) -> ok after " in outcome.out
    assert "-- environment\nlower\n" in outcome.out


def test_a_run_file_with_data_and_a_reward_function(cli: Cli, policy: str, tmp_path: Path) -> None:
    task = f'data = "{EXAMPLES / "my_data.jsonl"}"\nprompt = "problem"\nreward = "{EXAMPLES / "my_reward.py"}:score"'
    (tmp_path / "run.toml").write_text(f'[model]\npath = "{policy}"\n[task]\n{task}\n')
    turns = script(tmp_path, "It is 224 or 18 or 2 or 6")
    outcome = cli("task", "try", str(tmp_path / "run.toml"), "--script", turns, "--json", "--prompt", "1")
    found = json.loads(outcome.out)
    assert [part["who"] for part in found["told"]] == ["prompt", "policy", "tool"]
    assert found["info"]["brief"] == 0.1
    assert found["reward"] == found["info"]["correct"] + 0.1


def test_a_context_without_room_ends_truncated(cli: Cli, policy: str, tmp_path: Path) -> None:
    turns = script(tmp_path, *["101"] * 9)
    limit = ("-o", "rollout.max_model_len=40")
    outcome = cli("task", "try", GUESS, "--policy", policy, "--script", turns, *limit)
    assert outcome.code == 0
    assert "truncated 1" in outcome.out.splitlines()[-1]


def test_mistakes_are_one_sentence_and_a_broken_task_an_error(cli: Cli, policy: str, tmp_path: Path) -> None:
    turns = script(tmp_path, "101")
    assert "--policy = '': not given" in one_line(cli("task", "try", GUESS, "--script", turns))
    given = ("--policy", policy, "--script", turns)
    assert "unknown task" in one_line(cli("task", "try", "keychain", *given))
    outcome = cli("task", "try", GUESS, *given)
    assert (outcome.code, outcome.err) == (1, "error: The script has no further turn, and the episode goes on.\n")
    assert "cannot be read" in one_line(cli("task", "try", GUESS, "--policy", policy, "--script", "/none.txt"))
    (tmp_path / "mine.py").write_text(
        "from libra_hpc.tasks.base import Episode, Task\n"
        "class Play(Episode):\n"
        "    prompt_id, prompt, max_tokens, stop_ids = 'p', [1], 4, ()\n"
        "    async def step(self, turn, tools):\n        return {}['x']\n"
        "class Mine(Task):\n    def open(self, index, sample, progress):\n        return Play()\n"
    )
    outcome = cli("task", "try", f"{tmp_path / 'mine.py'}:Mine", *given)
    assert (outcome.code, outcome.err) == (1, "error: The episode failed: KeyError: 'x'\n")
