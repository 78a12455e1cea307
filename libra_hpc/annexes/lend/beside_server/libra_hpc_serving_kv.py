"""Plugin of a vLLM server whose GPU is lent: how much of its KV caches it uses, for the page of `libra_hpc_serving`.

vLLM finds it by the entry point in the folder beside this file, and calls it in the process that has the middleware.
"""

from __future__ import annotations

from typing import Any

from libra_hpc_serving import KV_USE
from vllm.v1.metrics.loggers import StatLoggerBase


class KvUse(StatLoggerBase):
    """vLLM's stat logger of one engine."""

    def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
        self._engine = engine_index

    def record(self, scheduler_stats: Any, *others: Any, **named: Any) -> None:
        # vLLM may rename what it counts: then the server counts as one without a figure.
        KV_USE[self._engine] = getattr(scheduler_stats, "kv_cache_usage", 0.0) or 0.0

    def log_engine_initialized(self) -> None:
        pass
