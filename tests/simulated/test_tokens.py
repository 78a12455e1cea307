"""Token ids of a dry run encode the length of a turn, also when part of it is done."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra_hpc.protocol.codec import pack_i32, unpack_i32
from libra_hpc.simulated import tokens

COUNT = st.integers(1, 300)


@given(
    number=st.integers(0, 2**31 - 1),
    sample=st.integers(0, 64),
    size=COUNT,
    turns=st.lists(st.tuples(COUNT, COUNT), min_size=1, max_size=4),
    data=st.data(),
)
def test_a_context_encodes_what_is_left_of_its_turn(
    number: int, sample: int, size: int, turns: list[tuple[int, int]], data: st.DataObject
) -> None:
    context = tokens.prompt(number, sample, size, turns[0][0])
    shared = len(context)
    assert shared == max(size, tokens.LEAST_PROMPT)
    for place, (turn, new) in enumerate(turns):
        for done in {0, data.draw(st.integers(0, turn - 1))}:
            partial = [*context, *unpack_i32(tokens.generated(done, complete=False))]
            assert tokens.read(pack_i32(partial)) == tokens.SimulatedContext(
                number, shared, sample, len(partial), turn - done
            )
        context += unpack_i32(tokens.generated(turn, complete=True))
        if place + 1 < len(turns):
            context += tokens.answer(new, turns[place + 1][0])
    with pytest.raises(tokens.Unreadable, match="do not say how long"):
        tokens.read(pack_i32(context))


@pytest.mark.parametrize("ids", [[], [1, 4, 0], [0, 4, 0, 0], [0, 9, 0, 20], [0, 4, 0, 17, 1], [-1, 4, 0, 20]])
def test_other_ids_are_refused(ids: list[int]) -> None:
    with pytest.raises(tokens.Unreadable, match="prompt: "):
        tokens.read(pack_i32(ids))
    with pytest.raises(tokens.Unreadable):
        tokens.read(pack_i32(ids)[:-1])


def test_a_turn_ends_with_the_stop_id() -> None:
    assert unpack_i32(tokens.generated(3, complete=True)) == [tokens.BODY, tokens.BODY, tokens.STOP]
    assert tokens.generated(0, complete=False) == b""
