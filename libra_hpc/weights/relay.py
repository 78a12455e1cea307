"""Relays a version's weight file from the training node that exported it down a binomial tree of rollout nodes.

The file is HF-named safetensors in /dev/shm, cut in chunks (`libra_hpc.weights.flow`).  A chunk is forwarded as soon as
it is stored; only the finished file with the right checksum goes to the engines.

- A newer version is published -> unsent chunks of the older one are dropped, and what receivers have of it.
- No chunk of an announced version, or no answer to a request, within the limit -> ``weights_stalled``; asks again.
- The checksum is wrong -> ``weights_corrupt``; asks again later.
- /dev/shm has no room -> ``weights_not_stored``; all but the newest version is removed; asks again later.
- Later -> after `RETRY_S`, after twice that, ... at most `RETRY_MAX_S`, until a version is complete.
- A node joins, an engine is rebuilt, an inner node of the tree dies -> receivers ask for what they miss.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from libra_hpc.process.deadlines import DeadlineLimits, Deadlines, DeadlineSettings
from libra_hpc.protocol.agents import WeightsChunk

from .flow import Flow, Send, WeightFile, halves
from .incoming import Incoming

KEEP_VERSIONS = 2
"""An engine may still read the previous file when the next one is complete."""
RETRY_S = 10.0
"""An engine that closes an older version, or a person, frees memory: neither at once."""
RETRY_MAX_S = 60.0
"""Longest pause between two requests.

Half: more events of a node that stays full; double: up to two minutes more of old weights after room was made.
"""


class Publisher:
    """The sending end, on the node whose replica exports."""

    def __init__(self, send: Send) -> None:
        self._send, self._flow = send, Flow(send)
        self._file: WeightFile | None = None

    @property
    def version(self) -> int:
        return -1 if self._file is None else self._file.version

    def publish(self, version: int, path: Path, crc32: int, ranks: Sequence[int]) -> None:
        """Send ``path`` to ``ranks``; it must stay unchanged until `KEEP_VERSIONS` newer versions exist."""
        file, previous = WeightFile(version, path, path.stat().st_size, crc32), self._file
        self._file = file
        self._flow.drop()
        for head, rest in halves(ranks):
            self._flow.start(file, file.size, head, rest)
        for rank in ranks:
            self._send(
                rank, WeightsChunk(version, offset=0, size=file.size, crc32=crc32, relay=()), b"", lambda taken: None
            )
        if previous is not None and previous.path != path:
            _prune(path.parent, path.name.split("-")[0])

    def answer(self, rank: int, have: int) -> bool:
        """Send the newest version to one rank; False when it already has it."""
        if self._file is None or self._file.version <= have:
            return False
        self._flow.start(self._file, self._file.size, rank, ())
        return True


class Receiver:
    """The receiving and forwarding end, on a rollout node; times are seconds of ``time.monotonic``.

    ``complete`` gets each checked file; ``request`` sends a `WeightsWanted`; ``log`` writes an event.
    """

    def __init__(
        self,
        folder: Path,
        send: Send,
        *,
        complete: Callable[[WeightFile], None],
        request: Callable[[int], None],
        log: Callable[..., None],
        deadlines: DeadlineLimits = DeadlineSettings(),  # noqa: B008 (an immutable tuple)
    ) -> None:
        self._folder, self._complete, self._request, self._log = folder, complete, request, log
        # A chunk compiles nothing: there is no reason for a longer first limit.
        self._deadlines = Deadlines(DeadlineSettings(deadlines.floor_s, deadlines.floor_s, deadlines.factor))
        self._flow = Flow(send)
        self._forwarded: set[int] = set()
        self._incoming: Incoming | None = None
        self._refused = -1
        """A version that could not be stored, or was corrupt."""
        self._announced = -1
        self._failures = 0
        self._retry_at = float("inf")
        self.newest: WeightFile | None = None

    @property
    def version(self) -> int:
        return -1 if self.newest is None else self.newest.version

    def chunk(self, message: WeightsChunk, blob: bytes | bytearray, now: float) -> None:
        """Take one chunk, forward it, and finish the file when it was the last."""
        if not blob:
            self._expect(message.version, now)
            return
        if self.newest is not None and message.version == self.version and self._incoming is None:
            self._forward(message, self.newest, self.newest.size)
            return
        try:
            incoming = self._file_of(message)
            if incoming is None:
                return
            if message.offset == incoming.received:
                incoming.write(blob)
                self._deadlines.forget("request")
                self._deadlines.end("chunk", now)
                self._deadlines.begin("waiting for a chunk of new weights", "chunk", now)
        except OSError as error:
            self._not_stored(message.version, error.strerror or str(error), now)
            return
        self._forward(message, incoming.file, incoming.received)
        if incoming.complete:
            self._finish(incoming, now)

    def ask(self, have: int, now: float) -> None:
        """Request weights newer than ``have``, unless some are arriving; repeated while nothing answers."""
        if self._incoming is None:
            self._deadlines.begin("waiting for the answer to a request for weights", "request", now)
            self._request(have)

    def answered(self) -> None:
        self._deadlines.forget("request")

    def watch(self, now: float) -> None:
        """Find what does not arrive; to be called about once a second."""
        overdue = self._deadlines.pending(now)
        if overdue:
            version, received = max(self.version, self._announced), 0
            if self._incoming is not None:
                version, received = self._incoming.file.version, self._incoming.received
            self._log("weights_stalled", version=version, received=received, reason=overdue[0].sentence)
        if overdue or now >= self._retry_at:
            if self._incoming is not None:
                self._abandon()
            self._retry_at, self._refused = float("inf"), -1
            self._expected()
            self.ask(self.version, now)

    def discount(self, seconds: float) -> None:
        self._deadlines.discount(seconds)

    def reset(self) -> None:
        """Be as just constructed, and remove every file."""
        self._abandon()
        self._expected()
        self._deadlines.clear()
        self._failures, self._refused, self._retry_at, self.newest = 0, -1, float("inf"), None
        _prune(self._folder, "weights", keep=0)

    def _expect(self, version: int, now: float) -> None:
        """A version was published; the one waited for longest counts, because every step may announce another."""
        present = self.version if self._incoming is None else self._incoming.file.version
        if self._announced < 0 and version > max(present, self._refused):
            self._announced = version
            self._deadlines.begin("waiting for the first chunk of new weights", "announced", now)

    def _expected(self) -> None:
        self._announced = -1
        self._deadlines.forget("announced")

    def _file_of(self, message: WeightsChunk) -> Incoming | None:
        """Where a chunk belongs; None for one that is of no use."""
        incoming = self._incoming
        present = self.version if incoming is None else incoming.file.version
        if message.version < present or message.version <= max(self.version, self._refused):
            return None
        other = incoming is None or (message.offset == 0 and message.crc32 != incoming.file.crc32)
        if incoming is None or other or message.version > present:
            if message.offset:
                return None
            self._abandon()
            self._incoming = incoming = Incoming(self._folder, message.version, message.size, message.crc32)
            self._retry_at = float("inf")
            if message.version >= self._announced:
                self._expected()
        return incoming if message.crc32 == incoming.file.crc32 else None

    def _forward(self, message: WeightsChunk, file: WeightFile, available: int) -> None:
        for head, rest in halves(message.relay):
            if head not in self._forwarded:
                self._forwarded.add(head)
                self._flow.start(file, available, head, rest)
        self._flow.grow(available)

    def _finish(self, incoming: Incoming, now: float) -> None:
        version = incoming.file.version
        if not incoming.intact:
            self._log("weights_corrupt", version=version, size=incoming.file.size, retry_s=self._postpone(version, now))
            return
        try:
            self.newest = incoming.finish(self._folder / f"weights-{version:08d}.safetensors")
        except OSError as error:
            self._not_stored(version, error.strerror or str(error), now)
            return
        self._deadlines.forget("chunk")
        self._incoming, self._failures = None, 0
        _prune(self._folder, "weights")
        self._complete(self.newest)

    def _not_stored(self, version: int, reason: str, now: float) -> None:
        self._log("weights_not_stored", version=version, reason=reason, retry_s=self._postpone(version, now))
        _prune(self._folder, "weights", keep=1)

    def _postpone(self, version: int, now: float) -> float:
        """Take nothing of a version for a while; returns the seconds."""
        self._abandon()
        self._expected()
        wait_s = min(RETRY_MAX_S, RETRY_S * 2**self._failures)
        self._failures += 1
        self._refused, self._retry_at = version, now + wait_s
        return wait_s

    def _abandon(self) -> None:
        self._deadlines.forget("chunk")
        self._flow.drop()
        self._forwarded.clear()
        if self._incoming is not None:
            self._incoming.abandon()
            self._incoming = None


def _prune(folder: Path, prefix: str, keep: int = KEEP_VERSIONS + 1) -> None:
    files = sorted(folder.glob(f"{prefix}-*.safetensors"))
    for old in files[: max(0, len(files) - keep)]:
        old.unlink(missing_ok=True)
