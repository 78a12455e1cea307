"""Tasksets of verifiers are trained through a process in an environment of their own."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from libra_hpc.config.load import validate
from libra_hpc.endpoint.agent_task import AgentEnvironment
from libra_hpc.endpoint.verifiers_task import VerifiersTask
from libra_hpc.errors import OperationError, UserError
from libra_hpc.preflight import task_trial
from libra_hpc.preflight.named_files import check_tasks
from libra_hpc.tasks.tokenizer import TaskTokenizer
from tests.chat.chat_folder import write_chat_folder
from tests.preflight.test_task_trial import tried

from .played import Played, play
from .verifiers_environment import GREETINGS, verifiers_python

TASKS = ["is good", "crashes", "is long", "is slow", "is not scored", "dies", "hangs"]
STUB = Path(__file__).with_name("stub_verifiers")


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Interpreter of an environment with the stand-in of verifiers and an installed taskset."""
    folder = tmp_path_factory.mktemp("vf")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    shutil.copytree(STUB, packages / "verifiers")
    (packages / "verifiers/v1/tasksets/harbor").mkdir(parents=True)
    (packages / "verifiers/v1/tasksets/harbor/__init__.py").touch()
    (packages / "toys.py").write_text(f"TASKS = {TASKS}")
    return folder / "bin/python"


class Made:
    """Tasks of a test; their processes end with it."""

    def __init__(self, tokenizer: TaskTokenizer, python: Path) -> None:
        self._tokenizer, self._python, self.tasks = tokenizer, python, list[VerifiersTask]()

    def __call__(self, taskset: str = "toys", **keys: Any) -> AgentEnvironment:
        task = VerifiersTask(self._tokenizer, taskset=taskset, python=str(self._python), **keys)
        made = task.make({"env": {"limits": {"wall_s": 120.0}}})
        assert isinstance(made, AgentEnvironment)
        self.tasks.append(task)
        return made


@pytest.fixture
def made(tokenizer: TaskTokenizer, python: Path) -> Iterator[Made]:
    made = Made(tokenizer, python)
    yield made
    for task in made.tasks:
        task.process._child.stdin.close()
        assert task.process._child.wait() in (0, 3)


def place_of(task: AgentEnvironment, kind: str) -> int:
    """A prompt of the data order that is the task of this kind."""
    return next(n for n in range(len(TASKS)) if task.open(n, 0, 0.0)._row["index"] == TASKS.index(kind))


async def played(task: AgentEnvironment, kind: str) -> Played:
    return await play(task, lambda context: "yes", place_of(task, kind))


async def test_a_taskset_gives_rows_turns_and_rewards(made: Made, tokenizer: TaskTokenizer) -> None:
    task = made()
    task.check()
    found = await played(task, "is good")
    assert len(task.rows) == len(TASKS)
    assert found.end.reward == 0.5
    assert found.end.info == {"turns": 2, "samples": 1, "agent_failed": 0, "right": 1.0, "long": 2.0}
    assert "go on" in found.texts(tokenizer)[1]
    assert found.contexts[1][: len(found.contexts[0])] == found.contexts[0]


async def test_what_ends_an_episode_has_its_class(made: Made) -> None:
    task = made()
    failed, turns, slow = [(await played(task, kind)).end for kind in ("crashes", "is long", "is slow")]
    assert [one.reward for one in (failed, turns, slow)] == [0.5] * 3, "the reward is asked"
    assert failed.info["agent_failed"] == 1.0
    assert (turns.info["limit_turns"], slow.info["limit_time"]) == (1.0, 1.0)
    with pytest.raises(OperationError, match=r"verifiers has no reward: TaskError: no such answer"):
        await played(task, "is not scored")


async def test_episodes_of_a_process_that_ends_fail_and_the_next_one_starts_another(made: Made) -> None:
    task = made()
    found = await asyncio.gather(*(played(task, kind) for kind in ("dies", "hangs")), return_exceptions=True)
    assert [str(one) for one in found] == ["verifiers has no reward: its process ended with exit code 3"] * 2
    assert (await played(task, "is good")).end.reward == 0.5


async def test_a_dropped_episode_is_stopped_in_the_process(made: Made) -> None:
    task = made()
    episode = task.open(place_of(task, "hangs"), 0, 0.0)
    await episode.start(None)  # type: ignore[arg-type]
    (process,) = [one.process for one in made.tasks]
    assert process._answers
    await episode.close("dropped")
    await asyncio.sleep(0)
    assert not process._answers
    assert (await played(task, "is good")).end.reward == 0.5


def test_a_wrong_taskset_is_found_before_the_queue(
    tokenizer: TaskTokenizer, python: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LIBRA_HPC_CACHE", str(tmp_path))
    monkeypatch.setattr(task_trial, "CPU_S", 60)
    task = {"verifiers": {"taskset": "toyz", "python": str(python)}}
    config = validate({"model": {"path": str(write_chat_folder(tmp_path / "policy"))}, "task": task})
    check_tasks(config.task)
    with pytest.raises(UserError, match=r"task.verifiers.taskset = 'toyz': .*did you mean 'toys'"):
        tried(config)
    assert not tried(config.changed(task={"verifiers": {**task["verifiers"], "taskset": "toys"}})).warnings
    with pytest.raises(
        UserError,
        match=r"task.verifiers.python = '/none': no such program; valid: an environment with envs/verifiers.txt",
    ):
        check_tasks(validate({"task": {"verifiers": {"taskset": "toys", "python": "/none"}}}).task)


def test_mistakes_are_sentences(made: Made, tmp_path: Path, tokenizer: TaskTokenizer) -> None:
    valid = "valid: harbor, an installed taskset, a file.py"
    with pytest.raises(UserError, match=rf"taskset = 'toyz': .* \(did you mean 'toys'\?\); {valid}"):
        made("toyz")
    with pytest.raises(UserError, match=r"task.verifiers.taskset = 'toys': TypeError: .*'most'"):
        made(select={"most": 2})
    (tmp_path / "broken.py").write_text("import os; os._exit(7)")
    with pytest.raises(UserError, match=r"its process ended with exit code 7"):
        made(f"{tmp_path}/broken.py")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "bare"], check=True)
    with pytest.raises(UserError, match="its environment has no verifiers; valid: an environment with"):
        Made(tokenizer, tmp_path / "bare/bin/python")()


@pytest.mark.nightly
@pytest.mark.timeout(1500)
async def test_the_real_verifiers_plays_its_own_harness_and_that_of_a_taskset(tokenizer: TaskTokenizer) -> None:
    made = Made(tokenizer, verifiers_python())
    own, chat = made(str(GREETINGS)), made(str(GREETINGS), env={"agent": {"harness": {"id": "null"}}})
    found = await asyncio.gather(*(play(own, lambda context: "Hello.", index) for index in range(4)))
    assert [one.end.reward for one in found] == [0.5] * 4, "also that of a program that failed"
    assert [one.end.info["agent_failed"] for one in found].count(1.0) == 1
    for one in found:
        known = {name: one.end.info[name] for name in ("turns", "samples", "answered", "replies")}
        assert known == {"turns": 2, "samples": 1, "answered": 1.0, "replies": 2.0}
    alone = await play(chat, lambda context: "Hello.")
    assert (alone.end.reward, alone.end.info["turns"]) == (0.5, 1)
    for task in made.tasks:
        task.process._child.stdin.close()
        assert task.process._child.wait() == 0
