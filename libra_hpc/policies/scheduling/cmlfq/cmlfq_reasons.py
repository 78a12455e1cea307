"""Reasons of C-MLFQ's decisions; `Decision.reason` fills in the numbers."""

from __future__ import annotations

from typing import Final

_LEFT: Final = (
    "; {remaining:.0f} tokens expected of this one: a total of {total:.0f} by its task and {siblings:.0f} siblings"
)
STARTS: Final = "start: {engine} then finishes in {finish_s:.1f} s" + _LEFT
STARTS_AT_SIBLING: Final = (
    "start: {engine} has the prompt cached for a sibling and then finishes in {finish_s:.1f} s" + _LEFT
)
STAYS: Final = "stay: with it {engine} finishes in {finish_s:.1f} s" + _LEFT
MOVES: Final = (
    "move: {engine} adds {ratio:.1f} times less to the late finish than staying, though the context is prefilled again"
    + _LEFT
)
LEAVES: Final = (
    "move: the last engine is gone, has no room or new weights; {engine} finishes in {finish_s:.1f} s" + _LEFT
)
NO_ROOM: Final = "wait: the KV caches are full with in-flight contexts" + _LEFT
WAITS_FOR_LAST: Final = "wait: {engine} has the prefix cached and no free slot" + _LEFT
WAITS: Final = "wait: no engine has a free slot" + _LEFT
