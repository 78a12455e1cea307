"""Changes of Layouts: whatever a network or a memory does to them, a node has a Layout that was published."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from libra_hpc.protocol.layout import Layout, LayoutChange, ResumePoint, Row
from libra_hpc.protocol.layout_changes import NOTHING, LayoutHistory, digest, taken

ROWS = st.builds(Row, st.sampled_from(["train", "rollout"]), starts=st.integers(0, 2), member=st.booleans())
LAYOUTS = st.builds(Layout, rows=st.dictionaries(st.integers(0, 4), ROWS), recorded=st.integers(0, 2))
WHAT = [*["put"] * 3, "repeat", "since", *["deliver"] * 4, "twice", "drop", "restart", "wrong"]


def sent(change: LayoutChange) -> LayoutChange:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(change), type=LayoutChange)


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_a_node_always_has_a_published_layout_and_in_the_end_the_newest(data: st.DataObject) -> None:
    """Frames are lost, late, doubled and reordered; nodes begin again, and one has rows that nobody sent."""
    published, known, frames, sound = LayoutHistory(), NOTHING, list[LayoutChange](), True
    history = {0: NOTHING}
    for what in data.draw(st.lists(st.sampled_from(WHAT), max_size=60)):
        before = known.number
        match what:
            case "put":
                was = published.layout.number
                assert published.put(data.draw(LAYOUTS)) is (published.layout.number == was + 1)
                history[published.layout.number] = published.layout
                frames.append(sent(published.since(was)))
            case "repeat":
                frames.append(sent(published.since(published.layout.number)))
            case "since":
                frames.append(sent(published.since(known.number)))
            case "deliver" if frames:
                known = taken(known, frames.pop(data.draw(st.integers(0, len(frames) - 1))))
            case "twice" if frames:
                known = taken(known, frames[data.draw(st.integers(0, len(frames) - 1))])
            case "drop" if frames:
                frames.pop(data.draw(st.integers(0, len(frames) - 1)))
            case "restart":
                known, sound, before = NOTHING, True, 0
            case "wrong" if known.number:
                known, sound = replace(known, rows={**known.rows, 2: Row("nobody sent it")}), False
        if sound:
            assert known == history[known.number]
            assert known.number >= before
    repeat = sent(published.since(published.layout.number))
    assert (repeat.rows, repeat.gone, repeat.head) == ({}, (), {}), "it has the sum alone"
    known = taken(known, repeat)
    for _ in range(2):
        known = taken(known, sent(published.since(known.number)))
    assert known == published.layout


def test_a_step_a_move_and_a_loss_cost_a_row_however_many_nodes_there_are() -> None:
    published, start = LayoutHistory(), ResumePoint(3, "/scratch/me/runs/one/checkpoints/step-000003", 3, ())
    layout = Layout(rows={rank: Row("rollout", "rollout", starts=1) for rank in range(1, 1024)}, start=start)
    sizes = list[int]()
    for next_one in (
        layout,
        replace(layout, recorded=4),
        replace(layout, rows={**layout.rows, 7: Row("lost", life=1)}),
    ):
        published.put(next_one)
        sizes.append(len(msgspec.msgpack.encode(published.since(published.layout.number - 1))))
    assert sizes[0] < 50_000
    assert max(sizes[1:]) < 100
    assert len(msgspec.msgpack.encode(published.since(published.layout.number))) < 60


@pytest.mark.parametrize("number", [1, 5])
def test_a_wrong_sum_is_asked_for_whole_and_what_was_wrong_stays_known_for_comparison(number: int) -> None:
    layout = Layout(1, {1: Row("train")})
    forgot = taken(layout, LayoutChange(number, 1, digest(layout) ^ 1))
    assert (forgot.number, forgot.rows[1]) == (0, Row("train"))
