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
from collections import namedtuple
from collections.abc import AsyncIterator
from types import SimpleNamespace as Of
from typing import Any

AgentConfig = namedtuple("AgentConfig", "runtime client given", defaults=(Of(type="prime"), None, None))
ModelContext = namedtuple("ModelContext", "model client")
SelectConfig = namedtuple("SelectConfig", "skip limit", defaults=(0, None))


class HarnessError(Exception):
    pass


class Harness:
    async def _check_result(self, trace: Any, runtime: Any, result: str) -> None:
        raise HarnessError(result)


class Taskset(list[str]):
    bounded = True

    def select(self, config: Any) -> Taskset:
        return Taskset(self[config.skip :][: config.limit])


class Env:
    def __init__(self, config: Any) -> None:
        self.given, self.taskset = config.agent.given, Taskset(importlib.import_module(config.taskset).TASKS)

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        print("a print of the taskset")
        yield

    def slots(self, task: str) -> list[str]:
        return [task]

    async def run_slot(self, task: str, context: Any) -> Any:
        trace = Of(agent=Of(name="agent"), calls=[], errors=[], metrics={"long": 2.0, "unknown": None}, reward=0.5)
        trace.rewards, trace.stop_condition = {"right": Of(score=1.0), "skipped": None}, self.given["runtime"]["type"]
        trace.stop = lambda why: setattr(trace, "stop_condition", why)
        messages = [{"role": "user", "content": task}]
        for _ in range(2):
            messages += [await asyncio.to_thread(ask, context, messages), {"role": "user", "content": "go on"}]
        match task:
            case "dies":
                os._exit(3)
            case "hangs":
                await asyncio.sleep(60)
            case "crashes":
                await Harness()._check_result(trace, None, "it has crashed")
            case "is long":
                trace.stop("max_turns")
            case "is slow":
                trace.stop("agent_timeout")
            case "is not scored":
                trace.errors.append(Of(type="TaskError", message="no such answer"))
        return Of(ok=not trace.errors, traces=[trace], errors=[])


def ask(context: Any, messages: list[Any]) -> Any:
    body = json.dumps({"model": context.model, "messages": messages}).encode()
    with urllib.request.urlopen(f"{context.client.base_url}/chat/completions", body) as answer:
        return json.load(answer)["choices"][0]["message"]


LOADERS = Of(
    env_config_type=lambda taskset, env: Of(model_fields={"agent": Of(default=AgentConfig())}),
    resolve_env_config=lambda env: Of(agent=AgentConfig(given=env["agent"]), taskset=env["taskset"]["id"]),
    load_environment=Env,
)
MODULES: dict[str, dict[str, Any]] = {
    "v1": {},
    "v1.errors": {"HarnessError": HarnessError},
    "v1.harness": {"Harness": Harness},
    "v1.clients": {"EvalClientConfig": Of, "ModelContext": ModelContext},
    "v1.runtimes": {"subprocess": Of(SubprocessRuntime=Of())},
    "v1.configs": {},
    "v1.configs.agent": {"AgentConfig": AgentConfig, "agent_config_fields": lambda env: {"agent": env.agent}},
    "v1.configs.select": {"SelectConfig": SelectConfig},
    "v1.utils": {"loaders": LOADERS},
}
for name, content in MODULES.items():
    module = sys.modules[f"{__name__}.{name}"] = types.ModuleType(name)
    vars(module).update(content)
