"""What a node's parts see of its carrier: an image that a test brings up to date."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from libra_hpc.simulated.state import image_shapes, offer
from libra_hpc.weights.image import IMAGE_FILE, Image
from libra_hpc.weights.pieces import WHOLE, offer_path, payload_path


class WrittenImage:
    """Stands for `NodeCarrier`."""

    def __init__(self, folder: Path) -> None:
        self._folder, self.version = folder, -1
        self.told: list[int] = []
        """Versions that all engines were said to have."""
        self.wire_s = self.image_s = 0.0

    @property
    def image(self) -> Path:
        return self._folder / IMAGE_FILE

    def write(self, version: int, changed: Callable[[], None]) -> None:
        made, _ = offer(self._folder, version, WHOLE, 0)
        path = payload_path(offer_path(self._folder, version, "t0"))
        Image(self._folder, image_shapes(), "F32").apply(version, [(made, path)])
        self.version = version
        changed()

    def applied(self, version: int) -> None:
        self.told.append(version)
