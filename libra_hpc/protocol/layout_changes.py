"""A Layout as changes: what rank 0 publishes of it, and how a node puts it together again.

- A change takes a node from any number between ``since`` and ``number`` to ``number``.
- It builds on more than a node has -> the node keeps what it has, and its heartbeat shows that number.
- The node's sum is another one -> it has number 0, and gets the whole.
"""

from __future__ import annotations

import hashlib

import msgspec
from msgspec.structs import asdict, replace

from .layout import Layout, LayoutChange

NOTHING = msgspec.convert({}, Layout)
HEAD = tuple(name for name in NOTHING.__struct_fields__ if name not in ("number", "rows"))


def digest(layout: Layout) -> int:
    return int.from_bytes(hashlib.blake2b(msgspec.msgpack.encode(layout), digest_size=8).digest())


def taken(layout: Layout, change: LayoutChange) -> Layout:
    """The Layout after a change; the same object where that changes nothing, number 0 where the sum is wrong.

    The rows of number 0 are those from which the whole differs that follows.
    """
    if not change.since <= layout.number <= change.number:
        return layout
    made = layout
    if layout.number < change.number:
        base = layout if change.since else NOTHING
        rows = {rank: row for rank, row in (base.rows | change.rows).items() if rank not in change.gone}
        fields = {"number": change.number, "rows": dict(sorted(rows.items()))}
        made = msgspec.convert(asdict(base) | change.head | fields, Layout)
    return made if digest(made) == change.digest else replace(layout, number=0)


class LayoutHistory:
    """Rank 0's: the newest Layout, and what differs from earlier ones."""

    def __init__(self) -> None:
        self.layout = NOTHING
        self._digest, self._rows, self._head = digest(NOTHING), dict[int, int](), dict[str, int]()
        """Its sum, and which number changed each row and each other field last."""

    def put(self, layout: Layout) -> bool:
        """Give it the next number; False where nothing differs from the newest one."""
        was, number = self.layout, self.layout.number + 1
        ranks = was.rows.keys() | layout.rows.keys()
        rows = [rank for rank in ranks if was.rows.get(rank) != layout.rows.get(rank)]
        head = [name for name in HEAD if getattr(was, name) != getattr(layout, name)]
        if rows or head:
            self._rows |= dict.fromkeys(rows, number)
            self._head |= dict.fromkeys(head, number)
            self.layout = replace(layout, number=number, rows=dict(sorted(layout.rows.items())))
            self._digest = digest(self.layout)
        return bool(rows or head)

    def since(self, number: int) -> LayoutChange:
        """What a node needs that has this number; 0: the whole."""
        layout = self.layout
        ranks = [rank for rank, at in self._rows.items() if at > number]
        return LayoutChange(
            layout.number,
            number,
            self._digest,
            rows={rank: layout.rows[rank] for rank in ranks if rank in layout.rows},
            gone=tuple(rank for rank in ranks if rank not in layout.rows),
            head={name: getattr(layout, name) for name, at in self._head.items() if at > number},
        )

    def changed(self, rank: int) -> int:
        """The number that changed its row last."""
        return self._rows.get(rank, 0)
