"""Plays an episode of an agent as a run does: a policy that says given texts, and a record of all contexts."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, cast

from libra_hpc.endpoint.agent_task import AgentEnvironment, AgentTask
from libra_hpc.protocol.codec import pack_i32, unpack_i32
from libra_hpc.rollout.trajectory import Trajectory
from libra_hpc.tasks.base import Episode, PolicyTurn, Task, Turn
from libra_hpc.tasks.tokenizer import TaskTokenizer
from tests.rollout.plant import generated

Policy = Callable[[str], str | list[int] | None]
"""From the text of the context to that of the turn, or to its tokens; None: it goes on until nobody waits for it."""
ROOM = 4096
AGENTS = Path(__file__).with_name("agents.py")


class Played:
    """``contexts``: of each turn, the tokens before it; ``turns``: what was sampled; ``end``: the last answer;
    ``trajectory``: what the leader has of it, and trains."""

    def __init__(self) -> None:
        self.contexts: list[list[int]] = []
        self.turns: list[list[int]] = []
        self.most: list[int] = []
        self.end: Turn
        self.trajectory = Trajectory(index=0, sample=0)

    @property
    def samples(self) -> int:
        return int(self.end.info["samples"])

    def texts(self, tokenizer: TaskTokenizer) -> list[str]:
        return [tokenizer.decode(one) for one in self.contexts]


async def play(task: Task, policy: Policy, index: int = 0, room: int = ROOM, delay_s: float = 0.0) -> Played:
    """Play one episode to its end; a turn begins where the last one and its answer ended, or a new sample."""
    episode, played = task.open(index, 0, 0.0), Played()
    grow = partial(_grow, task=task, policy=policy, played=played, room=room, delay_s=delay_s)
    try:
        async with asyncio.TaskGroup() as group:

            def branch(one: Episode) -> None:
                trajectory = played.trajectory.sprout(str(len(played.trajectory.branches)))
                group.create_task(grow(one, trajectory))

            episode.branch = branch
            await episode.start(cast(Any, None))
            played.end = await grow(episode, played.trajectory)
    except BaseExceptionGroup as error:
        raise error.exceptions[0] from error
    finally:
        await episode.close("done")
    played.trajectory.join()
    return played


async def _grow(
    episode: Episode, trajectory: Trajectory, task: Task, policy: Policy, played: Played, room: int, delay_s: float
) -> Turn:
    """Play a sample to its end."""
    tools: Any = None
    unwanted = asyncio.Event()
    episode.unwanted = unwanted.set
    trajectory.open(episode.prompt_id, pack_i32(episode.prompt))
    while True:
        await asyncio.sleep(delay_s)
        context = unpack_i32(trajectory.context_ids)
        said = policy(task.tokenizer.decode(context))
        if said is None:
            await unwanted.wait()
            unwanted.clear()
            said = "cut"
        sampled = [*task.tokenizer.encode(said), episode.stop_ids[-1]] if isinstance(said, str) else said
        cut = sampled[: min(episode.max_tokens, room - len(context))]
        played.contexts.append(context)
        played.turns.append(cut)
        played.most.append(episode.max_tokens)
        stop: Any = "stop" if cut[-1] in episode.stop_ids else "length"
        trajectory.add_generated(generated("", cut, finish=stop), "e1")
        turn = await episode.step(PolicyTurn(cut, stop, room - len(context) - len(cut)), tools)
        trajectory.drop(turn.dropped)
        full = trajectory.context_tokens + len(turn.tokens) >= room
        if not turn.done and not turn.new_sample and full:
            turn = await episode.truncated(tools)
        if turn.done:
            return turn
        trajectory.add_environment(pack_i32(turn.tokens), turn.new_sample)


def call(name: str, **arguments: Any) -> str:
    """A tool call as the policy of these tests writes it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def task_for(
    tokenizer: TaskTokenizer, folder: Path, row: Mapping[str, Any], *, reward: str, given: Any = None, **agent: Any
) -> AgentEnvironment:
    """A task of one row; ``reward``: a function of `agents.py`; ``given``: sections of the run file."""
    judge = reward if ":" in reward else f"{AGENTS}:{reward}"
    task = AgentTask(tokenizer, data=write_rows(folder, row), reward=judge, **agent).make(given or {})
    assert isinstance(task, AgentEnvironment)
    return task


def write_rows(folder: Path, *rows: Mapping[str, Any]) -> str:
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(one) + "\n" for one in rows))
    return str(file)
