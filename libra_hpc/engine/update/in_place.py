"""New weights for parameters that keep their addresses: they are copied into them, whole or by index.

CUDA graphs know the parameters by address, so nothing can be exchanged there, and whole weights take long to copy.
What is to be copied is made ready in host memory beside decoding; between two steps it takes one launch for each part.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class Change(NamedTuple):
    """New values of a parameter, in its type: of all its elements, or of those at ``places``."""

    parameter: torch.Tensor
    values: torch.Tensor
    places: torch.Tensor | None


class InPlace:
    """The parameters of one worker; staging never overlaps with a switch."""

    def __init__(self) -> None:
        self._changes: list[Change] = []

    def stage(self, parameter: torch.Tensor, values: torch.Tensor, places: torch.Tensor | None = None) -> None:
        """Remember values for the next switch; ``places``: int32[m], positions in the flattened parameter; None: all.

        Later ones replace earlier ones.
        """
        values = values.reshape(-1).to(parameter.dtype)
        if not parameter.is_cpu:
            values, places = values.pin_memory(), None if places is None else places.pin_memory()
        self._changes.append(Change(parameter, values, places))

    def switch(self) -> None:
        """Copy, between two steps; returns when the devices have it all, since what was staged is freed then."""
        for parameter, values, places in self._changes:
            target = parameter.data.view(-1)
            if places is None:
                target.copy_(values, non_blocking=True)
            else:
                index = places.to(target.device, non_blocking=True).long()
                target.index_copy_(0, index, values.to(target.device, non_blocking=True))
        if any(not change.parameter.is_cpu for change in self._changes):
            torch.cuda.synchronize()
        self._changes = []

    def drop(self) -> None:
        """What is staged is not to be switched to."""
        self._changes = []
