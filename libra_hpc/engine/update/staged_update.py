"""A version on its way from the node's image into all workers of an engine, beside its steps.

- `take` -> the changes since the own version where all are here, and else the lease of the image, so that all workers
  read one version; it is kept until the last has staged.
- `ready` -> they begin, and are asked from time to time; one that cannot ends it for all, and old weights stay.
- `switch` -> in a pause; only an error here leaves the engine unusable.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from libra_hpc.models.architecture import tensor_fault
from libra_hpc.models.published import Shapes
from libra_hpc.protocol.engine import UpdateWeights, VersionFiles
from libra_hpc.weights.image import reading
from libra_hpc.weights.pieces import read_offer
from libra_hpc.weights.weightfile import WeightFileError, file_shapes

POLL_S = 0.02
"""Between two questions to the workers: an update may be as much late; a question to processes takes 0.2 ms."""
MOST_CHANGED = 0.15
"""Bytes of changes over those of the image, from which this is read: at 10 % changed elements the index of each costs
as much processor time as the copy of all. Half: whole copies where changes are quicker; double: 2 s a GB, not 0.9."""


class StagedUpdate:
    """At most one version at a time; ``rpc`` calls a method of every worker by name."""

    def __init__(self, rpc: Callable[..., list[Any]], in_place: bool) -> None:
        """``in_place``: whether workers can take changes; those of a CPU pack whole weights."""
        self._rpc, self._in_place = rpc, in_place
        self._has = -1
        """The version in all workers; -1: not one that was staged."""
        self._changes: list[tuple[str, ...]] = []
        self._lease = contextlib.ExitStack()
        self._image, self._version = "", -1
        self._began = self._asked = 0.0
        self._working = False
        self.seconds = 0.0
        """From the lease to the last worker, of the version staged last."""

    def take(self, update: UpdateWeights, expected: Shapes, tied: bool) -> None:
        """Find the changes, or wait for the lease of the image; any thread may call it.  Raises `WeightFileError`."""
        self._began, image = time.monotonic(), update.path
        self._changes = []
        if self._in_place and (chain := self._chain(update)):
            self._image, self._version = image, chain[-1].version
            self._changes = [change.manifests for change in chain]
            return
        with contextlib.ExitStack() as lease:
            self._version = lease.enter_context(reading(Path(image)))
            if fault := tensor_fault(file_shapes(image), expected, tied):
                raise WeightFileError(f"{image}: {fault}.")
            self._image, self._lease = image, lease.pop_all()

    def _chain(self, update: UpdateWeights) -> list[VersionFiles]:
        """Versions one after the other from the own one to at least the update's; empty: the image is to be read."""
        chain: list[VersionFiles] = []
        has = self._has
        for change in update.changes:
            if 0 <= has < change.version <= update.version and change.base <= has:
                chain.append(change)
                has = change.version
        if has < update.version:
            return []
        try:
            whole = Path(update.path).stat().st_size
            size = sum(read_offer(Path(manifest)).size for change in chain for manifest in change.manifests)
        except (OSError, WeightFileError):
            return []
        return chain if size <= MOST_CHANGED * whole else []

    def ready(self) -> bool:
        """Whether all workers have staged the version taken; raises `WeightFileError` when one cannot."""
        now = time.monotonic()
        if not self._working:
            self._rpc("stage_weights", args=(self._image, self._changes))
            self._working, self._asked = True, now
            return False
        if now - self._asked < POLL_S:
            return False
        self._asked = now
        outcomes = self._rpc("staged_weights")
        if None in outcomes:
            return False
        self._lease.close()
        self.seconds = now - self._began
        if error := next(filter(None, outcomes), ""):
            self.drop()
            raise WeightFileError(error)
        return True

    def switch(self) -> int:
        """Switch every worker; returns the version."""
        self._rpc("switch_weights")
        self._working, self._has = False, self._version
        return self._version

    def weights_lost(self) -> None:
        """The workers are about to lose their weights."""
        self._has = -1

    def drop(self) -> None:
        """Drop a version that no worker works at any more; none: nothing happens."""
        if self._working:
            self._rpc("drop_weights")
            self._working = False
