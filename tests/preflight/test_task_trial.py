"""A task that cannot play is refused before anything is queued, by playing it."""

from __future__ import annotations

import os
import re
from contextlib import nullcontext
from pathlib import Path

import pytest

from libra_hpc.config.run import RunConfig
from libra_hpc.errors import UserError
from libra_hpc.preflight import task_trial
from libra_hpc.preflight.task_trial import TaskTrial, try_task
from tests.chat.chat_folder import ROOT, TEMPLATES, write_chat_folder
from tests.example_files import write_text_tokenizer

from .test_checks import MODEL, configured, write_model

GOOD = """
from libra_hpc.tasks.base import Episode, Task, Turn

class Play(Episode):
    prompt_id, prompt, max_tokens, stop_ids = "p", [1, 2], 4, (3,)
    turns = 0
    async def step(self, turn, tools):
        self.turns += 1
        assert turn.tokens == [3]
        assert (await tools.call("double", 2)).value == 4
        return Turn([1]) if self.turns == 1 else Turn(done=True, reward=1.0)

def double(number):
    return 2 * number

class Mine(Task):
    tools = {"double": double}
    def __init__(self, tokenizer, *, seed=0, size=1):
        super().__init__(tokenizer, seed=seed)
    def open(self, index, sample, progress):
        return Play()
"""
WARNED = {
    "a step": ("        assert turn", "        1 / 0\n        assert turn", "fails: ZeroDivisionError"),
    "a reward": ("reward=1.0", "reward=float('nan')", "fails: BadReward: reward is nan"),
    "a task that waits": (
        "        super()",
        "        __import__('time').sleep(60)\n        super()",
        "longer than 3 s",
    ),
    "one that computes": ("        super()", "        while True: pass\n        super()", "computed for more than 1 s"),
}


def tried(config: RunConfig) -> TaskTrial:
    with try_task(config) as outcome:
        return outcome()


NOTHING, PLAYED = TaskTrial([], []), TaskTrial(["played"], [])


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    """A run of ``mine.py:Mine`` with a cache of its own."""
    monkeypatch.setenv("LIBRA_HPC_CACHE", str(tmp_path / "cache"))
    model = write_model(tmp_path / "model", MODEL)
    write_text_tokenizer(model)
    (tmp_path / "mine.py").write_text(GOOD)
    return configured(model={"path": str(model)}, task={"name": f"{tmp_path / 'mine.py'}:Mine"})


def test_a_task_that_cannot_play_is_refused_unless_its_trial_is_skipped(run: RunConfig, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(GOOD.replace("return Play()", "return 1 / 0"))
    with pytest.raises(UserError, match=r"^task\.name = .*its open fails .*; task\.trial = false skips this trial\.$"):
        tried(run)
    assert tried(run.changed(task={"trial": False})) == NOTHING


def test_a_task_may_print(run: RunConfig, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(GOOD.replace("        super()", "        print('loaded')\n        super()"))
    assert tried(run) == NOTHING


@pytest.mark.parametrize(("old", "new", "sentence"), WARNED.values(), ids=WARNED)
def test_what_other_turns_or_nodes_may_do_better_is_a_warning(
    run: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: str, new: str, sentence: str
) -> None:
    if "sleep" in new:
        monkeypatch.setattr(task_trial, "WALL_S", 3.0)
    if "while" in new:
        monkeypatch.setattr(task_trial, "CPU_S", 1)
    (tmp_path / "mine.py").write_text(GOOD.replace(old, new, 1))
    (warning,) = tried(run).warnings
    assert sentence in warning


def test_a_trial_that_passed_is_played_again_once_a_file_of_the_task_changes(
    run: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert tried(run) == NOTHING
    monkeypatch.setattr(task_trial, "_playing", lambda config, python: nullcontext(lambda: PLAYED))
    assert tried(run) == NOTHING
    (tmp_path / "helper.py").write_text("")
    assert tried(run) == PLAYED
    os.unlink(tmp_path / "helper.py")
    assert tried(run) == NOTHING
    assert tried(run.changed(task={"options": {"size": 2}})) == PLAYED


def test_an_interpreter_that_cannot_be_started_is_left_to_its_own_check(run: RunConfig, tmp_path: Path) -> None:
    (warning,) = tried(run.changed(compute={"python": str(tmp_path)})).warnings
    assert "its trial did not run (Permission denied)" in warning


def of_rows(run: RunConfig, folder: Path, score: str, *rows: str) -> RunConfig:
    """The run with data and a reward function."""
    (folder / "rows.jsonl").write_text("\n".join(rows))
    (folder / "scores.py").write_text(f"def score(row, text):\n    return {score}\n")
    data = {"data": str(folder / "rows.jsonl"), "reward": f"{folder / 'scores.py'}:score"}
    return run.changed(task={"name": "data", **data})


def test_data_and_reward_are_tried_on_a_row(run: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good = '{"prompt": "p", "n": 2}'
    assert tried(of_rows(run, tmp_path, "float(row['n'] == len(text))", good)) == NOTHING
    with pytest.raises(UserError, match=r"rows\.jsonl:2: task\.prompt = 'prompt': the column is missing; valid: n"):
        tried(of_rows(run, tmp_path, "1.0", good, '{"n": 3}'))
    with pytest.raises(UserError, match=r"rows\.jsonl:2: not a JSON object"):
        tried(of_rows(run, tmp_path, "1.0", good, '{"n": '))
    with pytest.raises(UserError, match=r"score': it fails \(KeyError: 'm'\) for rows-0\.0 and the text ''"):
        tried(of_rows(run, tmp_path, "row['m']", good))
    with pytest.raises(UserError, match="it returned None, which is no number"):
        tried(of_rows(run, tmp_path, "None", good))


def test_a_program_that_is_not_here_may_be_on_the_nodes(run: RunConfig, tmp_path: Path) -> None:
    write_chat_folder(Path(run.model.path), "plain", "qwen2")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "p"}')
    (tmp_path / "mine.py").write_text("async def reward(row, box):\n    return 1.0\n")
    task = {"name": "agent", "data": str(tmp_path / "rows.jsonl"), "reward": f"{tmp_path / 'mine.py'}:reward"}
    (warning,) = tried(run.changed(task={**task, "command": ["mini-none"]})).warnings
    assert "task.command = ['mini-none']: there is no program 'mini-none' on this machine" in warning


def test_how_the_chat_is_written_is_found_once_and_remembered(
    run: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_chat_folder(Path(run.model.path), "plain", "qwen2")
    chat = run.changed(task={"name": f"{ROOT / 'examples' / 'my_chat_task.py'}:Shop"})
    (fact,) = tried(chat).facts
    assert re.fullmatch(r"chat: template \w{12}, tool calls as json, \d+ self-tests passed", fact)
    monkeypatch.setattr(task_trial, "_playing", lambda config, python: nullcontext(lambda: PLAYED))
    assert tried(chat) == TaskTrial([], [fact])


def test_a_chat_that_cannot_be_continued_exactly_is_one_sentence(run: RunConfig) -> None:
    write_chat_folder(Path(run.model.path), TEMPLATES["plain"].replace("<tool_call>", "<call>"), "qwen2")
    with pytest.raises(UserError, match=r"chat template cannot be continued token by token .*; task\.trial = false"):
        tried(run.changed(task={"name": f"{ROOT / 'examples' / 'my_chat_task.py'}:Shop"}))
