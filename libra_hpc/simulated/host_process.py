"""The simulated environment host: the real `Host` around a task that replays a workload.

``python -m libra_hpc.simulated.host_process --socket FD --config FILE``, with the run's configuration.

Prompts, tool answers, tool seconds and rewards are those of the workload (`tokens`).  It needs no tokenizer and starts
no tool process.
"""

from __future__ import annotations

import asyncio
import socket
import sys
from typing import Any

import msgspec

from libra_hpc.config.run import RunConfig
from libra_hpc.host.host import Host, main
from libra_hpc.protocol.trace import TrajectoryRecord, signals_of
from libra_hpc.tasks.base import Episode, PolicyTurn, Task, ToolResult, Tools, Turn

from .tokens import STOP, answer, prompt
from .workload import Groups


class WorkloadTask(Task):
    """A task that replays a workload.  Raises `UserError` for one that cannot be read or generated."""

    def __init__(self, config: RunConfig) -> None:
        self.seed = config.run.seed
        self._groups = Groups(config)
        self._speedup = config.simulated.speedup

    def open(self, index: int, sample: int, progress: float) -> Episode:
        """Replay sample ``sample`` of prompt ``index``; both wrap around at the end of the workload."""
        group = self._groups[index]
        # Ids of tokens have 32 bits.
        return _Replayed(group[sample % len(group)], index % 2**31, sample, self._speedup)


class _Replayed(Episode):
    def __init__(self, spec: TrajectoryRecord, number: int, sample: int, speedup: float) -> None:
        self._spec, self._speedup, self._next, self._place = spec, speedup, 0, (number, sample)
        self.prompt_id = spec.prompt_id
        first = spec.turns[0]
        self.prompt = prompt(number, sample, spec.prompt_tokens + first.new_tokens, first.gen_tokens)
        self.max_tokens = max(turn.gen_tokens for turn in spec.turns)
        self.stop_ids = (STOP,)

    async def step(self, turn: PolicyTurn, tools: Tools) -> Turn:
        turns, number = self._spec.turns, self._next
        spec = turns[number]
        self._next += 1
        if len(turn.tokens) < spec.gen_tokens:
            return Turn(done=True, info={"solved": 0.0, "truncated": 1.0})
        if self._next == len(turns):
            reward = self._spec.reward or 0.0
            return Turn(done=True, reward=reward, info={"solved": reward, "truncated": 0.0})
        seconds = spec.tool_s / self._speedup
        await asyncio.sleep(seconds)
        following = turns[self._next]
        if following.new_sample:
            ids = prompt(*self._place, following.new_tokens, following.gen_tokens)
        else:
            ids = answer(max(1, following.new_tokens), following.gen_tokens)
        signals = signals_of(msgspec.structs.replace(spec, tool_s=seconds), 0 if following.new_sample else len(ids))
        return Turn(ids, signals, new_sample=following.new_sample)


class _NoTools:
    """No tools: a replayed tool is its seconds, its outcome and the size of its answer."""

    async def call(self, name: str, *args: Any, **named: Any) -> ToolResult:
        raise KeyError(name)

    async def python(self, code: str) -> ToolResult:
        raise KeyError("python")


async def serve(link: int, config: RunConfig) -> int:
    """Connect, serve until the socket closes, and return the exit code."""
    host = Host("simulated", WorkloadTask(config), _NoTools())
    await asyncio.get_running_loop().create_connection(lambda: host, sock=socket.socket(fileno=link))
    code = await host.closed
    await host.left()
    return code


if __name__ == "__main__":
    sys.exit(main("libra_hpc.simulated.host_process", serve))
