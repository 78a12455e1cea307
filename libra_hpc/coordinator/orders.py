"""An operator's order for another layout: the file `RunDir.order`, which the command line wrote.

- An order is decided -> one event that names it, ``repartitioned`` or ``repartition_refused``; then the file goes.
- The log has its answer already (rank 0 died in between) -> only the file goes.
- It is of an attempt that died -> the next attempt refuses it: somebody gave it for a run in another state.
- The run starts in the very layout it orders -> it is answered as carried out.

So no order is carried out twice, and none is lost while there is a rank 0.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import msgspec

from libra_hpc.facts.rundir import RunDir
from libra_hpc.protocol.repartition_order import LONGEST, RepartitionOrder, decode_order

REFUSED = "repartition_refused"


class Orders:
    """The file and its answers.

    ``event(kind, **fields)`` writes to the log; ``answered`` has the ids of the orders that the log answers.
    """

    def __init__(self, run: RunDir, event: Callable[..., None], answered: Collection[str]) -> None:
        self._path, self._event = run.order, event
        self._answered = set(answered)
        self._unreadable: bytes | None = None

    def waiting(self) -> RepartitionOrder | None:
        """The order that waits for its answer.  A file that is no order is refused here, once."""
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

    def refuse(self, order: RepartitionOrder, reason: str) -> None:
        self.answer(order.id, REFUSED, by="operator", reason=reason, changes=order.values)

    def answer(self, order: str, kind: str, **fields: object) -> None:
        self._event(kind, order=order, **fields)
        self._answered.add(order)
        self._remove()

    def _remove(self) -> None:
        try:
            self._path.unlink(missing_ok=True)
        except OSError:
            return
