"""Several tasks as one: exact shares of every round of prompts, a data order for each, and names of their own."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from libra_hpc.config.load import validate
from libra_hpc.errors import UserError
from libra_hpc.preflight.named_files import check_tasks
from libra_hpc.protocol.env import evaluation_index
from libra_hpc.tasks.base import PolicyTurn, Task, build_task
from libra_hpc.tasks.mixture import task_order
from libra_hpc.tasks.tokenizer import TaskTokenizer
from tests.example_files import KEYCHAIN_TASK
from tests.host.conftest import OpenSandbox

SCORES = "def score(row, text): return {'reward': row['n'], 'long': float(len(text))}\n"
COUNTS = """
from libra_hpc.tasks.base import Episode, Task, Turn

def reward(number):
    return 10 * number

class Count(Task):
    tools, tool_limits, step_limit_s = {"reward": reward}, {"reward": 44.0}, 55.0
    def open(self, index, sample, progress):
        return Number(index)

class Number(Episode):
    def __init__(self, index):
        self.index, self.closed = index, ""
    async def start(self, tools):
        self.prompt_id, self.prompt, self.max_tokens, self.stop_ids = f"n{self.index}", [1, 2], 4, (3,)
    async def step(self, turn, tools):
        return Turn(done=True, reward=(await tools.call("reward", self.index)).value)
    async def truncated(self, tools):
        return Turn.end(0.25)
    async def close(self, why):
        self.closed = why
"""


@pytest.mark.parametrize("weights", [[3, 1], [1], [2, 4, 6], [5, 3, 1]])
def test_every_round_has_exact_shares_and_none_waits_long(weights: list[int]) -> None:
    order = task_order(weights)
    counts = Counter(order)
    assert [counts[place] * sum(weights) for place in range(len(weights))] == [len(order) * w for w in weights]
    for end in range(1, len(order) + 1):
        for place, weight in enumerate(weights):
            assert abs(order[:end].count(place) - end * weight / sum(weights)) < 1


@pytest.fixture
def mixed(tmp_path_factory: pytest.TempPathFactory, text_folder: Path) -> Task:
    tmp_path = tmp_path_factory.mktemp("mixed")
    (tmp_path / "scores.py").write_text(SCORES)
    (tmp_path / "counts.py").write_text(COUNTS)
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"prompt": "a", "n": {n}}}\n' for n in range(4)))
    parts: list[dict[str, Any]] = [
        {"name": "rows", "data": str(tmp_path / "rows.jsonl"), "reward": f"{tmp_path}/scores.py:score", "weight": 3},
        {"name": "counts", "task": f"{tmp_path}/counts.py:Count"},
    ]
    task = validate({"task": {"train": parts}}).task
    check_tasks(task)
    return build_task(task.name, task.arguments, 7, TaskTokenizer(text_folder))


def test_each_task_has_a_data_order_without_gaps(mixed: Task) -> None:
    opened = [mixed.open(index, 0, 0.0) for index in range(32)]
    counts = [episode._episode.index for episode in opened if type(episode._episode).__name__ == "Number"]  # type: ignore[attr-defined]
    assert counts == list(range(8))
    rows = [episode.prompt_id for episode in opened if type(episode._episode).__name__ != "Number"]  # type: ignore[attr-defined]
    assert sorted(rows) == [f"rows/rows-{epoch}.{number}" for epoch in range(6) for number in range(4)]
    assert mixed.open(5, 0, 0.0).prompt_id == mixed.open(5, 3, 0.5).prompt_id


async def test_tools_and_limits_of_tasks_do_not_meet(mixed: Task, sandbox: OpenSandbox) -> None:
    assert mixed.tools.keys() == {"rows/reward", "counts/reward"}
    assert (mixed.tool_limits, mixed.step_limit_s) == ({"counts/reward": 44.0}, 55.0)
    last = mixed.open(6, 0, 0.0)
    async with sandbox(mixed.tools) as tools:
        await last.start(tools)
        assert (last.prompt_id, last.prompt, last.stop_ids) == ("counts/n1", [1, 2], (3,))
        assert (await last.step(PolicyTurn([3]), tools)).reward == 10
        assert (await last.truncated(tools)).reward == 0.25
        scored = await mixed.open(0, 0, 0.0).step(PolicyTurn(mixed.tokenizer.encode("ab"), "length"), tools)
    assert scored.info["long"] > 0
    await last.close("done")
    assert last._episode.closed == "done"  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("parts", "sentence"),
    [
        ([{"name": "a"}], "task.train.0.data = '': not given"),
        ([{"name": "a", "task": "keychian"}], "task.train.0.task = 'keychian': unknown task"),
        ([{"name": "a", "task": KEYCHAIN_TASK, "options": {"x": 1}}], "task.train.0.options = 'x': KeyChain has"),
        ([{"name": "a"}, {"name": "a"}], "task.train.1.name = 'a': is not"),
        ([{"task": KEYCHAIN_TASK}], "task.train.0.name = '': not given"),
    ],
)
def test_a_mistake_names_the_table(parts: list[dict[str, Any]], sentence: str) -> None:
    with pytest.raises(UserError) as caught:
        check_tasks(validate({"task": {"train": parts}}).task)
    assert sentence in str(caught.value)
    with pytest.raises(UserError, match=r"^task\.data = 'x\.jsonl': is beside \[\[task\.train\]\]"):
        check_tasks(validate({"task": {"data": "x.jsonl", "train": parts}}).task)


def test_an_evaluation_beside_one_task_has_rows_and_tools_of_its_own(tmp_path: Path, text_folder: Path) -> None:
    (tmp_path / "scores.py").write_text(SCORES)
    for name in ("train", "held"):
        (tmp_path / f"{name}.jsonl").write_text(f'{{"prompt": "{name}", "n": 1}}\n')
    rows = {name: str(tmp_path / f"{name}.jsonl") for name in ("train", "held")}
    reward = f"{tmp_path}/scores.py:score"
    given = {
        "data": rows["train"],
        "reward": reward,
        "eval": [{"name": "held", "data": rows["held"], "reward": reward}],
    }
    task = validate({"task": given}).task
    check_tasks(task)
    built = build_task(task.host_task, task.arguments, 0, TaskTokenizer(text_folder))
    assert built.tools.keys() == {"reward", "held/reward"}
    opened = [built.open(index, 0, 0.0) for index in (0, evaluation_index(0, 0))]
    assert [built.tokenizer.decode(one.prompt) for one in opened] == ["train", "held"]
    assert [one.prompt_id for one in opened] == ["train-0.0", "held/held-0.0"]
    given["eval"] = [{"name": "held", "data": rows["train"], "reward": reward}]
    with pytest.raises(UserError, match=r"task\.eval\.0\.data = .*: these rows are trained on"):
        check_tasks(validate({"task": given}).task)


def test_an_evaluation_of_a_task_that_makes_up_its_prompts_has_others_than_training(keychain_folder: Path) -> None:
    task = validate({"task": {"name": KEYCHAIN_TASK, "eval": [{"name": "held", "task": KEYCHAIN_TASK}]}}).task
    built = build_task(task.host_task, task.arguments, 0, TaskTokenizer(keychain_folder))
    trained, held = (
        {tuple(built.open(first + index, 0, 0.0).prompt) for index in range(8)} for first in (0, evaluation_index(0, 0))
    )
    assert not trained & held
