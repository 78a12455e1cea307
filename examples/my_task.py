"""A task of your own in one file: guess a hidden number with a scale that says "higher" or "lower".

Name it in the run file:

    [task]
    name = "examples/my_task.py:GuessNumber"
    options = { largest = 100 }

Any Hugging Face model folder with a fast tokenizer will do; the environment speaks text, encoded with that model's own
tokenizer.
"""

from __future__ import annotations

import random
import re

from libra_hpc.tasks.base import Episode, PolicyTurn, Task, TaskTokenizer, Tools, Turn
from libra_hpc.tasks.tool_outcome import signal_of


def weigh(hidden: int, guess: int) -> str:
    """The tool: runs in a sandboxed process, takes and returns plain values."""
    return "equal" if guess == hidden else "higher" if hidden > guess else "lower"


class Guess(Episode):
    """One game."""

    def __init__(self, task: GuessNumber, hidden: int, prompt_id: str) -> None:
        self.prompt_id = prompt_id
        self.prompt = task.tokenizer.encode(
            f"I think of a number from 1 to {task.largest}. Write one guess per line.\n"
        )
        self.max_tokens = 16
        self.stop_ids = tuple(i for i in (task.tokenizer.id_of("\n"), task.tokenizer.eos_id) if i is not None)
        self.task, self.hidden, self.turns = task, hidden, 0

    async def step(self, turn: PolicyTurn, tools: Tools) -> Turn:
        """The policy wrote a line: weigh it, and say more or end the game."""
        self.turns += 1
        number = re.search(r"\d{1,9}", self.task.tokenizer.decode(turn.tokens))
        if number is None:
            return Turn.end(0.0, turns=self.turns)
        result = await tools.call("weigh", self.hidden, int(number[0]))
        if result.value == "equal":
            return Turn.end(1.0 / self.turns, turns=self.turns)
        if self.turns == self.task.max_turns:
            return Turn.end(0.0, turns=self.turns)
        answer = self.task.tokenizer.encode(f"{result.value}\n")
        return Turn(answer, [signal_of("weigh", result, len(answer))])


class GuessNumber(Task):
    """Constructor arguments after ``seed`` are the options of the run file."""

    tools = {"weigh": weigh}

    def __init__(self, tokenizer: TaskTokenizer, *, seed: int = 0, largest: int = 100, max_turns: int = 10) -> None:
        super().__init__(tokenizer, seed=seed)
        self.largest, self.max_turns = largest, max_turns

    def open(self, index: int, sample: int, progress: float) -> Guess:
        """Prompt ``index`` hides the same number for all its samples."""
        prompt_id = f"guess-{self.seed}-{index}"
        return Guess(self, random.Random(prompt_id).randint(1, self.largest), prompt_id)
