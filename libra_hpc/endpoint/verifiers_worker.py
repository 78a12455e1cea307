"""Plays tasks of a verifiers taskset in verifiers' own environment of Python: ``PYTHON -I verifiers_worker.py``.

It has nothing of ours. Lines of JSON come and go: first the taskset, answered by the number of its tasks or a mistake;
then episodes to run and to stop, and their numbers. At the end of its input it ends what runs.
"""

from __future__ import annotations

import asyncio
import difflib
import importlib.util
import json
import os
import pkgutil
import sys
import tempfile
from pathlib import Path
from typing import Any

ORDERS, ANSWERS = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "w")
"""Nothing else may read or write them: programs of the taskset inherit the usual ones."""


ENDLESS = 1000
"""Tasks of a taskset without an end."""


def answer(**line: Any) -> None:
    print(json.dumps(line), file=ANSWERS, flush=True)


def mistake(asked: dict[str, Any]) -> tuple[str, str, str] | None:
    """Key, reason and valid values of what is found without an import of verifiers, which takes seconds."""
    package = importlib.util.find_spec("verifiers")
    if package is None:
        return "python", "its environment has no verifiers", "an environment with envs/verifiers.txt"
    own = [
        one.name
        for one in pkgutil.iter_modules([f"{path}/v1/tasksets" for path in package.submodule_search_locations or ()])
    ]
    name = asked["taskset"].rsplit("/", 1)[-1].split("@", 1)[0].replace("-", "_").lower()
    if name in own or importlib.util.find_spec(name):
        return None
    near = difflib.get_close_matches(name, [*own, *(one.name for one in pkgutil.iter_modules())], 1)
    why = "its environment has no such module" + "".join(f" (did you mean {one!r}?)" for one in near)
    return "taskset", why, ", ".join([*own, "an installed taskset", "a file.py"])


def adapt() -> None:
    """Let verifiers need no index while it runs, and score a rollout whose program failed."""
    from verifiers.v1.errors import HarnessError
    from verifiers.v1.harness import Harness
    from verifiers.v1.runtimes import subprocess as local

    async def script(self: Any, source: Any, env: Any = None, *, activate: bool = True) -> list[str]:
        file = Path(self.workdir, "program.py")
        file.write_text(source if isinstance(source, str) else source.decode())
        return [sys.executable, str(file)]

    async def checked(self: Any, trace: Any, runtime: Any, result: Any) -> None:
        try:
            await check(self, trace, runtime, result)
        except HarnessError as error:
            trace.stop(f"agent_failed: {error}")

    check, Harness._check_result = Harness._check_result, checked
    # Its own way makes an environment by uv for each program.
    local.SubprocessRuntime.prepare_uv_script = script
    local.CACHE_DIR = Path(tempfile.gettempdir())


def loaded(asked: dict[str, Any]) -> tuple[Any, list[Any], str]:
    """The environment, its tasks, and the role that the policy plays."""
    from verifiers.v1.configs.agent import AgentConfig, agent_config_fields
    from verifiers.v1.configs.select import SelectConfig
    from verifiers.v1.utils import loaders

    env = {**asked["env"], "taskset": {**asked["env"].get("taskset", {}), "id": asked["taskset"]}}
    for role, field in loaders.env_config_type(asked["taskset"], env.get("id", "")).model_fields.items():
        if isinstance(field.default, AgentConfig):
            # Its own default is a service that costs money.
            place = {"runtime": {"type": "subprocess"}} if field.default.runtime.type == "prime" else {}
            env[role] = {**place, "timeout": {"rollout": asked["wall_s"]}, **env.get(role, {})}
    config = loaders.resolve_env_config(env)
    roles = [role for role, one in agent_config_fields(config).items() if one.client is None]
    if len(roles) != 1:
        raise ValueError(f"the policy plays one role, here {', '.join(roles)}; give the others env.ROLE.client")
    found = loaders.load_environment(config)
    chosen = found.taskset.select(SelectConfig(**asked["select"]))
    return found, list(chosen if chosen.bounded else chosen.take(ENDLESS)), roles[0]


async def serve(env: Any, tasks: list[Any], role: str) -> None:
    from verifiers.v1.clients import EvalClientConfig, ModelContext

    async def play(number: int, task: Any, url: str) -> None:
        (slot,) = env.slots(task)
        episode = await env.run_slot(slot, ModelContext("policy", EvalClientConfig(base_url=url)))
        traces = [trace for trace in episode.traces if trace.agent.name == role]
        if episode.ok and len(traces) == 1:
            (trace,) = traces
            scores = {name: one and one.score for name, one in trace.rewards.items()}
            numbers = {name: one for name, one in {**trace.metrics, **scores}.items() if one is not None}
            answer(run=number, numbers={**numbers, "reward": trace.reward}, stop=trace.stop_condition or "")
        else:
            errors = [*episode.errors, *(error for trace in traces for error in trace.errors)]
            text = "; ".join(f"{one.type}: {one.message}" for one in errors)
            answer(run=number, error=text[-2000:] or f"{len(traces)} rollouts")

    orders, running = asyncio.StreamReader(), dict[int, asyncio.Task[None]]()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(orders), ORDERS)
    async with env.serving():
        answer(tasks=len(tasks))
        async for line in orders:
            order = json.loads(line)
            if "stop" in order:
                running.pop(order["stop"]).cancel()
            else:
                running[order["run"]] = asyncio.create_task(play(order["run"], tasks[order["index"]], order["url"]))
        for one in running.values():
            one.cancel()
        await asyncio.gather(*running.values(), return_exceptions=True)


def main() -> None:
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    asked = json.loads(ORDERS.readline())
    file = Path(asked["taskset"])
    if file.suffix == ".py":
        sys.path.append(str(file.parent))
        asked["taskset"] = file.stem
    if found := mistake(asked):
        answer(mistake=found)
        return
    try:
        adapt()
        env, tasks, role = loaded(asked)
    except Exception as error:
        answer(mistake=("taskset", f"{type(error).__name__}: {error}"[:2000], ""))
        return
    asyncio.run(serve(env, tasks, role))


if __name__ == "__main__":
    main()
