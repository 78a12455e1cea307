"""Fifty faults in one run: what each costs, and whether the run learned what it would have learned without them.

The quickstart's run with real engines (Megatron-Core, vLLM, environment hosts), once undisturbed and once with faults
drawn from a seed, one after the other. A fault waits until the last one is over: every node at work again, and a new
step committed.

    python -m bench.chaos [--faults 50] [--seed 0] [--steps 800] [--executor local]      about an hour on two cores
"""

from __future__ import annotations

import argparse
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
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.harness import ROOT, engine_environment, median, policy, report
from libra_hpc.telemetry.rundir import RunDir, read_lines

PLANNER, TRAIN, HYBRID, ROLLOUT = range(4)
PATIENCE_S = 300.0
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
    """A kind of fault: a signal to the agent of a rank, or to its child that runs ``module``; ``stopped_s`` > 0: it
    is continued after so long."""

    name: str
    weight: int
    ranks: tuple[int, ...]
    module: str
    number: signal.Signals
    stopped_s: float = 0.0


KINDS = (
    Kind("vLLM engine killed", 9, (HYBRID, ROLLOUT), "libra_hpc.rollout.engine", signal.SIGKILL),
    Kind("Megatron worker killed", 8, (TRAIN,), "libra_hpc.train.worker", signal.SIGKILL),
    Kind("environment host killed", 7, (ROLLOUT,), "libra_hpc.tasks.host", signal.SIGKILL),
    Kind("vLLM engine hangs", 4, (HYBRID, ROLLOUT), "libra_hpc.rollout.engine", signal.SIGSTOP),
    Kind("Megatron worker hangs", 3, (TRAIN,), "libra_hpc.train.worker", signal.SIGSTOP),
    Kind("environment host hangs", 3, (ROLLOUT,), "libra_hpc.tasks.host", signal.SIGSTOP),
    Kind("planner killed", 4, (PLANNER,), "", signal.SIGKILL),
    Kind("train leader killed", 4, (TRAIN,), "", signal.SIGKILL),
    Kind("rollout leader killed", 4, (ROLLOUT,), "", signal.SIGKILL),
    Kind("planner stopped for 8 s", 2, (PLANNER,), "", signal.SIGSTOP, 8.0),
    Kind("hybrid node stopped for 25 s", 2, (HYBRID,), "", signal.SIGSTOP, 25.0),
)


class Fault(NamedTuple):
    """One injected fault and what it cost."""

    name: str
    step: int
    next_step_s: float
    full_s: float


class Victim:
    """A run in progress."""

    def __init__(self, folder: Path, model: Path, steps: int, seed: int, executor: str) -> None:
        changes = {
            **OVERRIDES,
            "run.steps": steps,
            "run.seed": seed,
            "run.dir": f'"{folder}"',
            "model.path": f'"{model}"',
        }
        words = [word for key, value in changes.items() for word in ("-o", f"{key}={value}")]
        command = [
            str(Path(sys.executable).with_name("libra-hpc")),
            "submit",
            str(ROOT / "examples" / "quickstart.toml"),
            "--executor",
            executor,
            *words,
        ]
        subprocess.run(command, check=True, env=engine_environment(), stdout=subprocess.DEVNULL)
        self.run, self._steps = RunDir(folder / "quickstart-001"), steps

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
        """Until the condition holds or the run is over; `SystemExit` when no step comes for `PATIENCE_S`."""
        stepped, step = time.monotonic(), self.step()
        while not (condition() or self.over()):
            if self.step() != step:
                stepped, step = time.monotonic(), self.step()
            if time.monotonic() - stepped > PATIENCE_S:
                raise SystemExit(
                    f"no step for {PATIENCE_S:.0f} s: {self.run.read_json(self.run.status).get('message')}"
                )
            time.sleep(0.1)


def inject(victim: Victim, kind: Kind, rank: int) -> Fault | None:
    """Do it, and wait for what it takes; None when there is no such process at the moment."""
    pid = victim.child(rank, kind.module) if kind.module else victim.agent(rank)
    if not pid:
        return None
    before = victim.step()
    began, at = time.monotonic(), time.time()
    os.kill(pid, kind.number)
    if kind.stopped_s:
        time.sleep(kind.stopped_s)
        os.kill(pid, signal.SIGCONT)
    # A moment later the fault is seen, and the status no longer that of before.
    time.sleep(3.0)
    victim.wait(lambda: victim.step() > before)
    if kind.number == signal.SIGSTOP and not kind.stopped_s:
        # Until its deadline has passed a process that hangs looks like any other.
        victim.wait(lambda: any(event["t"] > at for event in victim.events("hung")))
    victim.wait(victim.strong)
    full_s = time.monotonic() - began
    # Steps that a restart went back behind are committed again, and their first lines are gone.
    later = [line["t"] for line in read_lines(victim.run.metrics) if line["t"] > at]
    return Fault(kind.name, before, min(later, default=time.time()) - at, full_s)


def disturbed(victim: Victim, faults: int, steps: int, seed: int) -> list[Fault]:
    """Inject faults, spread over the steps."""
    rng, done = random.Random(seed), list[Fault]()
    while len(done) < faults and not victim.over():
        target = (len(done) + 1) * (steps - 20) // (faults + 1)
        victim.wait(lambda target=target: victim.step() >= target and victim.strong())
        kind = rng.choices(KINDS, [kind.weight for kind in KINDS])[0]
        time.sleep(rng.uniform(0.0, 2.0))
        fault = inject(victim, kind, rng.choice(kind.ranks))
        if fault is not None:
            done.append(fault)
            print(
                f"{len(done)}/{faults} at step {fault.step}: {fault.name}: {fault.next_step_s:.1f} s,"
                f" {fault.full_s:.1f} s",
                file=sys.stderr,
                flush=True,
            )
    victim.wait(victim.over)
    return done


def facts(victim: Victim) -> dict[str, Any]:
    """What must hold at the end, and the reward of the last fifth."""
    run = victim.run
    rows = list(read_lines(run.metrics))
    newest = run.latest_checkpoint()
    assert newest is not None
    position = run.read_json(newest[1] / "state.json")
    last = [row["reward"] for row in rows[-max(1, len(rows) // 5) :]]
    kept = victim.events("experience_kept")
    dropped: Counter[str] = Counter()
    for event in kept:
        dropped.update(event["dropped"])
    return {
        "state": run.read_json(run.result).get("state"),
        "message": run.read_json(run.result).get("message"),
        "steps_once": [row["step"] for row in rows] == list(range(1, len(rows) + 1)),
        "steps": len(rows),
        "trained_groups": position["low"] + len(position["extra"]),
        "restarts": len(victim.events("recovered")),
        "staleness_max": max(row["staleness_max"] for row in rows),
        "reward": sum(last) / len(last),
        "kept": sum(event["trajectories"] for event in kept),
        "dropped": dict(dropped),
    }


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--faults", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--executor", default="local")
    arguments = parser.parse_args()
    model = policy(0)
    folder = Path(tempfile.mkdtemp(prefix="libra-chaos-"))
    calm = Victim(folder / "calm", model, arguments.steps, arguments.seed, arguments.executor)
    calm.wait(lambda: False)
    victim = Victim(folder / "chaos", model, arguments.steps, arguments.seed, arguments.executor)
    faults = disturbed(victim, arguments.faults, arguments.steps, arguments.seed)
    ends = {"undisturbed": facts(calm), "disturbed": facts(victim)}
    if all(end["state"] == "completed" for end in ends.values()):
        shutil.rmtree(folder)
    else:
        print(f"a run failed; its files are in {folder}", file=sys.stderr)
    rows = []
    for kind in KINDS:
        found = [fault for fault in faults if fault.name == kind.name]
        if found:
            steps, full = [fault.next_step_s for fault in found], [fault.full_s for fault in found]
            rows.append([kind.name, len(found), median(steps), max(steps), median(full), max(full)])
    notes = [f"{name}: {json.dumps(end)}" for name, end in ends.items()]
    notes.append(
        f"{len(faults)} faults, seed {arguments.seed}, {arguments.steps} steps of 8 prompts x 8; seconds from the"
        " fault."
    )
    columns = ["fault", "times", "next step, median s", "max", "full strength, median s", "max"]
    report(
        "chaos", "What a fault costs", columns, rows, notes, {"faults": [fault._asdict() for fault in faults], **ends}
    )


if __name__ == "__main__":
    main()
