"""A chat with two tools: what does an order cost? The policy looks up prices, and computes with Python.

[task]
name = "examples/my_chat_task.py:Shop"
options = { articles = 2 }
"""

import random

from libra_hpc.chat.chat_task import Chat, ChatTask, tool
from libra_hpc.tasks.base import ToolResult, Tools

ARTICLES = ("bread", "cheese", "honey", "rice", "salt", "tea")


class Shop(ChatTask):
    def __init__(self, tokenizer, *, seed: int = 0, articles: int = 3) -> None:
        super().__init__(tokenizer, seed=seed)
        self.articles = articles

    def row(self, index: int) -> dict:
        draw = random.Random(f"{self.seed}-{index}")
        order = {name: draw.randint(2, 20) for name in draw.sample(ARTICLES, self.articles)}
        prices = {name: draw.randint(2, 99) for name in ARTICLES}
        return {"prompt": f"What does this cost: {order}? Answer with a number.", "order": order, "prices": prices}

    @tool
    async def price(self, row: dict, article: str) -> int:
        """Price of one article."""
        if article not in row["prices"]:
            raise ValueError(f"there is no {article!r}; articles: {', '.join(ARTICLES)}")
        return row["prices"][article]

    @tool(timeout_s=60)
    async def python(self, box: Tools, code: str) -> ToolResult:
        """Run Python code and return what it prints."""
        return await box.python(code)

    async def reward(self, row: dict, chat: Chat, box: Tools) -> float:
        return float(chat.text.strip() == str(sum(n * row["prices"][name] for name, n in row["order"].items())))
