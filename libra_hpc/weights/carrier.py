"""The carrier: the process of a node that moves new weights, so that the agent's loop has none of their bytes.

    python -m libra_hpc.weights.carrier --socket PATH --config JSON

- A version was published -> its offers are pulled (`weights/pull.py`) and served on (`weights/server.py`).
- A version is whole on this node -> the agent gets `VersionHere`, and the image is brought up to it.
- The agent's socket closes -> the process ends.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import math
import queue
import socket
import sys
import threading
import time
from collections.abc import Iterator
from mmap import PROT_READ, mmap
from pathlib import Path
from typing import Any
from zlib import crc32

import msgspec

from libra_hpc.errors import error_text
from libra_hpc.process.dump import dump_on_request
from libra_hpc.process.leave import leave
from libra_hpc.protocol.carrier import (
    CarrierConfig,
    CarrierReady,
    Engines,
    ImageHere,
    NotStored,
    Publish,
    from_carrier,
    to_carrier,
)
from libra_hpc.protocol.codec import EngineSocket

from .image import Image, reading
from .offers import HeldOffer, OfferStore
from .pieces import WHOLE, Offer, TensorBlock, WeightPiece, decode_offer
from .pull import Puller
from .server import IMAGE, CarrierServer
from .weightfile import FLOATS, WeightFileError
from .wire import Absent

CALLERS = 64
"""That may wait to be admitted."""

log = logging.getLogger("libra_hpc.carrier")


class NodeImage:
    """The node's image: versions are written into it in order, by one thread, while other nodes may read it."""

    def __init__(self, config: CarrierConfig) -> None:
        self._config = config
        self._image: Image | None = None
        self._offered: tuple[int, HeldOffer] | None = None
        self._describing = threading.Lock()

    @property
    def version(self) -> int:
        return -1 if self._image is None else self._image.version

    def write(self, version: int, offers: list[HeldOffer]) -> None:
        """Bring the image to ``version``; raises `OSError` where there is no room, and `WeightFileError`."""
        if self._image is None:
            self._image = Image(Path(self._config.folder), self._config.shapes, self._config.dtype)
        if version > self._image.version:
            self._image.apply(version, [(decode_offer(held.manifest, held.owner), held.payload) for held in offers])

    @contextlib.contextmanager
    def offered(self, version: int) -> Iterator[HeldOffer]:
        if self._image is None or self._image.version < 0:
            raise Absent("there is no image yet")
        try:
            with reading(self._image.path) as now:
                if version not in (-1, now):
                    raise Absent(f"the image has version {now}")
                with self._describing:
                    if self._offered is None or self._offered[0] != now:
                        self._offered = now, _as_offer(self._image, now)
                yield self._offered[1]
        except WeightFileError as error:
            raise Absent(str(error)) from error


class Carrier:
    def __init__(self, config: CarrierConfig, agent: EngineSocket[Any]) -> None:
        self._agent = agent
        self._image = NodeImage(config)
        self._store = OfferStore(cap_bytes=_bytes_of(config))
        family = socket.AF_INET6 if ":" in config.address or not config.address else socket.AF_INET
        listener = socket.create_server(
            (config.address, 0), family=family, backlog=CALLERS, dualstack_ipv6=not config.address
        )
        self._port = listener.getsockname()[1]
        self._server = CarrierServer(listener, config.secret, self._store, self._image)
        self._whole: queue.SimpleQueue[tuple[Publish, list[HeldOffer]]] = queue.SimpleQueue()
        self._puller = Puller(
            Path(config.folder),
            config.rank,
            config.secret,
            store=self._store,
            complete=lambda message, offers: self._whole.put((message, offers)),
            report=agent.send,
        )
        self._engines = -1

    def run(self) -> None:
        """Obey the agent until it closes its socket."""
        self._server.start()
        for work in (self._puller.run, self._write_image):
            threading.Thread(target=_or_end, args=(work,), daemon=True).start()
        self._agent.send(CarrierReady(self._port))
        while True:
            match self._agent.receive():
                case Publish() as message:
                    self._puller.publish(message)
                case Engines(version=version):
                    self._engines = version
                    self._prune()

    def _write_image(self) -> None:
        while True:
            message, offers = self._whole.get()
            began = time.monotonic()
            try:
                self._image.write(message.version, offers)
            except (OSError, WeightFileError) as error:
                # Engines take the offers; who needs an image asks another node.
                self._agent.send(NotStored(message.version, f"the image: {error_text(error)}"))
                continue
            self._agent.send(ImageHere(message.version, time.monotonic() - began))
            self._prune()

    def _prune(self) -> None:
        self._store.prune(min(self._engines, self._image.version))


def _as_offer(image: Image, version: int) -> HeldOffer:
    """The image as whole tensors; they lie one behind the other."""
    pieces, at = [], 0
    with image.path.open("rb") as file, mmap(file.fileno(), 0, prot=PROT_READ) as memory, memoryview(memory) as view:
        for name, shape in image.shapes.items():
            count = math.prod(shape)
            size = count * FLOATS[image.dtype]
            with view[image.start + at : image.start + at + size] as data:
                pieces.append(
                    WeightPiece(
                        TensorBlock(name, 0, 1, count, count), image.dtype, "dense", count, at, size, crc32(data)
                    )
                )
            at += size
    offer = Offer(version, WHOLE, IMAGE, tuple(pieces), at)
    return HeldOffer(version, IMAGE, msgspec.msgpack.encode(offer), image.path, at, start=image.start)


def _bytes_of(config: CarrierConfig) -> int:
    return sum(map(math.prod, config.shapes.values())) * FLOATS[config.dtype]


def _or_end(work: Any) -> None:
    """A defect in a thread ends the process: the agent starts another, with a traceback in the log."""
    try:
        work()
    except (BrokenPipeError, ConnectionError):
        leave(0)
    except BaseException:
        log.exception("the carrier failed")
        leave(1)


def main() -> None:
    parser = argparse.ArgumentParser(prog="libra_hpc.weights.carrier", description="Moves weights between nodes.")
    parser.add_argument("--socket", required=True, help="the agent's Unix-domain socket")
    parser.add_argument("--config", required=True, type=Path, help="JSON file of CarrierConfig")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    dump_on_request()
    config = msgspec.json.decode(options.config.read_bytes(), type=CarrierConfig)
    with contextlib.suppress(EOFError, ConnectionError):
        Carrier(config, EngineSocket(options.socket, to_carrier, from_carrier)).run()


if __name__ == "__main__":
    main()
    leave(0)
