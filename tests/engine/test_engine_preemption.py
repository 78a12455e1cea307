"""Preemption for lack of blocks on one real engine of 64 KV blocks."""

from __future__ import annotations

import random
from collections.abc import Iterator

import msgspec
import pytest

from libra_hpc.protocol.engine import Generated

from .engine_harness import VOCAB, EngineUnderTest, Model, engine_config, turn

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

BLOCK = 32
rng = random.Random(11)


def prompt(length: int) -> list[int]:
    return [rng.randrange(VOCAB) for _ in range(length)]


@pytest.fixture(scope="module")
def small(old: Model, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineUnderTest]:
    """2 MiB of float32 keys and values, 2 layers, hidden 64: 2048 tokens, one block of which is vLLM's own."""
    config = msgspec.structs.replace(engine_config(old, max_num_seqs=4, version=1), kv_cache_mb=2)
    engine = EngineUnderTest(tmp_path_factory.mktemp("e"), config)
    try:
        assert engine.ready().capacity.kv_tokens == 64 * BLOCK
        yield engine
    finally:
        engine.close()


def test_preemptions_for_lack_of_blocks_are_counted_across_a_swap(small: EngineUnderTest, new: Model) -> None:
    before = small.idle()
    assert before.kv_use == 0.0, "vLLM's own block is not counted"
    small.send(*(turn(f"grow{i}", prompt(400), 600) for i in range(4)), new.update(2))
    messages = [small.receive() for _ in range(5)]
    assert sum(isinstance(message, Generated) for message in messages) == 4
    after = small.idle()
    # Four of 13 blocks fit in 63, four of 31 do not: at least two were put back.
    assert after.preemptions >= before.preemptions + 2
    assert after.kv_use == 0.0
