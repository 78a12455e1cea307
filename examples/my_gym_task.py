"""A data set of reasoning-gym with a calculator: sums that the policy writes down as an expression.

    [task]
    name = "examples/my_gym_task.py:Sums"
    options = { min_terms = 3, max_terms = 3, min_digits = 2, max_digits = 2 }

Without a tool of your own no file is needed: ``name = "reasoning_gym:chain_sum"``.
"""

from libra_hpc.chat.chat_task import tool
from libra_hpc.chat.gym_task import GymTask
from libra_hpc.tasks.arithmetic import calculate


class Sums(GymTask):
    dataset = "chain_sum"
    max_turns = 4
    max_tokens = 64

    @tool
    async def calc(self, expression: str) -> str:
        """Compute."""
        return calculate(expression)
