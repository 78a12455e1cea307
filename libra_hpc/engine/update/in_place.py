"""New weights for parameters that keep their addresses: what changed is copied into them by index.

CUDA graphs know the parameters by address, so nothing can be exchanged there, and whole weights take long to copy.

- A copy of the newest weights stays in host memory; what differs from it is made ready beside decoding.
- Between two steps: one launch for each parameter with changes.
- More than `MOST` of a parameter changed -> it is copied whole.
- The device may have other weights than the copy before (at the start, after sleep, after a version that was staged
  but never switched to) -> all parameters are copied whole.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

MOST = 1 / 8
"""Share of a parameter's elements: a changed one takes 6 bytes, so that is 3/8 of the whole one in bf16. Double: 3/4,
and as much more pinned memory. Half: whole copies of half the gain."""
BITS = {4: torch.int32, 2: torch.int16, 1: torch.int8}
"""Integers by bytes of an element: values are compared by their bits."""


class Change(NamedTuple):
    """Change of one parameter; ``places`` and ``values`` are None where it is copied whole."""

    parameter: torch.Tensor
    whole: torch.Tensor
    places: torch.Tensor | None
    values: torch.Tensor | None


class InPlace:
    """The parameters of one worker; all but `weights_lost` belong to who stages, which never overlaps with a switch."""

    def __init__(self) -> None:
        self._copies: dict[str, torch.Tensor] = {}
        self._changes: list[Change] = []
        self._behind = True
        """Whether the parameters may differ from what the changes are relative to."""

    def stage(self, name: str, parameter: torch.Tensor, value: torch.Tensor) -> None:
        """Remember what a parameter's value changes."""
        value = value.view(parameter.shape).to(parameter.dtype).view(-1)
        known = self._copies.get(name)
        if known is None:
            self._copies[name] = value if parameter.is_cpu else value.pin_memory()
            self._changes.append(Change(parameter, self._copies[name], None, None))
            return
        bits = BITS[value.element_size()]
        index = (value.view(bits) != known.view(bits)).nonzero().view(-1)
        known.copy_(value)
        parts: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)
        if len(index) <= MOST * len(value):
            own = index.int(), value[index]
            parts = own if parameter.is_cpu else (own[0].pin_memory(), own[1].pin_memory())
        self._changes.append(Change(parameter, known, *parts))

    def switch(self) -> None:
        """Copy, between two steps; returns when the devices have it all, since the copy in host memory changes next."""
        for parameter, whole, index, values in self._changes:
            target = parameter.data.view(-1)
            if self._behind or index is None or values is None:
                target.copy_(whole, non_blocking=True)
            elif len(index):
                places = index.to(target.device, non_blocking=True).long()
                target.index_copy_(0, places, values.to(target.device, non_blocking=True))
        if any(not change.parameter.is_cpu for change in self._changes):
            torch.cuda.synchronize()
        self._changes, self._behind = [], False

    def weights_lost(self) -> None:
        """The parameters no longer have what was switched to last."""
        self._behind = True

    def drop(self) -> None:
        """What is staged is not to be switched to: the copy in host memory is ahead of the parameters."""
        self._changes, self._behind = [], True
