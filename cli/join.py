"""`libra-hpc join`: give a running job more engines, from any allocation or machine that sees the run's folder.

- The ranks of the run start, or restart -> wait for them, then join.
- The run ends, the own time limit is near, or a signal comes -> end; turns in flight go on elsewhere.
- For a lender (``--behind``) -> its engines stand behind the gate of a server; it waits for nobody.
- In another cluster, with a copy of the door's record alone -> rank 0 has the configuration; it waits for nobody.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer

from libra_hpc.agent.guest import GuestAgent, GuestSettings, Stay
from libra_hpc.config.load import load_resolved, validate
from libra_hpc.config.run import RunConfig
from libra_hpc.errors import OperationError, invalid
from libra_hpc.facts.rundir import RunDir, readable
from libra_hpc.gate.gated_steps import read_behind
from libra_hpc.mesh.agent_context import RankLayout
from libra_hpc.mesh.door import ask_config, ask_to_join, check_record, read_record
from libra_hpc.owner.slurm_step import job_facts
from libra_hpc.protocol.engine_state import LenderKind
from libra_hpc.protocol.joining import DoorRecord
from libra_hpc.protocol.ranks_stop import JOB_END

from . import jobs
from .output import print_line, print_note
from .runs import RUNS, RunArgument, RunsOption, WeightsOption, find_run

MIB = 1 << 20
WORKING_SHARE = 0.15
"""Share of a device's memory for activations and the memory pools of torch."""
SMALLEST_CACHE_MB = 32
"""MiB: a few turns of a small model."""
POLL_S = 1.0
ASK_S = 15.0
"""Between two questions to the queue whether the run still lives."""


def join(
    run: RunArgument = None,
    engines: Annotated[
        int, typer.Option("--engines", min=0, metavar="N", help="Engines here; default: as on a node of the run.")
    ] = 0,
    tp: Annotated[int, typer.Option("--tp", min=0, metavar="N", help="GPUs of an engine; default: the run's.")] = 0,
    behind: Annotated[Path | None, typer.Option("--behind", metavar="FILE", help="Of libra-hpc lend.")] = None,
    memory: Annotated[
        int, typer.Option("--memory", min=0, metavar="MIB", help="Of each GPU; default: as a node of the run.")
    ] = 0,
    model: Annotated[str, typer.Option("--model", metavar="DIR", help="Its folder here; default: the run's.")] = "",
    spot: Annotated[bool, typer.Option("--spot", help="In a job that the run queued for itself.")] = False,
    weights_mb_s: WeightsOption = 0.0,
    runs: RunsOption = Path(RUNS),
) -> None:
    # A folder with the record alone is none that `find_run` knows.
    found = RunDir(run) if run and os.path.exists(RunDir(run).door) else find_run(run, runs)
    away, until, served = not found.config.exists(), own_limit(), False
    lent = None if behind is None else read_behind(behind)
    kind: LenderKind = "spot" if spot else "lender" if lent else "idle"
    watch = RunWatch(found)
    while True:
        settings = GuestSettings((tp, engines), until, lent, memory, kind, weights_mb_s)
        stay = stay_once(found, settings, model)
        if stay is not None:
            served = True
            print_line(f"{found.name}: this guest left: {stay.reason}")
            if stay.how == "failed":
                raise OperationError(f"{found.name} goes on without this guest: {stay.reason}.")
            if stay.how != "again" or lent is not None:
                return
        elif lent is not None or away:
            raise OperationError(f"{found.name} cannot be joined: its ranks do not answer.")
        elif over := watch.over():
            if served:
                return
            raise invalid("RUN", found.name, f"it {over}", "a run that is queued or running")
        time.sleep(POLL_S)


def stay_once(run: RunDir, wanted: GuestSettings, model: str) -> Stay | None:
    """One stay in the job; None while its ranks do not answer.

    ``wanted``: 0 of TP and engines: as on a node of the run; its ``kv_cache_mb`` is the memory of a device, in MiB.
    """
    record = read_record(run)
    if record is None or not record.open:
        return None
    try:
        config = load_resolved(run.config) if run.config.exists() else config_from_rank_0(run, record)
    except OSError:
        return None
    config = config.changed(model={"path": model or config.model.path})
    check_record(run, record, config)
    layout = RankLayout.of(config)
    usual = config.rollout.on_node(layout.engine_node(layout.rollout_leader))
    tp, engines = wanted.engines[0] or usual[0], wanted.engines[1] or usual[1]
    cache_mb = kv_cache_mb(config, tp, wanted.kv_cache_mb, shared=wanted.behind is not None)
    settings = wanted._replace(engines=(tp, engines), kv_cache_mb=cache_mb)
    with readable(config.run.share):
        return asyncio.run(serve(run, record, config, settings))


def config_from_rank_0(run: RunDir, record: DoorRecord) -> RunConfig:
    """The configuration of a run in another cluster, where interfaces have other names.  Raises as `ask_config`."""
    return validate(asyncio.run(ask_config(run, record))).changed(slurm={"interface": ""})


async def serve(run: RunDir, record: DoorRecord, config: RunConfig, settings: GuestSettings) -> Stay | None:
    try:
        joined = await ask_to_join(run, record, config.slurm.interface)
    except OSError:
        return None
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    tp, engines = settings.engines
    print_line(f"{run.name}: joined as rank {joined.world.rank} with {engines} engines of TP {tp}")
    return await GuestAgent(joined, config, run, record.attempt, settings).serve()


def kv_cache_mb(config: RunConfig, tp: int, memory: int, shared: bool) -> int:
    """MiB of KV cache of a device on which an engine has ``memory`` MiB; 0 of them: as the run has it."""
    usual = config.rollout.kv_cache_mb
    if not memory:
        if shared and not usual and (config.run.engine, config.slurm.device) == ("real", "cuda"):
            raise invalid("--memory", memory, "a server has the rest of the GPU", "the MiB that the guest may have")
        return usual
    weights = sum(path.stat().st_size for path in Path(config.model.path).glob("*.safetensors")) / tp / MIB
    left = int(memory - WORKING_SHARE * memory - weights)
    if left < SMALLEST_CACHE_MB:
        why = f"a share of the weights takes {weights:,.0f} MiB"
        raise invalid("--memory", memory, why, f"at least {(weights + SMALLEST_CACHE_MB) / (1 - WORKING_SHARE):.0f}")
    return left


class RunWatch:
    """Whether a run can still be joined, asked every `ASK_S`."""

    def __init__(self, run: RunDir) -> None:
        self._run, self._asked_at, self._noted = run, -math.inf, False

    def over(self) -> str:
        """That it has ended, in words; empty while it may run."""
        if time.monotonic() - self._asked_at < ASK_S:
            return ""
        self._asked_at, state = time.monotonic(), jobs.state(self._run)
        if state.state == "never_queued":
            return "was never queued"
        if state.over:
            return f"has ended: {state.words}"
        if not self._noted:
            self._noted = True
            print_note(f"{self._run.name} is {state.words}: waiting for its ranks")
        return ""


def own_limit() -> float:
    """Epoch seconds of this job's time limit; infinite without one."""
    end = job_facts(os.environ)[JOB_END] if "SLURM_JOB_ID" in os.environ else ""
    try:
        return float(end) if end.isdecimal() else datetime.fromisoformat(end).timestamp()
    except ValueError:
        return math.inf
