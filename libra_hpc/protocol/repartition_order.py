"""An operator's order to a running job: one JSON file in the run directory (`RunDir.order`), read by rank 0.

Others may write to a shared file system, so the file is decoded against this schema and its reader checks the
content.
"""

from __future__ import annotations

import secrets
from typing import Annotated

import msgspec

LONGEST = 65536
"""Bytes of an order; its lists have an entry for each node."""

Value = int | bool | str | list[int]


class RepartitionOrder(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Repartition the run: change the rank layout at the next step boundary."""

    id: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{12}$")]
    """Repeated in the event that answers the order."""
    attempt: Annotated[int, msgspec.Meta(ge=1)]
    """Attempt that was running when the order was written."""
    t: float
    """Epoch seconds."""
    values: Annotated[dict[str, Value], msgspec.Meta(min_length=1, max_length=64)]
    """New values by dotted key of the run file."""


_decoder = msgspec.json.Decoder(RepartitionOrder)


def new_order(attempt: int, t: float, values: dict[str, Value]) -> RepartitionOrder:
    return RepartitionOrder(secrets.token_hex(6), attempt, t, values)


def encode_order(order: RepartitionOrder) -> bytes:
    return msgspec.json.encode(order) + b"\n"


def decode_order(data: bytes) -> RepartitionOrder:
    """Parse an order; raises ``msgspec.DecodeError`` when it is none."""
    try:
        return _decoder.decode(data)
    except (UnicodeDecodeError, RecursionError) as error:
        raise msgspec.DecodeError(str(error)) from None
