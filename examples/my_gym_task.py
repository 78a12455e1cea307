"""A data set of reasoning-gym with a calculator: sums that the policy writes down as an expression.

    [task]
    name = "examples/my_gym_task.py:Sums"
    options = { min_terms = 3, max_terms = 3, min_digits = 2, max_digits = 2 }

Without a tool of your own no file is needed: ``name = "reasoning_gym:chain_sum"``.
"""

import re

from libra_hpc.chat.chat_task import tool
from libra_hpc.chat.gym_task import GymTask


def add(expression: str) -> str:
    """Value of a sum of integers; an error reaches the policy as the tool's answer."""
    terms = expression.replace(" ", "")
    if not re.fullmatch(r"[-+]?\d+([-+]\d+)*", terms):
        raise ValueError("not a sum of integers")
    return str(sum(map(int, re.findall(r"[-+]?\d+", terms))))


class Sums(GymTask):
    dataset = "chain_sum"
    max_turns = 4
    max_tokens = 64

    @tool
    async def calc(self, expression: str) -> str:
        """Compute."""
        return add(expression)
