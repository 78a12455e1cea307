"""Reasons of C-MLFQ's decisions; `Decision.reason` fills in the numbers."""

from __future__ import annotations

from typing import Final

STARTS: Final = "start: {engine} then finishes in {finish_s:.1f} s, with {remaining:.0f} tokens expected of this one"
STARTS_AT_SIBLING: Final = (
    "start: {engine} has the prompt cached for a sibling and then finishes in {finish_s:.1f} s, with {remaining:.0f}"
    " tokens expected of this one"
)
STAYS: Final = "stay: with it {engine} finishes in {finish_s:.1f} s; {remaining:.0f} tokens expected of this one"
MOVES: Final = (
    "move: {engine} adds {ratio:.1f} times less to the late finish than staying, though the context is prefilled again;"
    " {remaining:.0f} tokens expected"
)
LEAVES: Final = (
    "move: the last engine is gone, full or under new weights; {engine} finishes in {finish_s:.1f} s; {remaining:.0f}"
    " tokens expected"
)
WAITS_FOR_CACHE: Final = "wait: {wanted} is full, but has the context cached; {remaining:.0f} tokens expected"
NO_ROOM: Final = "wait: the KV caches are full with in-flight contexts; {remaining:.0f} tokens expected"
WAITS: Final = "wait: no engine has a free slot; {remaining:.0f} tokens expected"
