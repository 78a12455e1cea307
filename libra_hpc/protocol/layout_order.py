"""What an operator orders of a running job, from the command line to rank 0: one JSON file in the run directory
(`RunDir.order`).

The file system is shared and the file lies open, so it is decoded against this one schema and checked again by its
reader.
"""

from __future__ import annotations

import secrets
from typing import Annotated

import msgspec

LONGEST = 65536
"""Bytes of an order: lists have an entry for each node."""

Value = int | bool | str | list[int]


class LayoutOrder(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Lay the ranks out anew."""

    id: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{12}$")]
    """Stands in the event that answers it."""
    attempt: Annotated[int, msgspec.Meta(ge=1)]
    """The attempt that the operator saw running."""
    t: float
    """Epoch seconds."""
    values: Annotated[dict[str, Value], msgspec.Meta(min_length=1, max_length=64)]
    """By dotted key of the run file."""


_decoder = msgspec.json.Decoder(LayoutOrder)


def new_order(attempt: int, t: float, values: dict[str, Value]) -> LayoutOrder:
    """An order that no other is taken for."""
    return LayoutOrder(secrets.token_hex(6), attempt, t, values)


def encode_order(order: LayoutOrder) -> bytes:
    """JSON bytes."""
    return msgspec.json.encode(order) + b"\n"


def decode_order(data: bytes) -> LayoutOrder:
    """Parse an order; raises ``msgspec.DecodeError`` when it is none."""
    try:
        return _decoder.decode(data)
    except (UnicodeDecodeError, RecursionError) as error:
        raise msgspec.DecodeError(str(error)) from None
