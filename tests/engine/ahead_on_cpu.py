"""`python -m libra_hpc.engine` with asynchronous steps on a CPU: vLLM's own scheduler, queue and runner, as on a GPU.

vLLM's CPU platform switches asynchronous scheduling off, and its runner asks CUDA for events and streams.  Here these
are stand-ins that wait for nothing, as vLLM's own for `torch.Event`: a CPU's step has ended when its call returns.
"""

from __future__ import annotations

import contextlib
import sys
from typing import Any

import libra_hpc.engine.settings as settings
from libra_hpc.process.entry import leave, run


class StandIn:
    """An event or a stream."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        self.device = "cpu"

    def record(self, *args: object) -> None: ...

    def synchronize(self) -> None: ...

    def wait_stream(self, *args: object) -> None: ...


def stand_in() -> None:
    import torch

    for name in ("Event", "Stream"):
        setattr(torch.cuda, name, StandIn)
    torch.cuda.current_stream = lambda *args: StandIn()
    torch.cuda.stream = lambda *args: contextlib.nullcontext()


def prepare(config: settings.EngineConfig) -> None:
    """In the place of `settings.prepare_process`, before the engine is made."""
    settings.prepare_process(config)
    settings.schedules_ahead = lambda config: config.run.rollout.async_steps
    from vllm.platforms.cpu import CpuPlatform

    check = CpuPlatform.check_and_update_config

    def checked(vllm_config: Any) -> None:
        wanted = vllm_config.scheduler_config.async_scheduling
        check(vllm_config)
        vllm_config.scheduler_config.async_scheduling = wanted

    CpuPlatform.check_and_update_config = staticmethod(checked)
    from libra_hpc.engine.vllm_steps import VllmSteps

    drain = VllmSteps.drain

    def drained(self: VllmSteps) -> Any:
        print(f"drained: {self.in_flight}", file=sys.stderr, flush=True)
        return drain(self)

    VllmSteps.drain = drained
    stand_in()


def main() -> int:
    from libra_hpc.engine import __main__ as engine

    engine.prepare_process = prepare
    return run("libra_hpc.engine", engine.start)


if __name__ == "__mp_main__":
    stand_in()
elif __name__ == "__main__":
    leave(main())
