"""What an agent leaves and says when it is refused a start, has to wait before it, or gets a signal."""

from __future__ import annotations

import asyncio
import errno
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

from libra_hpc.agent import agent as module
from libra_hpc.agent.agent import Agent
from libra_hpc.errors import OperationError
from libra_hpc.facts import fact_writer
from libra_hpc.facts.rundir import RunDir
from libra_hpc.facts.status import read_status
from libra_hpc.owner.owner_records import OwnerRecords
from libra_hpc.protocol.ranks_stop import RanksStop


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    """A run whose owner has reserved blocks, on a disk that is full now."""
    made = RunDir(tmp_path)
    made.logs(1).mkdir(parents=True)
    made.write_json(made.config, {"run": {"steps": 40}})
    records = OwnerRecords(made, 1)
    records.status("restarting", "the planner's agent (rank 0) was lost; all ranks restart")

    def full(path: Path, data: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(fact_writer, "write_atomic", full)
    return made


class Left(Exception):
    """Stands for the end of the process."""


@pytest.mark.parametrize("why", ["unmet", "fatal"])
def test_a_refused_start_leaves_why_on_a_full_disk(run: RunDir, monkeypatch: pytest.MonkeyPatch, why: Any) -> None:
    def leave(code: int) -> NoReturn:
        raise Left

    monkeypatch.setattr(module, "leave", leave)
    with pytest.raises(Left):
        module._refuse(run, 1, 0, OperationError("node-3 cannot reach the planner"), why)
    assert OwnerRecords(run, 1).end() == RanksStop(why, "node-3 cannot reach the planner", 0)


def test_what_rank_0_waits_for_before_it_reads_messages_is_in_the_status(run: RunDir) -> None:
    sentence = "metrics.jsonl cannot be written: No space left on device; it is tried again for 900 s"
    Agent._waits_for(SimpleNamespace(run_dir=run, attempt=1), sentence)  # type: ignore[arg-type]
    status = read_status(run, 1)
    assert status is not None
    assert (status.state, status.message) == ("starting", sentence)


@pytest.mark.parametrize("stops", [False, True])
async def test_a_signal_to_one_agent_alone_is_reported(monkeypatch: pytest.MonkeyPatch, stops: bool) -> None:
    monkeypatch.setattr(module, "SIGNAL_S", 0.01)
    logged: list[tuple[str, dict[str, Any]]] = []
    context = SimpleNamespace(log=lambda kind, **fields: logged.append((kind, fields)))
    agent: Any = SimpleNamespace(rank=3, coordinator=None, context=context, _stop=asyncio.Event())
    agent._report_ignored = lambda name: Agent._report_ignored(agent, name)
    for number in (signal.SIGTERM, signal.SIGUSR1):
        Agent._on_signal(agent, number)
    if stops:
        agent._stop.set()
    await asyncio.sleep(0.1)
    assert [(kind, fields["signal"]) for kind, fields in logged] == [("signal_ignored", "SIGTERM")] * (not stops)
