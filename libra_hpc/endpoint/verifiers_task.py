"""The task whose agent is a harness of verifiers: ``task.verifiers`` names a taskset, which has rows and reward.

verifiers cannot share our environment, so one process a host (`verifiers_worker.py`) runs in its own, and calls the
endpoint as any agent does.

- A program of the taskset fails -> its rewards are asked all the same; a limit of verifiers ends it -> the same.
- What verifiers does not score (its runtime or a reward function fails) has no reward: it is sampled again.
- The process ends -> its episodes are sampled again, and the next one starts another.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import Any, cast

import msgspec
from msgspec.structs import replace

from libra_hpc.boxes.providers import none
from libra_hpc.config.job import EnvSection
from libra_hpc.errors import OperationError, invalid
from libra_hpc.tasks.base import Task
from libra_hpc.tasks.data_task import NO_LIMIT, Row
from libra_hpc.tasks.tokenizer import TaskTokenizer

from .agent_task import Address, AgentEnvironment, AgentTask

SCORE_S = 600.0
"""Seconds for verifiers to score, behind the agent's end."""
WORKER = str(Path(__file__).with_name("verifiers_worker.py"))


class VerifiersTask(AgentTask):
    """``task.verifiers``, with ``max_tokens`` of its options."""

    leave_s = SCORE_S

    def __init__(
        self,
        tokenizer: TaskTokenizer,
        *,
        seed: int = 0,
        taskset: str = "",
        python: str = "",
        env: Mapping[str, Any] | None = None,
        select: Mapping[str, Any] | None = None,
        max_tokens: int = NO_LIMIT,
    ) -> None:
        self.tokenizer, self.seed, self.max_tokens = tokenizer, seed, max_tokens
        self.data, self.prompt, self.command = taskset, "", ()
        self.named = f"task.verifiers.taskset = {taskset!r}"
        self.taskset: dict[str, Any] = {"taskset": taskset, "python": python, "env": env or {}, "select": select or {}}
        self.reward, self.agent, self.judge = "verifiers", self._run, self._scored
        self._starting = asyncio.Lock()

    def make(self, settings: Mapping[str, Any]) -> Task:
        env = msgspec.convert(settings.get("env", {}), EnvSection)
        self.taskset["wall_s"], self.drops_thinking = env.limits.wall_s, settings.get("thinking") == "template"
        self.process = VerifiersProcess(self.taskset)
        env = replace(env, limits=replace(env.limits, wall_s=env.limits.wall_s + SCORE_S))
        return AgentEnvironment(
            self,
            [{"index": index} for index in range(self.process.tasks)],
            none,
            env,
            settings.get("context", NO_LIMIT),
        )

    async def _run(self, row: Row, endpoint: Address, box: object) -> None:
        async with self._starting:
            if self.process.ended:
                self.process = await asyncio.to_thread(VerifiersProcess, self.taskset)
        found = await self.process.play(row["index"], f"{endpoint.url.removesuffix('/v1')}/{endpoint.key}/v1")
        if "error" in found:
            raise OperationError(f"verifiers has no reward: {found['error']}")
        kind, _, limit = found["stop"].replace("agent_timeout", "max_time").partition("_")
        row["numbers"] = found["numbers"] | ({f"limit_{limit}": 1.0} if kind == "max" else {})
        if kind == "agent" and limit.startswith("failed"):
            raise RuntimeError(found["stop"])

    async def _scored(self, row: Row, box: object) -> dict[str, float]:
        if "numbers" not in row:
            raise OperationError(
                "verifiers has no reward: it cannot serve, or does not end; the log of the host has more."
            )
        return row["numbers"]


class VerifiersProcess:
    """A process in verifiers' environment, from its start to its end; raises `UserError` when it cannot serve."""

    def __init__(self, asked: Mapping[str, Any]) -> None:
        pipe, command = subprocess.PIPE, [asked["python"], "-I", WORKER]
        # A group of its own: an interrupt from the terminal is the host's alone.
        self._child = cast(Any, subprocess.Popen(command, stdin=pipe, stdout=pipe, bufsize=0, process_group=0))
        self._reading: asyncio.Task[None] | None = None
        self._answers: dict[int, asyncio.Queue[dict[str, Any]]] = {}
        self._numbers = count()
        self._order(**asked)
        found = json.loads(self._child.stdout.readline() or b"{}")
        if "tasks" not in found:
            code = self._child.wait()
            key, why, valid = found.get("mistake") or ("taskset", f"its process ended with exit code {code}", "")
            raise invalid(f"task.verifiers.{key}", asked[key], why, valid)
        self.tasks: int = found["tasks"]

    @property
    def ended(self) -> bool:
        return self._child.poll() is not None or (self._reading is not None and self._reading.done())

    async def play(self, index: int, url: str) -> dict[str, Any]:
        """Play a task with the policy at ``url``; returns its numbers, or an ``error``."""
        self._reading = self._reading or asyncio.create_task(self._read())
        number, answer = next(self._numbers), asyncio.Queue[dict[str, Any]]()
        self._answers[number] = answer
        self._order(run=number, index=index, url=url)
        try:
            return await answer.get()
        finally:
            del self._answers[number]
            self._order(stop=number)

    def _order(self, **line: Any) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._child.stdin.write(json.dumps(line).encode() + b"\n")

    async def _read(self) -> None:
        lines, loop = asyncio.StreamReader(), asyncio.get_running_loop()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), self._child.stdout)
        async for line in lines:
            found = json.loads(line)
            if found["run"] in self._answers:
                self._answers[found["run"]].put_nowait(found)
        code = await asyncio.to_thread(self._child.wait)
        for answer in self._answers.values():
            answer.put_nowait({"error": f"its process ended with exit code {code}"})
