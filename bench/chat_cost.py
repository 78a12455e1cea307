"""What a chat costs its host: CPU time of episodes with one tool call, and of what follows a turn in a long context.

Each episode has two turns, a call of a tool that answers at once, and its answer; the box is not counted. ``--model``
is a folder with a chat template; it needs no weights.

    python -m bench.chat_cost --model FOLDER [--episodes 2000]
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from bench.harness import options, report
from libra_hpc.chat.chat_task import Chat, ChatEnvironment, ChatTask, tool
from libra_hpc.chat.dialects import TAIL
from libra_hpc.tasks.base import PolicyTurn
from libra_hpc.tasks.tokenizer import TaskTokenizer

CALL = '<tool_call>\n{"name": "look", "arguments": {"thing": "the train to the lake"}}\n</tool_call>'
SAID = ("<think>\nI look first.\n</think>\n\n" + CALL, "It leaves at nine.")
LONG = 32_768
"""Tokens of the long context."""
ROUNDS = 200


class OneLook(ChatTask):
    def row(self, index: int) -> dict[str, str]:
        return {"prompt": f"When does train {index} leave?"}

    @tool
    async def look(self, thing: str) -> str:
        """Look at a thing."""
        return f"{thing}: nine o'clock, platform 3. " * 10

    async def reward(self, row: Any, chat: Chat, box: Any) -> float:
        return 1.0


async def play(environment: ChatEnvironment, turns: list[PolicyTurn], index: int) -> None:
    episode, box = environment.open(index, 0, 0.0), object()
    await episode.start(box)  # type: ignore[arg-type]
    for turn in turns:
        done = (await episode.step(turn, box)).done  # type: ignore[arg-type]
    await episode.close("done")
    assert done


async def measure(environment: ChatEnvironment, turns: list[PolicyTurn], episodes: int) -> dict[str, float]:
    started = time.process_time()
    for index in range(episodes):
        await play(environment, turns, index)
    per_episode_s = (time.process_time() - started) / episodes
    context = environment.tokenizer.encode("What is there? " * LONG)[:LONG]
    answer = [{"role": "tool", "tool_call_id": "call00000", "name": "look", "content": "nine o'clock " * 20}]
    started = time.process_time()
    for _ in range(ROUNDS):
        environment.choice.dialect.delta(context[-TAIL:], turns[0].tokens, answer, environment.schemas)
    return {"episode_ms": 1e3 * per_episode_s, "delta_ms": 1e3 * (time.process_time() - started) / ROUNDS}


def main() -> None:
    given = options("chat_cost", __doc__, model="", episodes=2000)
    tokenizer = TaskTokenizer(given.model)
    environment = OneLook(tokenizer).make({})
    assert isinstance(environment, ChatEnvironment)
    end = tokenizer.decode(environment.choice.dialect.stop_ids[-1:])
    turns = [PolicyTurn(tokenizer.encode(text + end)) for text in SAID]
    found = asyncio.run(measure(environment, turns, given.episodes))
    row = (environment.choice.dialect.name, f"{found['episode_ms']:.2f}", f"{1e3 / found['episode_ms']:.0f}")
    columns = ("renderer", "CPU ms per episode", "episodes per CPU second", "delta at 32k, ms")
    rows = [(*row, f"{found['delta_ms']:.2f}")]
    report(given, "what a chat costs", columns=columns, rows=rows, notes=["goals: 500 episodes, 2 ms"], raw=found)


if __name__ == "__main__":
    main()
