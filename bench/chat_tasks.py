"""Tasks of `bench.chat_cost`: one call of a tool, and the sums of `examples/my_gym_task.py` over the token API."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from libra_hpc.chat.chat_task import Chat, ChatTask, tool
from libra_hpc.chat.gym_task import DISTANCE, GymTask
from libra_hpc.tasks.base import Episode, PolicyTurn, Task, Tools, Turn
from libra_hpc.tasks.tokenizer import TaskTokenizer
from libra_hpc.user_file import load_file

add = load_file(Path(__file__).parents[1] / "examples" / "my_gym_task.py").add
CALL = '<tool_call>\n{"name": "look", "arguments": {"thing": "the train to the lake"}}\n</tool_call>'
SAID = ("<think>\nI look first.\n</think>\n\n" + CALL, "It leaves at nine.")
CALLED = re.compile(r'"expression": "(.*?)"')


class OneLook(ChatTask):
    def row(self, index: int) -> dict[str, str]:
        return {"prompt": f"When does train {index} leave?"}

    @tool
    async def look(self, thing: str) -> str:
        """Look at a thing."""
        return f"{thing}: nine o'clock, platform 3. " * 10

    async def reward(self, row: Any, chat: Chat, box: Any) -> float:
        return 1.0


class HandSums(Task):
    """`examples/my_gym_task.py` over the token API, for the template of `bench.chat_model`."""

    def __init__(self, tokenizer: TaskTokenizer, *, seed: int = 0, **sizes: int) -> None:
        import reasoning_gym

        super().__init__(tokenizer, seed=seed)
        self.problems = reasoning_gym.create_dataset("chain_sum", seed=seed * DISTANCE, size=DISTANCE, **sizes)
        self.end_ids = tokenizer.end_ids

    def open(self, index: int, sample: int, progress: float) -> HandSum:
        return HandSum(self, self.problems[index % DISTANCE], f"sum-{self.seed}-{index}")


class HandSum(Episode):
    def __init__(self, task: HandSums, entry: Any, prompt_id: str) -> None:
        self.prompt_id, self.max_tokens, self.stop_ids, self._turns = prompt_id, 64, task.end_ids, 0
        self._task, self._entry = task, entry
        system = f"<|im_start|>system\n{GymTask.instruction}\n<tool_call>\ncalc: expression<|im_end|>\n"
        user = f"<|im_start|>user\n{entry['question']}<|im_end|>\n<|im_start|>assistant\n"
        self.prompt = task.tokenizer.encode(system + user)

    async def step(self, turn: PolicyTurn, tools: Tools) -> Turn:
        self._turns += 1
        text = self._task.tokenizer.decode(turn.tokens)
        found = CALLED.search(text)
        if found is None or self._turns == 4:
            answers = re.findall("<answer>(.*?)</answer>", text)
            return Turn.end(self._task.problems.score_answer(answers[-1] if answers else text, self._entry))
        try:
            answer = add(found[1])
        except ValueError as error:
            answer = f"error: {error}"
        after = f"\n<|im_start|>user\n<tool_response>\n{answer}\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
        return Turn(self._task.tokenizer.encode(after))
