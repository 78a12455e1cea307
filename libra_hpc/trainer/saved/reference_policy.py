"""The reference policy: a frozen model of any shape, in host memory, from a Hugging Face folder.

- The processes of a world with the same parameters share one copy, a piece each.
- For a pass its weights are on the device, where the activations of training are before and after. Parallelism and
  packs are those of the policy.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from libra_hpc.models.architecture import read_shape
from libra_hpc.trainer.packed_model import PackedModel
from libra_hpc.weights.blocks import from_hf
from libra_hpc.weights.names import own_entries

from .checkpoint import TensorFiles
from .host_weights import host_weights


class ReferencePolicy:
    """Has the parallelism of ``policy``."""

    def __init__(self, policy: PackedModel, folder: Path) -> None:
        """Raises `OSError` when the weights cannot be read; collective over the world."""
        model = PackedModel(read_shape(folder), policy.device, policy.dtype, policy.split)
        parameters = model.named_parameters()
        with torch.no_grad(), TensorFiles(folder) as files:
            for name, entry in own_entries(model.shape, model.split).items():
                parameters[name].copy_(from_hf(entry, files, model.shape, model.split))
        self._model, self._shared = model, host_weights(parameters.values())

    @contextmanager
    def model(self) -> Iterator[PackedModel]:
        """The model while it has its weights; collective over the copies of a parameter."""
        for one in self._shared:
            one.fetch()
        try:
            yield self._model
        finally:
            for one in self._shared:
                one.drop()
