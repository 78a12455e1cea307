"""A vLLM engine under a node that watches it: a stopped one is ended, and the next one serves."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from libra_hpc.protocol import mesh as wire
from tests.agent.test_rollout_node import scene

from .engine_harness import Model, alive, turn

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]


async def test_a_stopped_engine_is_ended_and_the_next_one_serves(old: Model, tmp_path: Path) -> None:
    sections = {
        "run": {"engine": "real"},
        "model": {"path": str(old.folder), "dtype": "float32"},
        "rollout": {"max_model_len": 1024, "kv_cache_mb": 16},
        "deadlines": {"floor_s": 6.0, "first_s": 300.0, "factor": 10.0},
    }
    async with scene(tmp_path, **sections) as made:
        await made.up()
        # From the first report on, silence has a limit of its own.
        await made.until(lambda: made.of(wire.EngineLoad), "counters")
        stopped = made.pid()
        os.kill(stopped, signal.SIGSTOP)
        await made.until(lambda: made.of(wire.EngineDied), "the stopped engine ends")
        assert "silence of the engine" in made.events("hung")[0]["reason"]
        assert not alive(stopped)
        await made.up(2)
        made.node.on_turns(wire.Turns((("r2.0", turn("t", [5, 17, 99], 8)),)))
        await made.until(lambda: made.of(wire.TurnsDone), "an answer")
        assert made.of(wire.TurnsDone)[0].items[0][1].finish == "length"
