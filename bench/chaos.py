"""Fifty faults in one run: seconds each of them costs, and the reward against a run without faults.  Or a soak.

    python -m bench.chaos [--faults 50] [--seed 0] [--steps 800] [--executor local]      about an hour on two cores
    python -m bench.chaos --every 15 [--seconds 600] [--seeds 3]

- The quickstart's run with real engines, once without faults and once with faults drawn from a seed.  A fault is
  injected when every node works again after the one before.
- With ``--every``: a soak of simulated engines.  A fault comes every so many seconds, whatever the ones before have
  left: the longest time without a step, and whether a saved step was lost or a step or group counted twice.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from bench.harness import ROOT, Options, median, options, policy, progress, report, seeds, submit
from libra_hpc.agent.child_start import MODULES
from libra_hpc.facts.rundir import RunDir, read_lines
from libra_hpc.slurm import local
from tests.chaos.harness import PROMPTS, SIMULATED, standstill

PLANNER, TRAIN, HYBRID, ROLLOUT = range(4)
PATIENCE_S = 300.0
"""Seconds without a new step after which the benchmark gives up."""
AT_WORK = ("train", "rollout")
OVERRIDES = {
    "components.hybrid.nodes": 1,
    "checkpoint.every": 10,
    "deadlines.floor_s": 10.0,
    "deadlines.first_s": 90.0,
    "deadlines.restarts": 50,
    "planner.moves_per_hour": 60,
    "slurm.time_limit": '"04:00:00"',
}


class Kind(NamedTuple):
    """A kind of fault: a signal to the agent of a rank, or to its child that runs one of ``modules``.

    ``stopped_s`` > 0: SIGCONT follows after this time.
    """

    name: str
    weight: int
    ranks: tuple[int, ...]
    modules: tuple[str, ...]
    number: signal.Signals
    stopped_s: float = 0.0


VLLM, MEGATRON, HOST = MODULES["engine"], MODULES["trainer"], MODULES["host"]
CARRIER = ("libra_hpc.weights.carrier",)
KINDS = (
    Kind("vLLM engine killed", 9, (HYBRID, ROLLOUT), VLLM, number=signal.SIGKILL),
    Kind("Megatron worker killed", 8, (TRAIN,), MEGATRON, number=signal.SIGKILL),
    Kind("environment host killed", 7, (ROLLOUT,), HOST, number=signal.SIGKILL),
    Kind("vLLM engine hangs", 4, (HYBRID, ROLLOUT), VLLM, number=signal.SIGSTOP),
    Kind("Megatron worker hangs", 3, (TRAIN,), MEGATRON, number=signal.SIGSTOP),
    Kind("environment host hangs", 3, (ROLLOUT,), HOST, number=signal.SIGSTOP),
    Kind("planner killed", 4, (PLANNER,), (), number=signal.SIGKILL),
    Kind("train leader killed", 4, (TRAIN,), (), number=signal.SIGKILL),
    Kind("rollout leader killed", 4, (ROLLOUT,), (), number=signal.SIGKILL),
    Kind("planner stopped for 8 s", 2, (PLANNER,), (), number=signal.SIGSTOP, stopped_s=8.0),
    Kind("hybrid node stopped for 25 s", 2, (HYBRID,), (), number=signal.SIGSTOP, stopped_s=25.0),
)
SOAK_KINDS = (
    *KINDS,
    Kind("carrier killed", 4, (TRAIN, HYBRID, ROLLOUT), CARRIER, number=signal.SIGKILL),
    Kind("carrier hangs", 2, (TRAIN, HYBRID, ROLLOUT), CARRIER, number=signal.SIGSTOP),
    Kind("train leader stopped for 8 s", 2, (TRAIN,), (), number=signal.SIGSTOP, stopped_s=8.0),
)
SOAK_COLUMNS = ["seed", "faults", "steps", "restarts", "longest gap, s", "saved steps lost", "once", "state"]
COLUMNS = ["fault", "times", "next step, median s", "max", "full strength, median s", "max"]


class Fault(NamedTuple):
    name: str
    step: int
    next_step_s: float
    full_s: float


class Victim:
    """A run of local processes."""

    def __init__(self, run_file: Path, folder: Path, executor: str, overrides: dict[str, Any]) -> None:
        own = {"run.dir": f'"{folder}"', "run.name": '"chaos"', "slurm.restarts": 1000}
        submit(run_file, "--executor", executor, overrides=overrides | own)
        self.run = RunDir(folder / "chaos-001")

    def step(self) -> int:
        return max((int(line["step"]) for line in read_lines(self.run.metrics)), default=0)

    def over(self) -> bool:
        return self.run.result.exists()

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in read_lines(self.run.events) if event["kind"] == kind]

    def agent(self, rank: int) -> int:
        return int([event["pid"] for event in self.events("agent_joined") if event["rank"] == rank][-1])

    def pid(self, kind: Kind, rank: int) -> int:
        """Process id of a rank's agent or of its child, 0 without one."""
        agent, modules = self.agent(rank), set(kind.modules)
        with contextlib.suppress(OSError):
            pids = Path(f"/proc/{agent}/task/{agent}/children").read_text().split()
            children = (int(pid) for pid in pids if modules & {*Path(f"/proc/{pid}/cmdline").read_text().split("\0")})
            return next(children, 0) if modules else agent
        return 0

    def saved(self) -> int:
        """Step of the newest checkpoint, 0 without one."""
        return max((step for step, _ in self.run.complete_checkpoints()), default=0)

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
    if not (pid := victim.pid(kind, rank)):
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


def soaked(folder: Path, every_s: float, seconds: float, seed: int) -> dict[str, Any]:
    """Inject a fault every so many seconds into a run, then stop it; returns what became of it."""
    folder.mkdir(parents=True)
    run_file, rng, role = folder / "run.toml", random.Random(seed), ("rollout", "train")[seed % 2]
    run_file.write_text(SIMULATED.format(runs=folder, steps=10**6, hybrid=1, rollout=2, hybrid_start=role))
    victim = Victim(run_file, folder, "local", {"run.seed": seed, "deadlines.restarts": 50})
    victim.wait(lambda: victim.step() >= 3 and victim.strong())
    began, faults, saved = time.monotonic(), list[str](), [0]
    while (at := time.monotonic() - began) < seconds and not victim.over():
        kind = rng.choices(SOAK_KINDS, [kind.weight for kind in SOAK_KINDS])[0]
        rank = rng.choice(kind.ranks)
        # Where a process is away, another fault is drawn.
        if at >= len(faults) * every_s and (pid := victim.pid(kind, rank)):
            goes_on = f" && sleep {kind.stopped_s} && kill -CONT {pid}" * (kind.stopped_s > 0.0)
            subprocess.Popen(["sh", "-c", f"kill -{kind.number:d} {pid}{goes_on}"], stderr=subprocess.DEVNULL)
            faults.append(kind.name)
            progress(f"seed {seed}, {at:.0f} s, step {victim.step()}: {kind.name}, rank {rank}")
        time.sleep(0.2)
        saved.append(victim.saved())
    victim.wait(lambda: victim.step() > saved[-1])
    gap = max(standstill(victim.run), time.time() - max(row["t"] for row in read_lines(victim.run.metrics)))
    local.cancel(victim.run)
    victim.wait(victim.over)
    end, lost = facts(victim), sum(max(0, before - after) for before, after in pairwise(saved))
    once = end["steps_once"] and end["steps"] == victim.saved() and end["trained_groups"] >= PROMPTS * end["steps"]
    return {**end, "faults": faults, "gap_s": gap, "lost": lost, "once": once}


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


def soak(given: Options, folder: Path) -> None:
    found = {seed: soaked(folder / str(seed), given.every, given.seconds, seed) for seed in seeds(given)}
    names = ("steps", "restarts", "gap_s", "lost", "once", "state")
    rows = [[seed, len(end["faults"]), *(end[name] for name in names)] for seed, end in found.items()]
    notes = [f"A fault every {given.every:g} s for {given.seconds:g} s, simulated engines; the runs are in {folder}."]
    report(given, "A soak", columns=SOAK_COLUMNS, rows=rows, notes=notes, raw=found)


def main() -> None:
    given = options("chaos", __doc__, faults=50, seed=0, steps=800, executor="local", every=0.0, seconds=600.0, seeds=3)
    folder = Path(tempfile.mkdtemp(prefix="libra-chaos-"))
    if given.every:
        soak(given, folder)
        return
    quickstart = ROOT / "examples/quickstart.toml"
    own = {"run.steps": given.steps, "run.seed": given.seed, "model.path": f'"{policy(0)}"'}
    calm = Victim(quickstart, folder / "calm", given.executor, OVERRIDES | own)
    calm.wait(lambda: False)
    victim = Victim(quickstart, folder / "chaos", given.executor, OVERRIDES | own)
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
