"""Loads new weights into a running vLLM, in place: our engine for vLLM's weight-transfer API.

vLLM imports this module in each worker, as its worker extension. The import registers `FileTransferEngine` and ties
the life of a worker process to the engine process.

CPU linears have a packed copy of their weights. vLLM's layer-wise reload unpacks, loads and re-packs each layer in its
old storage, so CUDA graphs stay valid. It skips a tied output head and, on a CPU, experts: both are re-packed here.
"""

from __future__ import annotations

import logging
import multiprocessing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import safe_open
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.platforms import current_platform

from libra_hpc.process.reaper import die_with

from .settings import TRANSFER_BACKEND
from .staging import Staging


@dataclass
class FileInit(WeightTransferInitInfo):
    """Nothing to agree on beforehand."""


@dataclass
class FileUpdate(WeightTransferUpdateInfo):
    """The file of an update."""

    path: str
    """HF-named safetensors file, already verified."""


class FileTransferEngine(WeightTransferEngine[FileInit, FileUpdate]):
    """Full update from one HF-named safetensors file; every worker maps it and takes its tensor-parallel shard."""

    init_info_cls = FileInit
    update_info_cls = FileUpdate

    def init_transfer_engine(self, init_info: FileInit) -> None:
        """No connection to make."""

    def start_weight_update(self) -> None:
        """Put the model into reload mode; until `finish_weight_update` it cannot run."""
        initialize_layerwise_reload(self.model)
        if current_platform.is_cpu():
            for layer in self.model.modules():
                method: Any = getattr(layer, "quant_method", None)
                if getattr(method, "moe_kernel", None) is not None:
                    # vLLM 0.32.0 packs experts only when it builds their kernel.
                    method.moe_kernel = None

    def receive_weights(self, update_info: FileUpdate) -> None:
        """Load every tensor of the file, one at a time."""
        model: Any = self.model
        model.load_weights(_tensors(update_info.path))

    def finish_weight_update(self) -> None:
        """Leave reload mode and re-pack the tied head."""
        finalize_layerwise_reload(self.model, self.model_config)  # type: ignore[no-untyped-call]
        head: Any = getattr(self.model, "lm_head", None)
        if self.model_config.hf_text_config.tie_word_embeddings and hasattr(head, "quant_method"):
            head.quant_method.process_weights_after_loading(head)

    def shutdown(self) -> None:
        """No connection to close."""


class WorkerExtension:
    """vLLM's worker extension: these are methods of every worker; vLLM calls them by name."""

    rank: int
    vllm_config: Any
    model_runner: Any
    _weight_staging: Staging | None = None

    def stage_weights(self, image: str) -> None:
        """Begin to make a version ready, beside the steps."""
        if self._weight_staging is None:
            config = self.vllm_config
            tp = config.parallel_config.tensor_parallel_size
            model, folder, dtype = self.model_runner.get_model(), config.model_config.model, config.model_config.dtype
            self._weight_staging = Staging(model, folder, dtype, (tp, self.rank % tp))
        self._weight_staging.start(image)

    def staged_weights(self) -> str | None:
        """As `Staging.outcome`."""
        assert self._weight_staging is not None
        return self._weight_staging.outcome()

    def switch_weights(self) -> None:
        assert self._weight_staging is not None
        self._weight_staging.switch()

    def drop_weights(self) -> None:
        assert self._weight_staging is not None
        self._weight_staging.drop()


def _tensors(path: str) -> Iterator[tuple[str, torch.Tensor]]:
    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 - not a mapping
            yield name, file.get_tensor(name)


# It warns at every update that the rotary tables were not loaded; no file has them, and vLLM retains them.
logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel(logging.ERROR)
WeightTransferEngineFactory.register_engine(TRANSFER_BACKEND, FileTransferEngine)
if (parent := multiprocessing.parent_process()) is not None and parent.pid is not None:
    # vLLM's workers watch a pipe in a thread, which a hung collective outlives.
    die_with(parent.pid)
