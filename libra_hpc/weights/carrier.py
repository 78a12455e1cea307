"""The carrier: the process of a node that moves new weights, so that the agent's loop has none of their bytes.

    python -m libra_hpc.weights.carrier --socket FD --config JSON

- A version was published -> its offers are pulled (`weights/pull.py`) and served on (`weights/server.py`).
- A version is whole on this node -> the agent gets `VersionHere`, and the image is brought up to it.
- Others copy blocks of the image -> its writer waits for one of them at most, whatever their links do.
- A checkpoint's policy is asked for -> at its version the image is copied aside, before it gets a newer one; a thread
  writes the copy.
- A copy of another node's part of a snapshot is wanted -> a thread pulls it (`weights/parts.py`).
- The agent's socket closes -> the process ends.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from libra_hpc.config.run import RunConfig
from libra_hpc.errors import error_text
from libra_hpc.models.architecture import hf_shapes, read_shape
from libra_hpc.process.addresses import listen
from libra_hpc.process.entry import leave, run
from libra_hpc.process.progress import Pulse
from libra_hpc.protocol.carriers import (
    CarrierReady,
    Engines,
    ImageHere,
    NotStored,
    PartPulled,
    PolicySaved,
    Publish,
    PullPart,
    SavePolicy,
    from_carrier,
    to_carrier,
)
from libra_hpc.protocol.codec import EngineSocket
from libra_hpc.protocol.engine_state import WRITE_IMAGE

from .image import IMAGE_FILE, Image, pin, reading, write_pinned
from .offers import OfferStore, StoredOffer
from .parts import pull_part
from .pieces import WHOLE, read_offer
from .pull import Landed, Puller
from .receiver import ArrivingImage
from .server import CarrierServer
from .weightfile import PLAIN, WeightFileError, Wrapped, tensor_bytes, wrapped_file
from .wire import WAITING_S, Absent, BandwidthPace, Caller

RETRY_S, RETRY_MAX_S = 1.0, 10.0
"""Pauses after an image that could not be written: somebody makes room in seconds at best."""
CALLERS = 64
"""That may wait to be admitted."""

log = logging.getLogger("libra_hpc.carrier")


class CarrierConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The carrier of a node in a run."""

    run: RunConfig
    rank: int
    folder: str
    """The node's shared memory."""
    addresses: tuple[str, ...]
    """All that its node has; it listens at the only one, or at all."""
    secret: bytes
    """Secret of the run; other nodes prove that they have it."""
    shapes: dict[str, tuple[int, ...]] = {}
    """Shapes of the image's tensors; empty: those of the model's folder."""
    parts: str = ""
    """Folder of the node's snapshots, which other nodes may pull; empty: it has none."""
    guest: bool = False
    """Other nodes let no guest read their memory."""
    pull_mb_s: float = 0.0
    """Most MB/s that it gets from other nodes; 0: no limit."""

    @property
    def simulated(self) -> bool:
        return self.run.run.engine == "simulated"

    @property
    def dtype(self) -> str:
        """Type of the model, in the words of safetensors files."""
        return "F32" if self.simulated or self.run.model.dtype == "float32" else "BF16"


_decoder = msgspec.json.Decoder(CarrierConfig)


class NodeImage:
    """The node's image: versions are written into it in order, by one thread, while other nodes may read it.

    It outlives the process: another carrier goes on with it.
    """

    def __init__(self, config: CarrierConfig) -> None:
        self._config = config
        shape = None if config.shapes else read_shape(Path(config.run.model.path))
        self.shapes = hf_shapes(shape) if shape else config.shapes
        self._wrapped = shape is not None and bool(shape.wrapper)
        self._image: Image | None = None
        self._copying, self._writes = threading.Lock(), False
        self.arriving: ArrivingImage | None = None
        if (Path(config.folder) / IMAGE_FILE).exists():
            self._open()

    @property
    def size(self) -> int:
        """Bytes of its tensors."""
        return tensor_bytes(self.shapes, self._config.dtype)

    @property
    def version(self) -> int:
        return -1 if self._image is None else self._image.version

    @property
    def whole(self) -> bool:
        """Whether it can be read."""
        if self._image is None:
            return False
        with contextlib.suppress(WeightFileError), reading(self._image.path):
            return True
        return False

    def write(self, version: int, landed: Sequence[Landed]) -> None:
        """Bring the image to ``version``; raises `WeightFileError`, also where there is no room."""
        image = self._open()
        if version <= image.version:
            return
        self._writes = True
        try:
            with self._copying:
                match landed:
                    case [ArrivingImage() as blocks]:
                        image.fill(version, blocks.newest, blocks.view)
                    case _:
                        offers = [(one.offer, one.view) for one in landed if isinstance(one, StoredOffer)]
                        image.apply(version, offers)
        finally:
            self._writes = False
        if self.whole:
            self.arriving = None

    def block(self, version: int, begin: int, end: int) -> tuple[int, bytes] | None:
        if self.arriving and (block := self.arriving.block(version, begin, end)):
            return block
        if self._image is None or self._image.version < 0:
            if self.arriving:
                return None
            raise Absent("there is no image yet")
        # A writer goes first, and callers are not silent for as long as it works.
        if self._writes or not self._copying.acquire(timeout=WAITING_S):
            return None
        try:
            found = self._image.block(begin, end)
        finally:
            self._copying.release()
        return found if found is not None and found[0] >= version else None

    def pinned(self, version: int) -> BinaryIO:
        """A copy of it; raises `WeightFileError` when it is not at ``version``, `OSError` where there is no room."""
        if self._image is None or self.version != version:
            raise WeightFileError(f"the image of this node has version {self.version}, not {version}")
        return pin(self._image.path)[1]

    def wrapped(self) -> Wrapped:
        """What a policy's file has besides the image."""
        folder = Path(self._config.run.model.path)
        return wrapped_file(folder, self.shapes, self._config.dtype) if self._wrapped else PLAIN

    def _open(self) -> Image:
        if self._image is None:
            self._image = Image(Path(self._config.folder), self.shapes, self._config.dtype)
        return self._image


class Carrier:
    def __init__(self, config: CarrierConfig, agent: EngineSocket[Any]) -> None:
        self._agent, self._pulse = agent, Pulse(agent.send)
        self._image = NodeImage(config)
        self._store = OfferStore(cap_bytes=self._image.size)
        folder, parts = Path(config.folder), Path(config.parts) if config.parts else None
        self._adopt(folder)
        listener = listen(config.addresses, CALLERS)
        self._port = listener.getsockname()[1]
        pace, served = BandwidthPace(config.pull_mb_s * 1e6), (self._store, self._image, parts)
        guests = config.secret if config.guest else b""
        self._server = CarrierServer(listener, config.secret, *served, rank=config.rank, guests=guests, pace=pace)
        self._caller = Caller(config.rank, config.secret, pace)
        self._whole: queue.SimpleQueue[tuple[Publish, Sequence[Landed]] | SavePolicy] = queue.SimpleQueue()
        self._wanted: SavePolicy | None = None
        """Its version is not in the image yet."""
        self._puller = Puller(
            folder,
            config.rank,
            self._caller,
            image=self._image,
            store=self._store,
            complete=self._whole.put,
            report=agent.send,
        )
        self._engines: int | None = None
        """See `Engines`."""

    def run(self) -> None:
        """Obey the agent until it closes its socket."""
        self._server.start()
        for work in (self._puller.run, self._write_image):
            threading.Thread(target=_or_end, args=(work,), daemon=True).start()
        self._puller.have = self._image.version
        self._store.whole(self._puller.have)
        self._pulse.end()
        self._agent.send(CarrierReady(self._port))
        if self._image.whole:
            self._agent.send(ImageHere(self._puller.have, 0.0))
        while True:
            match self._agent.receive():
                case Publish() as message:
                    self._puller.publish(message)
                case Engines(version=version):
                    self._engines = version
                    self._prune()
                case PullPart() as order:
                    threading.Thread(target=_or_end, args=(partial(self._pull_part, order),), daemon=True).start()
                case SavePolicy(version=version) as order:
                    self._puller.wanted = version
                    self._whole.put(order)

    def _adopt(self, folder: Path) -> None:
        """Serve the offers that an earlier carrier of this node had: others may have received a part of them."""
        for path in sorted(folder.glob("offer-*.manifest")):
            with contextlib.suppress(OSError, WeightFileError):
                self._store.add(StoredOffer(read_offer(path), path.read_bytes(), path))

    def _write_image(self) -> None:
        pending: deque[tuple[Publish, Sequence[Landed]]] = deque()
        pause_s = RETRY_S
        while True:
            while not pending or not self._whole.empty():
                work = self._whole.get()
                if isinstance(work, SavePolicy):
                    self._pin("it is not needed any more")
                    self._wanted = work if work.version >= 0 else None
                    self._pin()
                else:
                    pending.append(work)
            message, offers = pending[0]
            began = time.monotonic()
            try:
                with self._pulse.phase(WRITE_IMAGE):
                    self._image.write(message.version, offers)
            except WeightFileError as error:
                self._agent.send(NotStored(message.version, str(error)))
                self._pin(str(error))
                # Later versions change this one, unless one is whole.
                whole = [number for number, (later, _) in enumerate(pending) if number and later.base == WHOLE]
                for _ in range(whole[-1] if whole else 0):
                    pending.popleft()
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, RETRY_MAX_S)
                continue
            pending.popleft()
            pause_s = RETRY_S
            if self._image.whole:
                self._agent.send(ImageHere(message.version, time.monotonic() - began))
            self._pin()
            self._prune()

    def _pin(self, failure: str = "") -> None:
        """Copy the image for the policy that is wanted, unless its version is still to come.

        ``failure``: why the version does not come.
        """
        order = self._wanted
        if order is None or (self._image.version < order.version and not failure):
            return
        self._wanted = None
        try:
            if failure:
                raise WeightFileError(failure)
            copy = self._image.pinned(order.version)
        except (OSError, WeightFileError) as error:
            reason = f"version {order.version} of the weights could not be copied aside: {error_text(error)}"
            self._agent.send(PolicySaved(order.path, reason=reason))
            return
        write = partial(_or_end, partial(self._write_policy, copy, order.path))
        threading.Thread(target=write, name="policy", daemon=True).start()

    def _pull_part(self, order: PullPart) -> None:
        try:
            pull_part(self._caller, order.peer, order.source, Path(order.target))
        except OSError as error:
            self._agent.send(PartPulled(order.target, error_text(error)))
        else:
            self._agent.send(PartPulled(order.target))

    def _write_policy(self, copy: BinaryIO, path: str) -> None:
        try:
            with copy:
                size, crc = write_pinned(copy, Path(path), self._image.wrapped())
        except (OSError, WeightFileError) as error:
            self._agent.send(PolicySaved(path, reason=f"{path}: {error_text(error)}"))
        else:
            self._agent.send(PolicySaved(path, size, crc))

    def _prune(self) -> None:
        image = self._image.version
        self._store.prune(image if self._engines is None else min(self._engines, image))


def _or_end(work: Any) -> None:
    """A defect in a thread ends the process: the agent starts another, with a traceback in the log."""
    try:
        work()
    except (BrokenPipeError, ConnectionError):
        leave(0)
    except BaseException:
        log.exception("the carrier failed")
        leave(1)


def work(link: int, file: Path) -> int:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    config = _decoder.decode(file.read_bytes())
    with contextlib.suppress(EOFError, ConnectionError):
        Carrier(config, EngineSocket(link, to_carrier, from_carrier)).run()
    return 0


if __name__ == "__main__":
    leave(run("libra_hpc.weights.carrier", work))
