"""``reasoning_gym:NAME``: a data set of PyPI `reasoning-gym` as a chat task.

- The prompt is the question, behind a system message that explains where the answer stands.
- The answer is the last ``<answer>...</answer>`` of the last turn, else its whole text; the data set scores it.
- Problem i has the seed ``seed + i``; data sets of two seeds of a run are `DISTANCE` apart and share no problem.
- Options are the data set's own and ``max_tokens`` of a turn; a subclass names its `dataset`, and may have tools.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any

from libra_hpc.errors import UserError, invalid
from libra_hpc.tasks.base import Tools
from libra_hpc.tasks.tokenizer import Message, TaskTokenizer

from .chat_task import Chat, ChatTask

DISTANCE = 2**31
"""Problems of a data set, unless the option ``size`` has another number."""
ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


class GymTask(ChatTask):
    """See the module docstring; ``options`` are those of the data set."""

    dataset = ""
    """Its name in `reasoning_gym`."""
    instruction = "End with <answer>your answer</answer>."
    """The system message."""
    work = {"turns": 1}

    def __init__(
        self, tokenizer: TaskTokenizer, *, seed: int = 0, max_tokens: int | None = None, **options: Any
    ) -> None:
        super().__init__(tokenizer, seed=seed)
        self.max_tokens = max_tokens or self.max_tokens
        self.problems = _data_set(self.dataset, {"seed": seed * DISTANCE, "size": DISTANCE, **options})

    def row(self, index: int) -> Any:
        return self.problems[index % len(self.problems)]

    async def open(self, row: Any, box: Tools) -> list[Message]:
        return [{"role": "system", "content": self.instruction}, {"role": "user", "content": row["question"]}]

    async def reward(self, row: Any, chat: Chat, box: Tools) -> float | dict[str, float]:
        found = ANSWER.findall(chat.text)
        return float(self.problems.score_answer(found[-1].strip() if found else chat.text.strip(), row))


@cache
def gym_class(name: str) -> type[GymTask]:
    """The class of ``reasoning_gym:NAME``."""
    dataset = name.partition(":")[2]
    return type(dataset, (GymTask,), {"dataset": dataset})


def _data_set(name: str, options: dict[str, Any]) -> Any:
    try:
        from reasoning_gym.factory import DATASETS, create_dataset
    except ImportError as error:
        raise UserError(
            f"task 'reasoning_gym:{name}' needs the package reasoning-gym on the node that runs tools: pip install"
            " 'reasoning-gym>=0.1.20'."
        ) from error
    if name not in DATASETS:
        raise invalid("task.name", name, "reasoning-gym has no such data set", sorted(DATASETS))
    try:
        return create_dataset(name, **options)
    except (AssertionError, TypeError, ValueError) as error:
        raise invalid("task.options", options, f"reasoning-gym's {name} refuses them ({error})") from error
