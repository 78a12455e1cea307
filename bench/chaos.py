"""Fifty faults in one run: seconds each of them costs, and the reward against a run without faults.

    python -m bench.chaos [--faults 50] [--seed 0] [--steps 800] [--executor local]      about an hour on two cores

The quickstart's run with real engines, once without faults and once with faults drawn from a seed.  A fault is injected
when every node works again after the one before.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from bench.harness import ROOT, median, options, policy, progress, report, submit
from libra_hpc.facts.rundir import RunDir, read_lines

PLANNER, TRAIN, HYBRID, ROLLOUT = range(4)
PATIENCE_S = 300.0
"""Seconds without a new step after which the benchmark gives up."""
AT_WORK = ("train", "rollout")
OVERRIDES = {
    "components.hybrid.nodes": 1,
    "checkpoint.every": 10,
    "slurm.restarts": 1000,
    "deadlines.floor_s": 10.0,
    "deadlines.first_s": 90.0,
    "deadlines.restarts": 50,
    "planner.moves_per_hour": 60,
    "slurm.time_limit": '"04:00:00"',
}


class Kind(NamedTuple):
    """A kind of fault: a signal to the agent of a rank, or to its child that runs ``module``.

    ``stopped_s`` > 0: SIGCONT follows after this time.
    """

    name: str
    weight: int
    ranks: tuple[int, ...]
    module: str
    number: signal.Signals
    stopped_s: float = 0.0


VLLM, MEGATRON, HOST = "libra_hpc.engine", "libra_hpc.trainer.worker", "libra_hpc.host.host"
KINDS = (
    Kind("vLLM engine killed", 9, (HYBRID, ROLLOUT), VLLM, number=signal.SIGKILL),
    Kind("Megatron worker killed", 8, (TRAIN,), MEGATRON, number=signal.SIGKILL),
    Kind("environment host killed", 7, (ROLLOUT,), HOST, number=signal.SIGKILL),
    Kind("vLLM engine hangs", 4, (HYBRID, ROLLOUT), VLLM, number=signal.SIGSTOP),
    Kind("Megatron worker hangs", 3, (TRAIN,), MEGATRON, number=signal.SIGSTOP),
    Kind("environment host hangs", 3, (ROLLOUT,), HOST, number=signal.SIGSTOP),
    Kind("planner killed", 4, (PLANNER,), "", number=signal.SIGKILL),
    Kind("train leader killed", 4, (TRAIN,), "", number=signal.SIGKILL),
    Kind("rollout leader killed", 4, (ROLLOUT,), "", number=signal.SIGKILL),
    Kind("planner stopped for 8 s", 2, (PLANNER,), "", number=signal.SIGSTOP, stopped_s=8.0),
    Kind("hybrid node stopped for 25 s", 2, (HYBRID,), "", number=signal.SIGSTOP, stopped_s=25.0),
)
COLUMNS = ["fault", "times", "next step, median s", "max", "full strength, median s", "max"]


class Fault(NamedTuple):
    name: str
    step: int
    next_step_s: float
    full_s: float


class Victim:
    """A run of the quickstart with real engines, in local processes."""

    def __init__(self, folder: Path, model: Path, *, steps: int, seed: int, executor: str) -> None:
        own = {"run.steps": steps, "run.seed": seed, "run.dir": f'"{folder}"', "model.path": f'"{model}"'}
        submit(ROOT / "examples/quickstart.toml", "--executor", executor, overrides=OVERRIDES | own)
        self.run = RunDir(folder / "quickstart-001")

    def step(self) -> int:
        return max((int(line["step"]) for line in read_lines(self.run.metrics)), default=0)

    def over(self) -> bool:
        return self.run.result.exists()

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in read_lines(self.run.events) if event["kind"] == kind]

    def agent(self, rank: int) -> int:
        return int([event["pid"] for event in self.events("agent_joined") if event["rank"] == rank][-1])

    def child(self, rank: int, module: str) -> int:
        """Process id of a child of a rank's agent, 0 without one."""
        try:
            children = Path(f"/proc/{self.agent(rank)}/task/{self.agent(rank)}/children").read_text().split()
            return next((int(pid) for pid in children if module in Path(f"/proc/{pid}/cmdline").read_text()), 0)
        except OSError:
            return 0

    def strong(self) -> bool:
        """Whether every node works, with every engine it should have."""
        status = self.run.read_json(self.run.status)
        if not status or status["state"] != "running" or time.time() - status["updated_at"] > 5.0:
            return False
        nodes = [node for node in status["nodes"] if node["component"] != "planner"]
        return all(
            node["role"] in AT_WORK
            and any(state == "ready" and name[0] == node["role"][0] for name, state in node["engines"].items())
            for node in nodes
        )

    def wait(self, condition: Callable[[], bool]) -> None:
        """Wait for the condition or the end of the run; `SystemExit` without a step for `PATIENCE_S`."""
        stepped, step = time.monotonic(), self.step()
        while not (condition() or self.over()):
            if self.step() != step:
                stepped, step = time.monotonic(), self.step()
            if time.monotonic() - stepped > PATIENCE_S:
                message = self.run.read_json(self.run.status).get("message")
                raise SystemExit(f"no step for {PATIENCE_S:.0f} s: {message}")
            time.sleep(0.1)


def inject(victim: Victim, kind: Kind, rank: int) -> Fault | None:
    """Inject a fault and wait until all nodes work again; None without such a process."""
    pid = victim.child(rank, kind.module) if kind.module else victim.agent(rank)
    if not pid:
        return None
    before = victim.step()
    began, at = time.monotonic(), time.time()
    os.kill(pid, kind.number)
    if kind.stopped_s:
        time.sleep(kind.stopped_s)
        os.kill(pid, signal.SIGCONT)
    # Until the status shows the fault.
    time.sleep(3.0)
    victim.wait(lambda: victim.step() > before)
    if kind.number == signal.SIGSTOP and not kind.stopped_s:
        # A process that hangs is detected at its deadline.
        victim.wait(lambda: any(event["t"] > at for event in victim.events("hung")))
    victim.wait(victim.strong)
    full_s = time.monotonic() - began
    # Steps after the checkpoint of a restart are committed again, and their first lines are gone.
    later = [line["t"] for line in read_lines(victim.run.metrics) if line["t"] > at]
    return Fault(kind.name, before, min(later, default=time.time()) - at, full_s)


def disturbed(victim: Victim, faults: int, steps: int, seed: int) -> list[Fault]:
    rng, done = random.Random(seed), list[Fault]()

    def due() -> bool:
        return victim.step() >= (len(done) + 1) * (steps - 20) // (faults + 1) and victim.strong()

    while len(done) < faults and not victim.over():
        victim.wait(due)
        kind = rng.choices(KINDS, [kind.weight for kind in KINDS])[0]
        time.sleep(rng.uniform(0.0, 2.0))
        if fault := inject(victim, kind, rng.choice(kind.ranks)):
            done.append(fault)
            words = f"{fault.name}: {fault.next_step_s:.1f} s, {fault.full_s:.1f} s"
            progress(f"{len(done)}/{faults} at step {fault.step}: {words}")
    victim.wait(victim.over)
    return done


def facts(victim: Victim) -> dict[str, Any]:
    """Invariants at the end of a run, and the reward of its last fifth."""
    run = victim.run
    rows = list(read_lines(run.metrics))
    newest = run.latest_checkpoint()
    assert newest is not None
    position = run.read_json(newest[1] / "state.json")
    last = [row["reward"] for row in rows[-max(1, len(rows) // 5) :]]
    recovered = victim.events("experience_kept")
    dropped = sum((Counter[str](event["dropped"]) for event in recovered), Counter[str]())
    return {
        "state": run.read_json(run.result).get("state"),
        "message": run.read_json(run.result).get("message"),
        "steps_once": [row["step"] for row in rows] == list(range(1, len(rows) + 1)),
        "steps": len(rows),
        "trained_groups": position["low"] + len(position["extra"]),
        "restarts": len(victim.events("recovered")),
        "staleness_max": max(row["staleness_max"] for row in rows),
        "reward": sum(last) / len(last),
        "kept": sum(event["trajectories"] for event in recovered),
        "dropped": dict(dropped),
    }


def main() -> None:
    given = options("chaos", __doc__, faults=50, seed=0, steps=800, executor="local")
    model, folder = policy(0), Path(tempfile.mkdtemp(prefix="libra-chaos-"))
    run = {"steps": given.steps, "seed": given.seed, "executor": given.executor}
    calm = Victim(folder / "calm", model, **run)
    calm.wait(lambda: False)
    victim = Victim(folder / "chaos", model, **run)
    faults = disturbed(victim, given.faults, given.steps, given.seed)
    ends = {"undisturbed": facts(calm), "disturbed": facts(victim)}
    if all(end["state"] == "completed" for end in ends.values()):
        shutil.rmtree(folder)
    else:
        print(f"a run failed; its files are in {folder}", file=sys.stderr)
    rows = []
    for kind in KINDS:
        if found := [fault for fault in faults if fault.name == kind.name]:
            steps, full = [fault.next_step_s for fault in found], [fault.full_s for fault in found]
            rows.append([kind.name, len(found), median(steps), max(steps), median(full), max(full)])
    notes = [f"{name}: {json.dumps(end)}" for name, end in ends.items()]
    words = f"{len(faults)} faults, seed {given.seed}, {given.steps} steps of 8 prompts x 8"
    notes.append(f"{words}; seconds from the fault.")
    raw = {"faults": [fault._asdict() for fault in faults], **ends}
    report(given, "What a fault costs", columns=COLUMNS, rows=rows, notes=notes, raw=raw)


if __name__ == "__main__":
    main()
