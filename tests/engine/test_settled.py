"""A weight update waits for caches on their way."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = pytest.mark.vllm


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
