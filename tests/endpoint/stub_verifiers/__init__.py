"""A stand-in of the package verifiers, with the part of its interface that `verifiers_worker.py` calls.

A taskset is a module with ``TASKS``: what an episode of each does. Its only harness asks the policy twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import os
import sys
import types
import urllib.request
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any


class HarnessError(Exception):
    pass


class Harness:
    async def _check_result(self, trace: Any, runtime: Any, result: str) -> None:
        if result:
            raise HarnessError(result)


class SubprocessRuntime:
    pass


@dataclass
class AgentConfig:
    runtime: Any = field(default_factory=lambda: types.SimpleNamespace(type="prime"))
    client: Any = None
    given: Any = None


@dataclass
class EnvConfig:
    model_fields = {"agent": types.SimpleNamespace(default=AgentConfig())}
    agent: AgentConfig
    taskset: str


@dataclass
class SelectConfig:
    skip: int = 0
    limit: int | None = None


@dataclass
class EvalClientConfig:
    base_url: str


@dataclass
class ModelContext:
    model: str
    client: EvalClientConfig


@dataclass
class Taskset:
    tasks: list[str]
    bounded: bool = True

    def select(self, config: SelectConfig) -> Taskset:
        return Taskset(self.tasks[config.skip :][: config.limit], self.bounded)

    def __iter__(self) -> Iterator[str]:
        return iter(self.tasks)


@dataclass
class Trace:
    agent: Any = field(default_factory=lambda: types.SimpleNamespace(name="agent"))
    calls: list[Any] = field(default_factory=list)
    errors: list[Any] = field(default_factory=list)
    metrics: dict[str, Any] = field(default_factory=lambda: {"long": 2.0, "unknown": None})
    stop_condition: str | None = None
    reward = 0.5

    @property
    def rewards(self) -> dict[str, Any]:
        return {"right": types.SimpleNamespace(score=1.0), "skipped": None}

    def stop(self, why: str) -> None:
        self.stop_condition = why


class Env:
    def __init__(self, config: EnvConfig) -> None:
        module = importlib.import_module(config.taskset)
        self.given, self.taskset = config.agent.given, Taskset(module.TASKS, getattr(module, "ENDS", True))

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        print("a print of the taskset")
        yield

    def slots(self, task: str) -> list[str]:
        return [task]

    async def run_slot(self, task: str, context: ModelContext) -> Any:
        trace, ok = Trace(stop_condition=self.given["runtime"]["type"]), True
        messages = [{"role": "user", "content": task}]
        for _ in range(2):
            messages.append(await asyncio.to_thread(self.ask, context, messages))
            messages.append({"role": "user", "content": "go on"})
        if task == "dies":
            os._exit(3)
        if task == "hangs":
            await asyncio.sleep(60)
        if task == "crashes":
            await Harness()._check_result(trace, None, "it has crashed")
        if task == "is long":
            trace.stop("max_turns")
        if task == "is slow":
            trace.stop("agent_timeout")
        if task == "is not scored":
            ok, trace.errors = False, [types.SimpleNamespace(type="TaskError", message="no such answer")]
        return types.SimpleNamespace(ok=ok, traces=[trace], errors=[])

    def ask(self, context: ModelContext, messages: list[Any]) -> Any:
        body = json.dumps({"model": context.model, "messages": messages}).encode()
        with urllib.request.urlopen(f"{context.client.base_url}/chat/completions", body) as answer:
            return json.load(answer)["choices"][0]["message"]


def resolve(data: dict[str, Any]) -> EnvConfig:
    return EnvConfig(AgentConfig(given=data["agent"]), data["taskset"]["id"])


MODULES: dict[str, dict[str, Any]] = {
    "v1": {},
    "v1.errors": {"HarnessError": HarnessError},
    "v1.harness": {"Harness": Harness},
    "v1.clients": {"EvalClientConfig": EvalClientConfig, "ModelContext": ModelContext},
    "v1.runtimes": {"subprocess": types.SimpleNamespace(SubprocessRuntime=SubprocessRuntime)},
    "v1.configs": {},
    "v1.configs.agent": {"AgentConfig": AgentConfig, "agent_config_fields": lambda config: {"agent": config.agent}},
    "v1.configs.select": {"SelectConfig": SelectConfig},
    "v1.utils": {
        "loaders": types.SimpleNamespace(
            env_config_type=lambda taskset, env: EnvConfig, resolve_env_config=resolve, load_environment=Env
        )
    },
}
for name, content in MODULES.items():
    module = sys.modules[f"{__name__}.{name}"] = types.ModuleType(name)
    vars(module).update(content)
