"""Pinned prefixes on one real engine of 64 KV blocks: they outlive pressure, yield to every request, and end."""

from __future__ import annotations

import random
from collections.abc import Iterator

import msgspec
import pytest

from libra_hpc.protocol.rollout import EngineStats, Generated
from tests.rollout.engine.engine_harness import VOCAB, EngineUnderTest, Model, engine_config, tokens_of, turn

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

BLOCK = 32
LONG_S = 600.0
rng = random.Random(11)


def prompt(length: int) -> list[int]:
    return [rng.randrange(VOCAB) for _ in range(length)]


@pytest.fixture(scope="module")
def small(old: Model, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineUnderTest]:
    """2 MiB of float32 keys and values, 2 layers, hidden 64: 2048 tokens, one block of which is vLLM's own."""
    config = msgspec.structs.replace(engine_config(old, max_num_seqs=4, version=1), kv_cache_mb=2)
    engine = EngineUnderTest(tmp_path_factory.mktemp("e"), config)
    try:
        assert engine.ready().kv_tokens == 64 * BLOCK
        yield engine
    finally:
        engine.close()


@pytest.fixture(autouse=True)
def _fresh(small: EngineUnderTest, old: Model) -> None:
    """A weight update, after which nothing is cached or pinned."""
    small.apply(old.update(1))
    assert small.idle().kv_pinned == 0.0


def pinned(engine: EngineUnderTest) -> float:
    return engine.idle().kv_pinned


def press(engine: EngineUnderTest) -> None:
    """More other prompts, one after the other, than the cache holds."""
    for i in range(8):
        engine.generate(turn(f"other{i}", prompt(900), 4))


def test_a_pinned_prefix_survives_the_pressure_that_evicts_others(small: EngineUnderTest) -> None:
    for keep_s, cached in ((0.0, 0), (LONG_S, 19 * BLOCK)):
        context = prompt(600)
        (first,) = small.generate(turn("first", context, 10, keep_s=keep_s))
        press(small)
        (second,) = small.generate(turn("second", context + tokens_of(first) + prompt(20), 4))
        assert second.cached_tokens == cached


def test_pins_give_way_to_running_and_to_waiting_requests(small: EngineUnderTest) -> None:
    before = small.idle().preemptions
    pinning = [turn(f"pinned{i}", prompt(320), 1, keep_s=LONG_S + 100 * i) for i in range(3)]
    small.generate(*pinning)
    assert pinned(small) == pytest.approx(30 / 63)
    # The prompts alone fit beside the pins; what they generate does not, and a third one waits for a block that only a
    # pin can give.
    pair = small.generate(*(turn(f"long{i}", prompt(440), 440) for i in range(2)), turn("third", prompt(200), 4))
    assert [len(tokens_of(done)) for done in pair] == [440, 440, 4]
    after = small.idle()
    assert after.preemptions == before
    assert after.kv_use == 0.0
    # 2 x 28 blocks at the end leave room for none of the three pins of 10.
    assert after.kv_pinned == 0.0


def test_the_earliest_expiry_is_released_first(small: EngineUnderTest) -> None:
    contexts = [prompt(321) for _ in range(3)]
    for i, keep_s in enumerate((LONG_S, 3 * LONG_S, 2 * LONG_S)):
        small.generate(turn(f"k{i}", contexts[i], 1, keep_s=keep_s))
    small.generate(turn("wide", prompt(1000), 16))
    cached = [
        done.cached_tokens
        for done in small.generate(*(turn(f"a{i}", [*context, 1], 1) for i, context in enumerate(contexts)))
    ]
    # 32 blocks are wanted of 63 - 30, so all three stay; 12 more are not there without one of them.
    assert cached == [320, 320, 320]
    small.generate(turn("wide", prompt(900), 90), turn("wider", prompt(400), 8))
    press(small)
    cached = [small.generate(turn(f"b{i}", [*context, 1], 1))[0].cached_tokens for i, context in enumerate(contexts)]
    assert cached == [0, 320, 320]


def test_pins_expire_while_the_engine_is_idle_and_nothing_leaks(small: EngineUnderTest) -> None:
    since = len(small.stats)
    small.generate(turn("brief", prompt(200), 4, keep_s=1.0))
    held = small.wait_stats(since, lambda report: report.kv_pinned > 0)
    assert held.kv_use == 0.0

    def empty(report: EngineStats) -> bool:
        return report.kv_pinned == report.kv_use == 0.0

    small.wait_stats(since + small.stats[since:].index(held), empty)
    # Siblings that share a prompt pin its blocks once each.
    shared = prompt(96)
    since = len(small.stats)
    small.generate(*(turn(f"s{i}", shared + prompt(40), 4, keep_s=0.5) for i in range(4)))
    held = small.wait_stats(since, lambda report: report.kv_pinned > 0)
    small.wait_stats(since + small.stats[since:].index(held), empty)


def test_a_weight_swap_releases_all_pins(small: EngineUnderTest, new: Model) -> None:
    context = prompt(200)
    small.generate(turn("pinned", context, 4, keep_s=LONG_S))
    assert pinned(small) > 0
    small.apply(new.update(2))
    assert pinned(small) == 0
    assert small.generate(turn("again", context, 4))[0].cached_tokens == 0


def test_half_of_the_cache_stays_with_the_engine(small: EngineUnderTest) -> None:
    for i in range(6):
        small.generate(turn(f"k{i}", prompt(321), 1, keep_s=LONG_S + i))
    assert pinned(small) == pytest.approx(30 / 63)


def test_preemptions_for_lack_of_blocks_are_counted_across_a_swap(small: EngineUnderTest, new: Model) -> None:
    before = small.idle().preemptions
    small.send(*(turn(f"grow{i}", prompt(400), 600) for i in range(4)), new.update(2))
    messages = [small.receive() for _ in range(5)]
    assert sum(isinstance(message, Generated) for message in messages) == 4
    # Four of 13 blocks fit in 63, four of 31 do not: at least two were put back.
    assert small.idle().preemptions >= before + 2
