"""An operator's order for another layout, as rank 0 sees it: the file `RunDir.order`, which the command line wrote and
which goes when it is answered.

Every order gets one answer, an event that names it: ``repartitioned`` or ``repartition_refused``.  The event comes
first, then the file goes; an order whose answer is in the log already was answered by a rank 0 that died in between,
and only its file goes.  So no order is carried out twice, and none is lost silently while there is a rank 0 to speak.

An order left over from an attempt that died (`left_over`) is refused by the next one: it was given for a run that
somebody saw in another state, and whoever resumes a run says with ``-o`` what it shall be.  Unless the run starts in
the very layout: then the order was carried out as far as the configuration, and that is its answer.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import msgspec

from libra_hpc.protocol.layout_order import LONGEST, LayoutOrder, decode_order
from libra_hpc.telemetry.rundir import RunDir

REFUSED = "repartition_refused"


class Orders:
    """The file and its answers; ``event(kind, **fields)`` writes to the log, ``answered`` are the orders that the
    log answers."""

    def __init__(self, run: RunDir, event: Callable[..., None], answered: Collection[str]) -> None:
        self._path, self._event = run.order, event
        self._answered = set(answered)
        self._unreadable: bytes | None = None

    def waiting(self) -> LayoutOrder | None:
        """The order that waits for its answer.  What is none is refused here, once."""
        try:
            if not self._path.is_file():
                return None
            with self._path.open("rb") as file:
                data = file.read(LONGEST + 1)
        except OSError:
            return None
        try:
            if len(data) > LONGEST:
                raise msgspec.DecodeError(f"it is longer than {LONGEST} bytes")
            order = decode_order(data)
        except msgspec.DecodeError as error:
            if data != self._unreadable:
                self._unreadable = data
                self._event(REFUSED, by="operator", reason=f"{self._path.name} is no order: {error}")
            self._remove()
            return None
        if order.id in self._answered:
            self._remove()
            return None
        return order

    def refuse(self, order: LayoutOrder, reason: str) -> None:
        """Say why not."""
        self.answer(order.id, REFUSED, by="operator", reason=reason, changes=order.values)

    def answer(self, order: str, kind: str, **fields: object) -> None:
        """The one answer to an order."""
        self._event(kind, order=order, **fields)
        self._answered.add(order)
        self._remove()

    def _remove(self) -> None:
        try:
            self._path.unlink(missing_ok=True)
        except OSError:
            return
