"""The simulated engine keeps the engine's promises, with the simulator's physics; token ids encode turn lengths."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from libra_hpc.engine.settings import EngineConfig
from libra_hpc.policies.scheduling.board import Board
from libra_hpc.protocol import engine as wire
from libra_hpc.protocol.codec import pack_i32, unpack_i32
from libra_hpc.protocol.engine import (
    EngineFailed,
    FromEngine,
    Generate,
    Generated,
    UpdateWeights,
    WeightsApplied,
    WeightsRefused,
)
from libra_hpc.protocol.engine_state import EngineStats
from libra_hpc.simulated import tokens
from libra_hpc.simulated.engine_process import SimulatedEngine
from libra_hpc.simulated.state import image_shapes, offer
from libra_hpc.weights.image import Image
from libra_hpc.weights.pieces import WHOLE, offer_path, payload_path
from tests.simulator.toys import Linear

from .link import dry_run

SPEEDUP = 4.0
LATE = 1e6


def engine(
    capacity: int = 4096, max_model_len: int = 256, kv: Literal["recompute", "keep"] = "recompute", **fields: float
) -> SimulatedEngine:
    rollout = {"max_model_len": max_model_len, "max_num_seqs": 4, "block_size": 8, "kv_after_update": kv}
    run = dry_run(speedup=SPEEDUP, **fields).changed(rollout=rollout)
    return SimulatedEngine(EngineConfig(run=run, version=5), Linear(capacity))


def turn(rid: str, count: int, *, sample: int = 0, size: int = 16, max_tokens: int = 999) -> Generate:
    return Generate(rid, pack_i32(tokens.prompt(7, sample, size, count)), max_tokens)


def update(folder: Path, version: int) -> UpdateWeights:
    """An image of a version."""
    image = Image(folder, image_shapes(), "F32")
    made, _ = offer(folder, version, WHOLE, 0)
    image.apply(version, [(made, payload_path(offer_path(folder, version, "t0")).read_bytes())])
    return UpdateWeights(str(image.path), version)


def test_an_image_with_other_weights_than_its_versions_is_refused(tmp_path: Path) -> None:
    message = update(tmp_path, 3)
    image = Path(message.path)
    image.write_bytes(image.read_bytes()[:-1] + b"\1")
    (refused,) = engine().update(message, 0.0)
    assert isinstance(refused, WeightsRefused)
    assert "are not those of version 3" in refused.what


NUMBERS = (errno.EMFILE, errno.ENFILE, errno.ENOENT, errno.EIO, errno.ENOMEM, errno.EACCES, errno.ESTALE)


@pytest.mark.parametrize("number", NUMBERS, ids=errno.errorcode.get)
@pytest.mark.parametrize(
    ("owner", "call", "at"), [(Path, "open", 1), (fcntl, "flock", 1), (Path, "read_bytes", 1), (Path, "read_bytes", 2)]
)
def test_weights_that_cannot_be_read_once_are_refused_and_taken_when_it_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: Any, call: str, at: int, number: int
) -> None:
    simulated, message, done, left = engine(), update(tmp_path, 6), getattr(owner, call), [at]

    def once(*arguments: Any, **named: Any) -> Any:
        left[0] -= 1
        if left[0]:
            return done(*arguments, **named)
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(owner, call, once)
    assert [type(refused) for refused in simulated.update(message, 0.0)] == [WeightsRefused]
    assert simulated.update(message, 0.0) == [], "it is taken"


def answers(messages: list[FromEngine]) -> dict[str, Generated]:
    return {message.rid: message for message in messages if isinstance(message, Generated)}


def test_a_turn_takes_its_steps_and_is_reported_in_wall_seconds() -> None:
    simulated = engine()
    assert simulated.ready(0.0).capacity.kv_tokens == 4096
    assert simulated.submit(turn("a", 10), 100.0) == []
    early, late = simulated.run_until(109.5), simulated.run_until(110.0)
    assert not answers(early)
    done = answers(late)["a"]
    assert unpack_i32(done.tokens) == [tokens.BODY] * 9 + [tokens.STOP]
    assert len(done.logprobs) == len(done.tokens)
    assert (done.finish, done.versions, done.cached_tokens) == ("stop", ((5, 10),), 0)
    assert (done.queue_s, done.run_s) == (0.0, 10.0 / SPEEDUP)
    idle = [message for message in late if isinstance(message, EngineStats)][-1]
    assert (idle.running, idle.generated_tokens, idle.prefill_tokens, idle.busy_s) == (0, 10, 16, 10.0 / SPEEDUP)


def test_it_announces_what_its_steps_cost_in_wall_seconds() -> None:
    board = Board(64)
    ready = engine().ready(0.0)
    board.up("a", 1, ready.capacity.kv_tokens, ready.version, ready.capacity.warm_up)
    (members,) = board.classes
    assert members.base_s == pytest.approx(Linear(4096).step_s(1, 1) / SPEEDUP, rel=0.2), "the prior is 0.02"


def test_a_process_that_wakes_late_computes_the_same() -> None:
    punctual, sleepy = engine(), engine()
    for simulated in (punctual, sleepy):
        simulated.submit(turn("a", 10), 0.0)
        simulated.submit(turn("b", 40, sample=1), 0.0)
    found: list[FromEngine] = []
    for moment in range(400):
        found += punctual.run_until(moment / 4)
    assert answers(found) == answers(sleepy.run_until(LATE))


def test_turns_of_a_trajectory_find_their_past_and_siblings_their_prompt() -> None:
    simulated = engine()
    simulated.submit(turn("a", 24, size=40), 0.0)
    first = answers(simulated.run_until(LATE))["a"]
    context = [*tokens.prompt(7, 0, 40, 24), *unpack_i32(first.tokens), *tokens.answer(8, 4)]
    simulated.submit(Generate("b", pack_i32(context), 99), LATE)
    simulated.submit(turn("c", 4, sample=1, size=40), LATE)
    found = answers(simulated.run_until(2 * LATE))
    assert found["b"].cached_tokens == 56, "7 full blocks of 63 computed tokens"
    assert found["c"].cached_tokens == 32, "4 full blocks of the prompt; its last token is computed again"


def test_the_end_by_length_and_by_abort(tmp_path: Path) -> None:
    simulated = engine(max_model_len=64)
    simulated.submit(turn("limit", 30, max_tokens=20), 0.0)
    simulated.submit(turn("room", 100, sample=1, size=50), 0.0)
    simulated.submit(turn("gone", 30, sample=2), 0.0)
    found = answers(simulated.run_until(8.5))
    simulated.abort(wire.Abort("gone"), 8.5)
    simulated.abort(wire.Abort("unknown"), 8.5)
    found |= answers(simulated.run_until(LATE))
    ends = {rid: (done.finish, len(done.tokens) // 4) for rid, done in found.items()}
    assert ends == {"limit": ("length", 20), "room": ("length", 14), "gone": ("abort", 9)}
    assert tokens.STOP not in unpack_i32(found["limit"].tokens)
    rest = [*tokens.prompt(7, 2, 16, 30), *unpack_i32(found["gone"].tokens)]
    simulated.submit(Generate("again", pack_i32(rest), 99), LATE)
    again = answers(simulated.run_until(2 * LATE))["again"]
    assert (again.finish, len(again.tokens) // 4) == ("stop", 21)


def test_weights_change_between_two_steps(tmp_path: Path) -> None:
    simulated = engine(sync_s=3.0)
    simulated.submit(turn("a", 10), 0.0)
    simulated.run_until(3.5)
    assert simulated.update(update(tmp_path, 6), 3.5) == []
    found = simulated.run_until(LATE)
    assert [message for message in found if isinstance(message, WeightsApplied)] == [WeightsApplied(6, 3.0 / SPEEDUP)]
    done = answers(found)["a"]
    assert done.versions == ((5, 4), (6, 6))
    assert done.run_s == (10 + 3) / SPEEDUP
    assert simulated.update(update(tmp_path, 6), LATE) == [WeightsApplied(6, 0.0)]
    missing = UpdateWeights(str(tmp_path / "none"), 7)
    assert simulated.update(missing, LATE) == [WeightsRefused(7, f"{tmp_path / 'none'}: No such file or directory.")]


def test_kept_caches_serve_the_groups_of_before_and_no_later_one(tmp_path: Path) -> None:
    cached = {}
    for kv in ("recompute", "keep"):
        simulated = engine(kv=kv)  # type: ignore[arg-type]
        simulated.submit(replace(turn("a", 10, size=40), admitted=5), 0.0)
        simulated.run_until(3.5)
        simulated.update(update(tmp_path, 6), 3.5)
        simulated.run_until(LATE)
        later = {rid: turn(rid, 4, sample=at, size=40) for at, rid in enumerate(("sibling", "later", "own"), 1)}
        simulated.submit(replace(later["sibling"], admitted=5), LATE)
        simulated.submit(replace(later["later"], admitted=6), LATE)
        simulated.submit(later["own"], LATE)
        found = answers(simulated.run_until(2 * LATE))
        cached[kv] = [found[rid].cached_tokens for rid in later]
    assert cached["keep"] == [32, 0, 32], "its group's; none of the older weights; the one of the new weights"
    assert cached["recompute"] == [32, 32, 32], "computed again under the new weights, which serve all"


def test_standby_refuses_until_new_weights_arrived(tmp_path: Path) -> None:
    simulated = engine(sync_s=3.0, wake_s=20.0)
    for rid in ("a", "b", "c", "d", "waits"):
        simulated.submit(turn(rid, 10, sample=ord(rid[0])), 0.0)
    simulated.run_until(2.5)
    aborted = answers(simulated.sleep(2.5))
    ends = {rid: (done.finish, len(done.tokens) // 4) for rid, done in aborted.items()}
    assert ends == {**dict.fromkeys("abcd", ("abort", 3)), "waits": ("abort", 0)}
    assert answers(simulated.submit(turn("e", 1), 10.0))["e"].finish == "error"
    assert [type(message) for message in simulated.update(update(tmp_path, 6), 10.0)] == [WeightsRefused]
    simulated.wake()
    assert "no current weights" in answers(simulated.submit(turn("e", 1), 10.0))["e"].error
    assert simulated.update(update(tmp_path, 5), 10.0) == [], "the version it had is loaded again"
    assert not [message for message in simulated.run_until(32.5) if isinstance(message, WeightsApplied)]
    assert [message for message in simulated.run_until(33.0) if isinstance(message, WeightsApplied)]
    simulated.submit(turn("e", 1), 40.0)
    assert answers(simulated.run_until(LATE))["e"].finish == "stop"


def test_what_the_engine_cannot_run_is_refused_in_words() -> None:
    simulated = engine(max_model_len=64)
    assert "do not encode" in answers(simulated.submit(Generate("a", pack_i32([9] * 20), 5), 0.0))["a"].error
    assert "no room" in answers(simulated.submit(turn("b", 5, size=64), 0.0))["b"].error
    simulated.submit(turn("c", 5), 0.0)
    assert [type(message) for message in simulated.submit(turn("c", 5), 0.0)] == [EngineFailed]


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
    with pytest.raises(tokens.Unreadable, match="do not encode how long"):
        tokens.read(pack_i32(context))


@pytest.mark.parametrize("ids", [[], [1, 4, 0], [0, 4, 0, 0], [0, 9, 0, 20], [0, 4, 0, 17, 1], [-1, 4, 0, 20]])
def test_other_ids_are_refused(ids: list[int]) -> None:
    with pytest.raises(tokens.Unreadable, match="prompt: "):
        tokens.read(pack_i32(ids))
    with pytest.raises(tokens.Unreadable):
        tokens.read(pack_i32(ids)[:-1])
