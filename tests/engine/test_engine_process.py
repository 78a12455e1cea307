"""One real engine process: what it generates, its weight updates, its refusals, its figures."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from libra_hpc.engine.steplog import read_steps
from libra_hpc.engine.turns import NOT_FINITE
from libra_hpc.process.entry import DUMP_SIGNAL
from libra_hpc.protocol import engine as wire
from libra_hpc.protocol.engine import (
    Abort,
    EngineFailed,
    Generate,
    Generated,
    UpdateWeights,
    WeightsApplied,
    WeightsRefused,
)
from tests.stage.waiting import wait_until

from .engine_harness import VOCAB, EngineUnderTest, Model, bring, foreign, logprobs_of, tokens_of, turn, versions

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

TOLERANCE = 1e-3
rng = random.Random(7)


def prompt(length: int) -> list[int]:
    return [rng.randrange(VOCAB) for _ in range(length)]


def assert_agrees(model: Model, request: Generate, done: Generated) -> None:
    """The recorded log-probabilities are those of ``model`` at the sampling temperature."""
    context = list(memoryview(request.prompt).cast("i"))
    expected = model.logprobs(context + tokens_of(done), len(context), request.temperature or 1.0)
    assert logprobs_of(done) == pytest.approx(expected, abs=TOLERANCE)


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
def test_logprobs_are_those_of_transformers_at_the_sampling_temperature(
    engine: EngineUnderTest, old: Model, temperature: float
) -> None:
    requests = [turn(f"r{i}", prompt(5 + 9 * i), 24, temperature=temperature) for i in range(6)]
    for request, done in zip(requests, engine.generate(*requests), strict=True):
        assert (done.finish, len(tokens_of(done)), done.error) == ("length", 24, "")
        assert done.queue_s >= 0
        assert done.run_s > 0
        assert_agrees(old, request, done)


def test_greedy_tokens_and_stop_ids(engine: EngineUnderTest, old: Model) -> None:
    context = prompt(12)
    expected = old.greedy(context, 16)
    stop = expected[5]
    whole, stopped = engine.generate(
        turn("whole", context, 16, temperature=0.0), turn("stopped", context, 16, temperature=0.0, stop_ids=(stop,))
    )
    assert tokens_of(whole) == expected
    assert stopped.finish == "stop"
    assert tokens_of(stopped) == expected[: expected.index(stop) + 1]


def test_swap_replaces_the_model_and_forgets_cached_prefixes(engine: EngineUnderTest, old: Model, new: Model) -> None:
    request = turn("again", prompt(100), 12)
    engine.generate(request)
    (warm,) = engine.generate(request)
    assert warm.cached_tokens == 96
    assert_agrees(old, request, warm)
    version = next(versions)
    applied = engine.apply(new.update(version))
    assert applied.version == version
    (swapped,) = engine.generate(request)
    assert swapped.cached_tokens == 0
    assert swapped.versions == ((version, 12),)
    assert_agrees(new, request, swapped)


@pytest.mark.parametrize("length", [20, 190], ids=["", "in several steps"])
def test_swap_in_flight_recomputes_running_requests(
    engine: EngineUnderTest, old: Model, new: Model, length: int
) -> None:
    # Six requests on four slots: running and waiting ones.
    requests = [turn(f"f{i}", prompt(length + i), 300) for i in range(6)]
    before, after = next(versions) - 1, next(versions)
    # All in one write: an update is staged for at least one step, whatever this process is doing then.
    engine.send(*requests, old.update(before), new.update(after))
    messages = [engine.receive() for _ in range(8)]
    applied = [message for message in messages if isinstance(message, WeightsApplied)]
    assert [message.version for message in applied] == [before, after]
    assert applied[1].recomputed > 0
    answers = {m.rid: m for m in messages if isinstance(m, Generated)}
    mixed = 0
    for request in requests:
        done = answers[request.rid]
        tokens, context = tokens_of(done), list(memoryview(request.prompt).cast("i"))
        assert sum(count for _, count in done.versions) == len(tokens) == 300
        assert [version for version, _ in done.versions] == sorted({version for version, _ in done.versions})
        split = sum(count for version, count in done.versions if version != after)
        expected = (
            old.logprobs(context + tokens, len(context))[:split] + new.logprobs(context + tokens, len(context))[split:]
        )
        assert logprobs_of(done) == pytest.approx(expected, abs=TOLERANCE)
        mixed += 0 < split < 300
    # At least those that the first step has read.
    assert mixed >= min(4, 512 // (length + 1))


def test_abort_answers_with_the_tokens_so_far_and_resubmission_continues(engine: EngineUnderTest) -> None:
    context = prompt(40)
    (whole,) = engine.generate(turn("whole", context, 900, temperature=0.0))
    engine.start(turn("cut", context, 900, temperature=0.0))
    engine.send(Abort("cut"), Abort("never seen"))
    cut = engine.expect(Generated)
    assert (cut.rid, cut.finish) == ("cut", "abort")
    had = tokens_of(cut)
    assert 0 < len(had) < 900
    assert len(logprobs_of(cut)) == len(had) == sum(count for _, count in cut.versions)
    (rest,) = engine.generate(turn("cut", context + had, 900 - len(had), temperature=0.0))
    assert rest.finish == "length"
    assert rest.cached_tokens >= 32
    assert had + tokens_of(rest) == tokens_of(whole)


def test_priority_decides_who_gets_a_free_slot(engine: EngineUnderTest) -> None:
    longs = [turn(f"long{i}", prompt(8), 100 + 100 * i, priority=-9) for i in range(4)]
    engine.send(*longs, turn("late", prompt(8), 4, priority=5), turn("soon", prompt(8), 4, priority=1))
    order = [engine.expect(Generated).rid for _ in range(6)]
    assert order.index("soon") < order.index("late")


NORM = "model.norm.weight"


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({NORM: None}, NORM),
        ({"model.extra.weight": (2,)}, "model.extra.weight"),
        ({NORM: (65,)}, "[65], expected [64]"),
    ],
    ids=["missing", "unknown", "reshaped"],
)
def test_an_image_of_another_model_leaves_the_old_weights_serving(
    engine: EngineUnderTest, old: Model, tmp_path: Path, changes: dict[str, tuple[int, ...] | None], names: str
) -> None:
    update = foreign(tmp_path, changes, old)
    engine.send(update)
    refused = engine.expect(WeightsRefused)
    assert (refused.version, refused.absent) == (update.version, False), "its node asks again, then rebuilds it"
    assert names in refused.what
    request = turn("still", prompt(9), 8)
    assert_agrees(old, request, engine.generate(request)[0])


def test_a_damaged_image_leaves_the_old_weights_serving(
    engine: EngineUnderTest, old: Model, new: Model, tmp_path: Path
) -> None:
    request = turn("still", prompt(9), 8)
    version = engine.generate(request)[0].versions[0][0]
    update = bring(new.image(tmp_path), next(versions), load_file(new.weights))
    os.truncate(update.path, Path(update.path).stat().st_size - 4)
    assert "by its header" in engine.refuse(update)
    assert "No such file" in engine.refuse(UpdateWeights(str(tmp_path / "absent"), next(versions)))
    (done,) = engine.generate(request)
    assert done.versions == ((version, 8),)
    assert_agrees(old, request, done)


def test_a_bad_request_fails_alone(engine: EngineUnderTest, old: Model) -> None:
    bad = {
        "empty": Generate("empty", b"", 4),
        "ragged": Generate("ragged", b"\1\0\0", 4),
        "1024 tokens": turn("1024 tokens", [1] * 1024, 4),
        "128": turn("128", [1, VOCAB], 4),
        "-1": turn("-1", [-1], 4),
        "max_tokens": turn("max_tokens", [1], 0),
        "temperature": turn("temperature", [1], 1, temperature=float("nan")),
    }
    good = turn("good", prompt(9), 8)
    *refused, done = engine.generate(*bad.values(), good)
    for answer in refused:
        assert (answer.finish, answer.tokens, answer.versions) == ("error", b"", ())
    assert "empty" in refused[0].error
    assert "int32" in refused[1].error
    assert all(name in answer.error for name, answer in list(zip(bad, refused, strict=True))[2:])
    assert_agrees(old, good, done)


def test_a_turn_ends_where_the_context_ends(engine: EngineUnderTest) -> None:
    (done,) = engine.generate(turn("edge", prompt(1000), 100))
    assert (done.finish, len(tokens_of(done))) == ("length", 24)


def test_an_id_in_flight_is_refused_without_ending_the_first(engine: EngineUnderTest) -> None:
    engine.send(turn("double", prompt(8), 20), turn("double", prompt(8), 20))
    messages = [engine.receive(), engine.receive()]
    (error,) = [m for m in messages if isinstance(m, EngineFailed)]
    (done,) = [m for m in messages if isinstance(m, Generated)]
    assert "double" in error.what
    assert not error.fatal
    assert done.finish == "length"


def test_stats_count_what_was_done(engine: EngineUnderTest) -> None:
    busy = engine.start(turn("warm", prompt(8), 900))
    engine.send(Abort("warm"))
    engine.expect(Generated)
    first = engine.idle()
    shared = prompt(64)
    requests = [turn(f"s{i}", shared + prompt(6), 5) for i in range(4)]
    engine.generate(requests[0])
    (answer, *_) = engine.generate(*requests[1:])
    last = engine.idle()
    assert (busy.running, busy.waiting) == (1, 0)
    assert busy.kv_use > 0
    assert last.kv_use == 0
    # The last probe is one token more.
    assert last.generated_tokens - first.generated_tokens == 4 * 5 + 1
    assert last.cached_tokens - first.cached_tokens == 3 * 64
    assert last.prefill_tokens - first.prefill_tokens == 70 + 3 * 6 + 1
    assert last.steps - first.steps == 5 + 5 + 1
    assert last.busy_s > first.busy_s
    assert last.version == answer.versions[0][0]


def test_a_swap_does_not_count_as_preemption(engine: EngineUnderTest, old: Model) -> None:
    before = engine.idle().preemptions
    engine.send(turn("p", prompt(8), 300), old.update(next(versions)))
    assert {type(engine.receive()) for _ in range(2)} == {Generated, WeightsApplied}
    assert engine.idle().preemptions == before


@pytest.mark.nightly
def test_preemptions_for_lack_of_blocks_are_counted_across_a_swap(engine: EngineUnderTest, new: Model) -> None:
    before = engine.idle()
    assert before.kv_use == 0.0, "vLLM's own block is not counted"
    requests = [turn(f"grow{i}", prompt(400), 600) for i in range(4)]
    engine.send(*requests, new.update(next(versions)))
    messages = [engine.receive() for _ in range(5)]
    assert sum(isinstance(message, Generated) for message in messages) == 4
    after = engine.idle()
    # Four of 13 blocks fit in 63, four of 31 do not: at least two were put back.
    assert after.preemptions >= before.preemptions + 2
    assert after.kv_use == 0.0


def test_asleep_and_woken_without_weights_it_refuses(engine: EngineUnderTest, old: Model, new: Model) -> None:
    engine.start(turn("cut", prompt(8), 900))
    engine.send(wire.Sleep())
    cut = engine.expect(Generated)
    assert cut.finish == "abort"
    assert tokens_of(cut)
    assert "asleep" in engine.generate(turn("asleep", [1], 1))[0].error
    assert "asleep" in engine.refuse(new.update(next(versions)))
    engine.send(wire.Wake())
    stale = engine.generate(turn("stale", [1], 1))[0]
    assert stale.finish == "error"
    assert "weights" in stale.error
    engine.apply(new.update(next(versions)))
    request = turn("awake", prompt(9), 8)
    assert_agrees(new, request, engine.generate(request)[0])


def test_it_writes_its_stacks_on_request_and_goes_on(engine: EngineUnderTest) -> None:
    engine.process.send_signal(DUMP_SIGNAL)
    wait_until(lambda: "most recent call first" in engine.log())
    assert engine.generate(turn("after", prompt(9), 8))[0].finish == "length"


def test_idle_it_reports_every_second(engine: EngineUnderTest) -> None:
    engine.idle()
    since = len(engine.stats)
    engine.wait_stats(since, lambda report: len(engine.stats) >= since + 2)


def test_weights_that_make_no_numbers_are_an_error_of_each_turn_and_better_ones_serve_again(
    engine: EngineUnderTest, new: Model, tmp_path: Path
) -> None:
    broken = {**load_file(new.weights), NORM: torch.full((64,), torch.nan)}
    engine.apply(bring(new.image(tmp_path), next(versions), broken))
    for done in engine.generate(turn("sampled", prompt(9), 8), turn("greedy", prompt(9), 8, temperature=0.0)):
        assert (done.finish, done.error) == ("error", NOT_FINITE)
        assert (done.tokens, done.logprobs, done.versions) == (b"", b"", ())
    engine.apply(new.update(next(versions)))
    request = turn("after", prompt(9), 8)
    assert_agrees(new, request, engine.generate(request)[0])


def test_every_token_of_every_step_is_in_the_log(engine: EngineUnderTest) -> None:
    path = engine.config_path.with_name("steps.jsonl")
    begun = engine.idle()
    engine.generate(*(turn(str(number), range(3, 43 + number), 6) for number in range(3)))
    before = engine.idle()
    # The same context again, longer: its first block is cached.
    engine.generate(turn("again", [*range(3, 43), 50, 51], 4))
    last = engine.idle()
    # The log is written after the report is sent.
    wait_until(lambda: len(read_steps(path)[1]) >= last.steps)
    header, steps = read_steps(path, skip=begun.steps)
    assert (header.tp, header.kv_tokens, header.max_num_seqs) == (1, 2 * 2**20 // (2 * 2 * 64 * 4), 4)
    assert (header.block_size, header.max_num_batched_tokens) == (32, 512)
    assert len(steps) == last.steps - begun.steps
    assert sum(step.prefill for step in steps) == last.prefill_tokens - begun.prefill_tokens
    # A request's first token comes with its prefill, the others of a decode each; idle() sends one-token probes.
    assert sum(step.decodes for step in steps) == 3 * 5 + 3
    # Rounded, and a pass without a batch is busy too.
    assert sum(step.seconds for step in steps) > 0.9 * (last.busy_s - begun.busy_s)
    again, decode = steps[before.steps - begun.steps :][:2]
    assert (again.prefill, again.context, again.decodes) == (42 - 32, 32, 0)
    assert (decode.decodes, decode.kv_tokens, decode.prefill, decode.context) == (1, 43, 0, 0)
