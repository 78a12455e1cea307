"""What vLLM reads of the weights of a folder: of a wrapper, the text model's tensors under its names."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import replace
from typing import Any

import torch
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from libra_hpc.models.published import text_parts


class TextModelLoader(DefaultModelLoader):
    def __init__(self, load_config: Any) -> None:
        super().__init__(replace(load_config, load_format="safetensors"))

    def get_all_weights(self, model_config: Any, model: Any) -> Generator[tuple[str, torch.Tensor], None, None]:
        for name, tensor in super().get_all_weights(model_config, model):
            if not getattr(model_config.hf_config, "wrapper", ""):
                yield name, tensor
            elif parts := text_parts(name, tuple(tensor.shape)):
                whole = len(parts) == 1
                yield from zip(parts, [tensor] if whole else tensor.flatten(0, 1).chunk(len(parts)), strict=True)
