"""An engine that stands still is ended and the next one serves; a weight update waits for caches on their way."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from libra_hpc.protocol import agents as wire
from tests.agent.test_rollout_node import scene

from .engine_harness import Model, alive, turn

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]


@pytest.mark.chaos
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
        await made.until(lambda: made.states("lost"), "the stopped engine ends")
        assert "has reported nothing for" in made.events("hung")[0]["reason"]
        assert not alive(stopped)
        await made.up(2)
        made.node.on_turns(wire.Turns((("r2.0", turn("t", [5, 17, 99], 8)),)))
        await made.until(lambda: made.of(wire.TurnsDone), "an answer")
        assert made.of(wire.TurnsDone)[0].items[0][1].finish == "length"


class Loading:
    """vLLM's scheduler as far as `RolloutEngine.settled` reads it."""

    def __init__(self) -> None:
        self.kv_holding_waiting: list[str] = []
        self.requests: dict[str, Any] = {"running": None, "waiting": None}
        self.pause_state: Any = None

    def get_request_counts(self) -> tuple[int, int]:
        return 1, 1

    def set_pause_state(self, state: Any) -> None:
        self.pause_state = state


def test_nothing_new_starts_and_steps_go_on_until_every_cache_is_there() -> None:
    from vllm.v1.core.sched.interface import PauseState

    from libra_hpc.engine.core import RolloutEngine

    engine, scheduler = RolloutEngine.__new__(RolloutEngine), Loading()
    engine._scheduler, engine._turns, engine._unsettled = scheduler, {}, False  # type: ignore[assignment]
    engine._steps = SimpleNamespace(in_flight=False)  # type: ignore[assignment]
    assert (engine.settled(), engine.busy) == (True, False)
    scheduler.kv_holding_waiting.append("waiting")
    assert (engine.settled(), engine.busy) == (False, True)
    assert scheduler.pause_state is PauseState.PAUSED_NEW
    scheduler.kv_holding_waiting.clear()
    scheduler.requests["aborted while it was loaded"] = None
    assert not engine.settled()
    del scheduler.requests["aborted while it was loaded"]
    assert (engine.settled(), engine.busy) == (True, False)
    assert scheduler.pause_state is PauseState.UNPAUSED
