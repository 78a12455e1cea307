"""A borrowed engine gives KV memory away and takes it back; its requests go on, or end with what they have."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import torch

from libra_hpc.engine.kv_room import release_pages

from .engine_harness import Model, engine_config


def test_whole_pages_of_given_blocks_are_freed_and_nothing_else() -> None:
    # Two layers in one allocation, 32 KiB a block, as vLLM lays them out.
    memory = torch.ones(2 * 64 * 8192, dtype=torch.float32)
    caches = [part.view(64, 2, 64, 64) for part in memory.split(64 * 8192)]
    # No block begins at a page for sure, so two pages a range may stay.
    freed = release_pages(caches, [3, 4, 5, 60])
    assert 2 * (4 * 32 * 1024 - 4 * 4096) <= freed <= 2 * 4 * 32 * 1024
    for cache in caches:
        kept = [block for block in range(64) if block not in (3, 4, 5, 60)]
        assert bool((cache[kept] == 1).all())
        assert bool((cache[4] == 0).any())


def test_blocks_without_a_range_of_their_own_are_left() -> None:
    cache = torch.ones(64, 64, 1024).transpose(0, 1)
    assert release_pages([cache], range(64)) == 0
    assert bool((cache == 1).all())


@pytest.mark.slow
def test_requests_survive_that_their_engine_loses_its_room(old: Model, tmp_path: Path) -> None:
    config = tmp_path / "engine.json"
    config.write_bytes(msgspec.json.encode(msgspec.structs.replace(engine_config(old, max_num_seqs=8), kv_cache_mb=2)))
    command = [sys.executable, "-m", "tests.engine.kv_room_play", str(config)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    seen = json.loads(done.stdout.splitlines()[-1])
    # 63 blocks of 32 tokens; a request needs up to 240 tokens, 8 blocks, and none shares its prefix.
    assert seen["stats at 0.5"][0] == 0.5
    assert 0 < seen["stats at 0.5"][2] <= 1
    assert seen["forgotten"], "vLLM drops no caches while a block is out of its pool"
    assert seen["share after it"] == [0.5, 31]
    assert seen["ended at 0.25"], "a quarter has no room for all that run in a half"
    assert seen["stats at 0.0"] == [0.0, 0, 0.0]
    assert seen["refused"], "an engine without room takes no request"
    assert seen["stats at 1.0"][0] == 1.0
    assert seen["again"] == seen["whole"], "the tokens are those of an engine that lost nothing"
    assert seen["use"] == 0
