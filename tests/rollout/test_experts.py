"""Whose experts a token has: those of the pass that sampled the next one, or of its first pass in its sample."""

from __future__ import annotations

from msgspec.structs import replace

from libra_hpc.protocol.agents import ExpertsWanted, SampleExperts
from libra_hpc.protocol.codec import pack_i32
from libra_hpc.protocol.trace import TrajectoryRecord
from libra_hpc.rollout.trajectory import Trajectory

from .plant import STOP, generated, sampling

SAID = [7, 8, STOP]
ROW = 2
"""Bytes of a row: here the number of the turn, and the place in the context."""


def answer(one: Trajectory, turn: int, tokens: int, finish: str = "stop") -> None:
    """What an engine says in a turn, with experts of what it is asked for."""
    end = one.context_tokens + tokens - 1
    rows = b"".join(bytes([turn, place]) for place in range(one.known_experts, end)) if tokens else b""
    one.add_generated(replace(generated("r", [7] * tokens, finish=finish), experts=rows), "r2.0")


def rows(one: Trajectory, part: int) -> list[tuple[int, int]]:
    """(turn, place) of each token of a sample."""
    flat = one.experts_of(part)
    return list(zip(flat[::ROW], flat[1::ROW], strict=True))


def begun(prompt: int) -> Trajectory:
    one = Trajectory(index=0, sample=0)
    one.open("p", pack_i32([1] * prompt))
    return one


def test_a_turn_that_goes_on_elsewhere_and_later_context_overwrite_nothing() -> None:
    one = begun(3)
    answer(one, 1, 2, finish="abort")
    assert one.known_experts == 4
    answer(one, 2, 0, finish="abort")
    answer(one, 3, 1)
    one.add_environment(pack_i32([5, 5]))
    answer(one, 4, 1)
    # The last token was never computed; the tool's have those of the turn after them.
    assert rows(one, 0) == [*((1, at) for at in range(4)), (3, 4), *((4, at) for at in range(5, 8)), (0, 0)]
    (sample,) = one.samples_for_training(1.0)
    assert (sample.experts, sample.routed) == (b"", b"\1" * 8 + b"\0")


def test_a_new_sample_has_experts_of_its_own_first_pass() -> None:
    one = begun(2)
    answer(one, 1, 2)
    one.add_environment(pack_i32([1, 1, 6]), new_sample=True)
    assert one.known_experts == 0
    answer(one, 2, 2)
    assert rows(one, 0) == [(1, 0), (1, 1), (1, 2), (0, 0)]
    assert rows(one, 1) == [(2, 0), (2, 1), (2, 2), (2, 3), (0, 0)]
    assert [sample.routed for sample in one.samples_for_training(1.0)] == [b"\1\1\1\0", b"\1\1\1\1\0"]


def test_tokens_that_the_environment_leaves_out_take_their_experts_along() -> None:
    one = begun(2)
    answer(one, 1, 4)
    one.drop(2)
    assert one.known_experts == 3
    one.add_environment(pack_i32([5]))
    answer(one, 2, 1)
    assert rows(one, 0) == [(1, 0), (1, 1), (1, 2), (2, 3), (2, 4), (0, 0)]


def test_what_an_engine_did_not_report_or_a_restart_lost_stays_unknown() -> None:
    one = begun(2)
    one.add_generated(generated("r", [7, 7], finish="stop"), "r2.0")
    assert one.samples_for_training(1.0)[0].routed == b""
    one.add_environment(pack_i32([5]))
    answer(one, 2, 1)
    want = bytes([0, 0, 0, 1, 1, 0])
    assert one.samples_for_training(1.0)[0].routed == want
    assert rows(one, 0) == [(0, 0), (0, 0), (0, 0), (2, 3), (2, 4), (0, 0)]
    record = {name: getattr(one, name) for name in Trajectory.__struct_fields__}
    again = Trajectory(**{**record, "place": "tool"})
    assert not {"experts", "routed"} & {*TrajectoryRecord.__struct_fields__, *record}
    again.add_environment(pack_i32([5]))
    answer(again, 3, 1)
    assert again.samples_for_training(1.0)[0].routed == bytes([0, 0, 0, 0, 0, 1, 1, 0])


async def test_the_leader_has_experts_while_their_batch_may_be_trained_again() -> None:
    plant = await sampling(4, turns=1)
    for engine, request in list(plant.inbox):
        assert request.routed == 0
        plant.answer(engine, request, SAID, experts=bytes(range(1, len(request.prompt) // 4 + len(SAID))))
    batch = await plant.batch()
    assert batch.stats["experts_mb"] > 0
    sample = batch.groups[0].samples[0]
    for _ in range(2):
        plant.leader.on_experts_wanted(ExpertsWanted(1, (sample.uid, "77.0.0")))
        found, nothing = plant.of(SampleExperts)[-2:]
        assert found == SampleExperts(sample.uid, bytes([*range(1, len(sample.loss_mask)), 0]))
        assert nothing == SampleExperts("77.0.0", b"")
        plant.commit(batch)


async def test_no_engine_is_asked_for_experts_where_the_trainer_routes_itself() -> None:
    plant = await sampling(4, routing="own")
    assert {request.routed for _, request in plant.inbox} == {-1}
