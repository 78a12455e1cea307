"""Plugin of a vLLM server whose GPU is lent: what its engines serve, for the page of `libra_hpc_serving`.

vLLM finds it by the entry point in the folder beside this file, and calls it in the process that has the middleware.
"""

from __future__ import annotations

import time
from typing import Any

from libra_hpc_serving import ENGINES, FIRST
from vllm.v1.metrics.loggers import StatLoggerBase

COUNTS = ("num_running_reqs", "num_waiting_reqs", "num_skipped_waiting_reqs")


class EngineCounts(StatLoggerBase):
    """vLLM's stat logger of one engine."""

    def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
        self._engine = engine_index

    def record(self, scheduler_stats: Any, iteration_stats: Any, *others: Any, **named: Any) -> None:
        if scheduler_stats is not None:
            # vLLM may rename what it counts: then requests are counted by the middleware alone.
            requests = sum(getattr(scheduler_stats, name, 0) for name in COUNTS)
            ENGINES[self._engine] = time.monotonic(), requests
        FIRST.extend(getattr(iteration_stats, "time_to_first_tokens_iter", ()))

    def log_engine_initialized(self) -> None:
        pass
