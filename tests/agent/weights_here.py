"""What a node's parts see of its carrier: an image that a test brings up to date."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from libra_hpc.protocol.carriers import Peer, PolicySaved, Publish, SavePolicy
from libra_hpc.protocol.engine import VersionFiles
from libra_hpc.simulated.state import image_shapes, offer
from libra_hpc.weights.image import IMAGE_FILE, Image, pin, write_pinned
from libra_hpc.weights.pieces import WHOLE, offer_path, payload_path, read_offer


class WrittenImage:
    """Stands for `NodeCarrier`; its tensors are those of simulated trainers."""

    def __init__(self, folder: Path) -> None:
        self._folder, self.version = folder, -1
        self.changes: tuple[VersionFiles, ...] = ()
        self.told: list[int | None] = []
        """Versions that all live engines were said to have."""
        self.wire_s = self.image_s = 0.0
        self.peer = Peer(0, ("127.0.0.1",), 9)
        self._wanted: tuple[SavePolicy, Callable[[PolicySaved], None]] | None = None

    @property
    def image(self) -> Path:
        return self._folder / IMAGE_FILE

    def write(self, version: int, changed: Callable[[], None]) -> None:
        offer(self._folder, version, WHOLE, 0)
        self.publish(Publish(version, WHOLE, (("t0", 0),), ()))
        changed()

    def publish(self, message: Publish) -> None:
        """All writers are of this node."""
        paths = [offer_path(self._folder, message.version, writer) for writer, _ in message.writers]
        offers = [(read_offer(path), payload_path(path).read_bytes()) for path in paths]
        Image(self._folder, image_shapes(), "F32").apply(message.version, offers)
        self.version = message.version
        self._pin()

    def save_policy(self, order: SavePolicy, answer: Callable[[PolicySaved], None]) -> None:
        self._wanted = order, answer
        self._pin()

    def drop_policy(self) -> None:
        if self._wanted is not None:
            (order, answer), self._wanted = self._wanted, None
            answer(PolicySaved(order.path, reason="it is not needed any more"))

    def _pin(self) -> None:
        if self._wanted is None or self._wanted[0].version != self.version:
            return
        (order, answer), self._wanted = self._wanted, None
        _, copy = pin(self.image)
        with copy:
            answer(PolicySaved(order.path, *write_pinned(copy, Path(order.path))))

    def engines_have(self, version: int | None) -> None:
        self.told.append(version)
