"""The replay of drafts: what is accepted, where a turn ends a draft, and what siblings add."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from bench.speculation import Counts, Stream, measure, rows
from libra_hpc.protocol.trace import TurnRecord


def stream(sample: int, prompt: Sequence[int], *turns: tuple[Sequence[int], Sequence[int]]) -> Stream:
    """``turns``: what the environment adds, and what the policy generates."""
    tokens = [*prompt]
    for new, generated in turns:
        tokens += [*new, *generated]
    return Stream(
        prompt_id="p",
        sample=sample,
        prompt_tokens=len(prompt),
        turns=tuple(TurnRecord(len(new), len(generated)) for new, generated in turns),
        tokens=tuple(tokens),
    )


class Lookup:
    """Drafts what followed the last two tokens where they stood last: in the context, else in a sibling."""

    def __init__(self, k: int, longest: int, siblings: Sequence[Stream]) -> None:
        self._k = k
        self._front = [token for sibling in siblings for token in sibling.tokens]

    def begin(self, rid: str, prompt: np.ndarray) -> None:
        pass

    def draft(self, rid: str, sampled: list[int], context: np.ndarray) -> list[int]:
        known = [*self._front, *context.tolist()]
        assert known[-len(sampled) :] == sampled
        places = [at for at in range(2, len(known)) if known[at - 2 : at] == known[-2:]]
        return known[places[-1] :][: self._k] if places else []


def counts(streams: Sequence[Stream], *, siblings: bool = False, longest: bool = False) -> Counts:
    return measure(streams, 4, Lookup, siblings=siblings, longest=longest)


def test_text_copied_from_the_context_is_accepted() -> None:
    # The first token of a turn comes from prefill; two are needed for a match; then four and the next one.
    found = counts([stream(0, range(100, 112), ((), range(100, 112)))])
    assert (found.steps, found.accepted) == (3, 8)


def test_every_generated_token_is_a_prefills_a_steps_or_an_accepted_one() -> None:
    turns = [((7, 8), range(100, 100 + size)) for size in (1, 2, 3, 9, 11)]
    found = counts([stream(0, range(100, 112), *turns)])
    assert len(turns) + found.steps + found.accepted == sum(len(generated) for _, generated in turns)


def test_new_text_has_no_draft() -> None:
    found = counts([stream(0, range(10), ((), range(50, 70)))])
    assert (found.steps, found.drafts, found.accepted) == (19, 0, 0)


def test_siblings_give_drafts_that_the_own_context_has_not() -> None:
    group = [stream(sample, range(10), ((), range(50, 70))) for sample in range(2)]
    assert counts(group).accepted == 0
    assert counts(group, siblings=True).accepted > 20


def test_only_the_longest_of_a_group_is_replayed_on_request() -> None:
    group = [stream(0, range(10), ((), range(50, 55))), stream(1, range(10), ((), range(60, 80)))]
    assert counts(group, longest=True).steps == 19


def test_rows_with_siblings_need_a_prompt_with_several_trajectories() -> None:
    one = stream(0, range(10), ((), range(50, 55)))
    assert [row["siblings"] for row in rows([one], [2], False, {"lookup": Lookup})] == [False]
    assert [row["siblings"] for row in rows([one, one], [2], False, {"lookup": Lookup})] == [False, True]
