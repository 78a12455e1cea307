"""What every vLLM worker of an engine can do besides: take new weights, report experts.

vLLM imports this module in each worker. The import ties the life of a worker process to the engine process.
"""

from __future__ import annotations

import multiprocessing
from typing import Any

from vllm.model_executor.model_loader import register_model_loader

from libra_hpc.process.reaper import die_with

from .expert_table import bind
from .settings import TEXT_MODEL
from .text_model_loader import TextModelLoader
from .update.staging import Staging

register_model_loader(TEXT_MODEL)(TextModelLoader)


class WorkerExtension:
    """vLLM's worker extension: these are methods of every worker; vLLM calls them by name."""

    rank: int
    vllm_config: Any
    model_runner: Any
    _weight_staging: Staging | None = None

    def keep_experts(self, *table: Any) -> None:
        """Write chosen experts into the table of the scheduler's process; see `expert_table.bind`."""
        if self.rank % self.vllm_config.parallel_config.tensor_parallel_size == 0:
            bind(self.model_runner.get_model(), *table)

    def stage_weights(self, image: str, versions: list[list[str]]) -> None:
        """Begin to make a version ready, beside the steps; see `Staging.start`."""
        if self._weight_staging is None:
            config = self.vllm_config
            tp = config.parallel_config.tensor_parallel_size
            model, folder = self.model_runner.get_model(), config.model_config.model
            self._weight_staging = Staging(model, folder, (tp, self.rank % tp))
        self._weight_staging.start(image, versions)

    def staged_weights(self) -> str | None:
        """What became of the staging, as `Staging.outcome` has it."""
        assert self._weight_staging is not None
        return self._weight_staging.outcome()

    def switch_weights(self) -> None:
        assert self._weight_staging is not None
        self._weight_staging.switch()

    def drop_weights(self) -> None:
        assert self._weight_staging is not None
        self._weight_staging.drop()


if (parent := multiprocessing.parent_process()) is not None and parent.pid is not None:
    # vLLM's workers watch a pipe in a thread, which a hung collective outlives.
    die_with(parent.pid)
