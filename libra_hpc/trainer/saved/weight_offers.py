"""Offers what this process owns of a new version of the weights, to whoever pulls it (`libra_hpc.weights.pieces`).

- The version that changed is the one that was offered last -> what changed since.
- Otherwise, and for weights in float32, of which nearly all change -> whole tensors.
- A file cannot be written -> nothing of it remains, and what changed is offered the next time.

No process waits for another: together the offers of all processes of the core are one version.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import torch

from libra_hpc.trainer.device import STAGE_BYTES, to_host
from libra_hpc.trainer.train_engine import TrainEngine
from libra_hpc.weights.blocks import Slice, own_slices, within
from libra_hpc.weights.delta import DENSE, bits_of, count_set, dense, marked
from libra_hpc.weights.pieces import WHOLE, Encoded, Offer, elements, write_offer
from libra_hpc.weights.safetensors_writer import TYPES

BITS = {4: torch.int32, 2: torch.int16}
"""Integers by bytes of an element."""


class WeightOffers:
    def __init__(self, engine: TrainEngine, rank: int) -> None:
        self._state, self._owner = engine.state, f"t{rank}"
        slices = own_slices(engine.shape, engine.split)
        self._spans = {name: span for name, span in engine.state.spans.items() if name in slices}
        self._plan = {name: within(slices[name], *span) for name, span in self._spans.items()}
        self.total = sum(elements(one.block) for own in self._plan.values() for one in own)
        """Elements of which this process offers the values."""
        self._to_host = to_host(engine.device)

    def write(self, folder: Path, version: int, base: int) -> Offer:
        """Write the offer of the present weights; raises `OSError` when there is no room."""
        changes = self._state.changes
        delta = WHOLE < base == changes.base
        pieces = self._changed() if delta else self._whole()
        offer = write_offer(folder, version, base if delta else WHOLE, self._owner, pieces)
        changes.offered(version)
        return offer

    def _whole(self) -> Iterator[Encoded]:
        plan = [(one, self._weights(name)) for name, own in self._plan.items() for one in own]
        blocks = [(one, weights.dtype, _cut(one, weights)) for one, weights in plan]
        arriving = self._to_host(part for _, _, parts in blocks for part in parts)
        for one, dtype, parts in blocks:
            arrays = (part.numpy() for part in islice(arriving, len(parts)))
            yield Encoded(one.block, TYPES[dtype], "dense", elements(one.block), arrays)

    def _changed(self) -> Iterator[Encoded]:
        for name, own in self._plan.items():
            if name not in self._state.changes.shards:
                # Nothing trains it.
                continue
            weights = self._weights(name)
            bits, values = self._state.changes.shards[name].changed()
            begin = 0
            for one in own:
                count = elements(one.block)
                own_bits = bits_of(bits, one.offset, count)
                end = begin + count_set(own_bits)
                if end - begin > DENSE * count:
                    yield _dense(one, weights)
                elif end > begin:
                    first, last = (one.offset, one.offset + count) if len(values) == len(weights) else (begin, end)
                    yield marked(one.block, TYPES[weights.dtype], own_bits, values[first:last])
                begin = end

    def _weights(self, name: str) -> torch.Tensor:
        return self._state.parameters[name].data.view(-1)[slice(*self._spans[name])]


def _dense(one: Slice, weights: torch.Tensor) -> Encoded:
    return dense(one.block, TYPES[weights.dtype], _bits(one, weights).cpu().numpy())


def _cut(one: Slice, weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return torch.split(_bits(one, weights), STAGE_BYTES // weights.itemsize)


def _bits(one: Slice, weights: torch.Tensor) -> torch.Tensor:
    return weights[one.offset : one.offset + elements(one.block)].view(BITS[weights.itemsize])
