"""Which elements of this rank's shards changed since the last version that the engines got.

The sharded optimizer rounds its float32 masters to the model's type and overwrites the older weights: there, and only
there, the old value and the new one are both at hand, without a second copy of the weights.

- A cast (an update, a restored state, weights derived from a loaded one) -> changed elements are marked; marks add up.
- A weight is merged with its adapter -> the same.
- Marked elements are read when a version is offered, so their values are the newest.
- A version was offered -> no marks, and this version is the base of the next.
- Weights were set otherwise -> there is no base: the next version is offered whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import torch

from libra_hpc.weights.delta import Bits

CHUNK = {"cpu": 1 << 18, "cuda": 1 << 26}
"""Elements at a time, a multiple of 8: on a CPU old and new weights stay in its cache."""
NO_BASE = -1


class ShardWeights:
    """A shard of a parameter: its weights in the model's type, a view, and its float32 master."""

    def __init__(self, parameter: torch.nn.Parameter, begin: int, end: int, master: torch.Tensor) -> None:
        self._parameter, self._begin, self._end = parameter, begin, end
        self._master = master
        self._bits = torch.zeros(-(-(end - begin) // 8), dtype=torch.uint8, device=parameter.device)

    @property
    def weights(self) -> torch.Tensor:
        return self._parameter.data.view(-1)[self._begin : self._end]

    def cast(self, mark: bool) -> None:
        master, step = self._master.data, CHUNK[self._parameter.device.type]
        for begin in range(0, len(master), step):
            self.cast_part(begin, master[begin : begin + step], mark)

    def cast_part(self, begin: int, master: torch.Tensor, mark: bool) -> None:
        """Round the part of the master that begins at ``begin``, a multiple of 8."""
        old = self.weights[begin : begin + len(master)]
        new = master.to(old.device).to(old.dtype)
        if mark:
            changed = _differing(new.view(torch.int16), old.view(torch.int16))
            self._bits[begin // 8 : begin // 8 + len(changed)] |= changed
        old.copy_(new)

    def mark(self, old: torch.Tensor) -> None:
        """Mark what differs from ``old`` weights of the parameter."""
        self._bits |= _differing(
            self.weights.view(torch.int16), old.view(-1)[self._begin : self._end].view(torch.int16)
        )

    def clear(self) -> None:
        self._bits.zero_()

    def changed(self) -> tuple[Bits, np.ndarray[Any, Any]]:
        """One bit an element, lowest first; bits of the values of all elements, or of the changed ones alone."""
        values = self.weights.view(torch.int16)
        bits = self._bits.cpu().numpy()
        if values.device.type == "cpu":
            return bits, values.numpy()
        # Packed bits beyond the shard's end are 0.
        places = torch.arange(8, dtype=torch.uint8, device=values.device)
        found = ((self._bits[:, None] >> places) & 1).view(-1).nonzero().view(-1)
        return bits, values[found].cpu().numpy()


def _differing(new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    """One bit an element, lowest first."""
    if new.device.type == "cpu":
        # numpy compares these twice as fast as torch.
        return torch.from_numpy(np.packbits(new.numpy() != old.numpy(), bitorder="little"))
    padded = torch.nn.functional.pad((new != old).to(torch.uint8), (0, -len(new) % 8)).view(-1, 8)
    return (padded << torch.arange(8, dtype=torch.uint8, device=new.device)).sum(1, dtype=torch.uint8)


class WeightChanges:
    """See the module docstring.  For a model in float32 nothing is rounded, and every version is whole."""

    def __init__(self) -> None:
        self.base = NO_BASE
        """The version that was offered last; `NO_BASE`: what changed is unknown."""
        self.shards: dict[str, ShardWeights] = {}

    def record(self, optimizer: Any, shards: Mapping[str, ShardWeights]) -> None:
        """Cast in the place of one of Megatron-Core's optimizers, which owns these shards."""
        self.shards |= shards
        optimizer._copy_main_params_to_model_params = partial(self._cast, shards)

    @torch.no_grad()
    def cast_again(self) -> None:
        """Weights that were lost come from their masters: they are those of before."""
        for shard in self.shards.values():
            shard.cast(mark=False)

    @property
    def marks(self) -> bool:
        """Whether changes are marked."""
        return self.base != NO_BASE

    @torch.no_grad()
    def _cast(self, shards: Mapping[str, ShardWeights]) -> None:
        for shard in shards.values():
            shard.cast(self.marks)

    def offered(self, version: int) -> None:
        for shard in self.shards.values():
            shard.clear()
        self.base = version if self.shards else NO_BASE

    def drop(self) -> None:
        self.base = NO_BASE
