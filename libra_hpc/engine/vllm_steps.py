"""The steps of vLLM's core: each waits for the one before it, or is scheduled ahead.

Ahead, vLLM forms and dispatches a batch before it waits for the one before, so that the device never waits for the
host. Between two passes one batch is in flight.

- Weights change or memory is freed -> `drain` first, so that every token is of weights with a known version.
- A request is aborted -> its token in flight is in no answer; where the turn goes on, it is sampled again.
- A request ends by a stop id -> vLLM drops what the batch in flight computes for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.engine.core_client import InprocClient
from vllm.v1.executor import Executor

START_STEPS = ("determine_available_memory", "initialize_from_config", "compile_or_warm_up_model")
"""What vLLM's executor has its workers do once the model is loaded."""


def waiting_executor(kind: type[Executor], wait: Callable[[], None]) -> type[Executor]:
    """An executor that calls ``wait`` before each step of its start."""

    class WaitingExecutor(kind):  # type: ignore[valid-type, misc]
        def _init_executor(self) -> None:
            wait()
            super()._init_executor()

        def collective_rpc(self, method: Any, *args: Any, **named: Any) -> Any:
            if method in START_STEPS:
                wait()
            return super().collective_rpc(method, *args, **named)

    return WaitingExecutor


class VllmSteps:
    """Runs the batches of one engine; `ended` counts those whose tokens are known."""

    def __init__(self, client: InprocClient, scheduler: Scheduler) -> None:
        self._client, self._scheduler = client, scheduler
        self._queue = client.engine_core.batch_queue
        self.ended = 0

    @property
    def in_flight(self) -> bool:
        """Whether a batch is dispatched whose tokens are not known yet."""
        return bool(self._queue)

    def run(self) -> EngineCoreOutputs:
        """One pass: what the batch that ended has sampled; nothing when vLLM only dispatched one."""
        oldest = self._queue[-1] if self._queue else None
        outputs = self._client.get_output()
        if self._queue is None:
            self.ended += 1
        elif oldest is not None and oldest not in self._queue:
            # vLLM runs a batch without tokens when requests have only left it.
            self.ended += oldest[1].total_num_scheduled_tokens > 0
        return outputs

    def drain(self) -> list[EngineCoreOutputs]:
        """Wait for the batch in flight, without another."""
        found = []
        # With no requests vLLM only waits.
        self._scheduler.has_requests = lambda: False  # type: ignore[method-assign]
        try:
            while self._queue:
                found.append(self.run())
        finally:
            del self._scheduler.has_requests
        return found
