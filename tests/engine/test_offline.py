"""An engine in the caller's own process: batches and turns, new weights, and KV room that is lost."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import msgspec
import pytest

from .engine_harness import Model, engine_config

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

CONTEXT = [5, 17, 99, 3, 64, 21, 8]
LENGTHS = [7, 0, 3]


@pytest.fixture(scope="module")
def played(old: Model, new: Model) -> dict[str, Any]:
    """What one engine printed."""
    config = engine_config(old, max_num_seqs=8, kv_cache_mb=2)
    given = {"config": msgspec.to_builtins(config), "update": msgspec.to_builtins(new.update(1))}
    job = {"context": CONTEXT, "lengths": LENGTHS, **given}
    command = [sys.executable, "-m", "tests.engine.offline_play", json.dumps(job)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    seen: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return seen


def test_it_generates_batches_and_turns_and_takes_new_weights(played: dict[str, Any], old: Model, new: Model) -> None:
    assert played["finish"] == ["length", "error", "length"]
    assert played["batch"] == [old.greedy(CONTEXT[:n], 6) if n else [] for n in LENGTHS]
    assert played["turns"] == old.greedy(CONTEXT, 6)
    assert played["swapped"] == new.greedy(CONTEXT, 6)
