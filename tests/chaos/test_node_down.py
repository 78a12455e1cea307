"""Nodes that Slurm itself sets down, in every layout and role: the run goes on, and names node and reason.

The table at the end has the seconds without a step from DOWN on, or from the start of the new script where the node of
the script itself was lost.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from libra_hpc.annexes.devcluster.cluster import Cluster, ClusterInfo
from libra_hpc.annexes.devcluster.conf import NODES
from libra_hpc.facts.rundir import RunDir
from libra_hpc.process.agent_folders import kept_folder
from libra_hpc.slurm.queue import query
from libra_hpc.slurm.queue.command import call

from .harness import SIMULATED, Chaos, sound

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]

REASON = "a broken fan"
SNAPSHOT_EVERY = 4
"""Steps, by default."""
TWO = SIMULATED.replace('train = {{ partition = "a800", gpus', 'train = {{ partition = "a800", nodes = 2, gpus')
BESIDE = TWO.replace('planner = {{ partition = "cpu", mem = "2G" }}', "planner = {{ nodes = 0 }}")
WITH_ENV = BESIDE.replace("[components]", '[components]\nenv = {{ partition = "cpu", nodes = 2, cpus = 1 }}')
ROLES = {"planner": 0, "first train": 1, "second train": 2, "hybrid": 3, "first rollout": -2, "second rollout": -1}
ENV = {"second env": -1}


class Layout(NamedTuple):
    """A run of five or six nodes of one kind."""

    text: str
    spare: int = 0
    hybrid: int = 1
    components: int = 1
    """Of the job; one: it is a plain one."""
    fewer: str = "auto"
    """Value of ``planner.fewer_nodes``."""


LAYOUTS = {
    "plain": Layout(BESIDE, fewer="never"),
    "spare": Layout(BESIDE, spare=1),
    "spare env": Layout(WITH_ENV, spare=1, components=2),
    "pairs": Layout(BESIDE, hybrid=2, components=3),
    "cpu planner": Layout(TWO, components=4),
}


class OnNodes(Chaos):
    """A run on nodes that Slurm may set down."""

    def __init__(
        self,
        folder: Path,
        env: dict[str, str],
        layout: str,
        until_done: bool = False,
        options: Sequence[str] = (),
        **values: Any,
    ) -> None:
        self.layout, self.env = LAYOUTS[layout], env
        text = self.layout.text.replace("[slurm]", f"[slurm]\nspare = {self.layout.spare}")
        text = text.replace("[planner]", f'[planner]\nfewer_nodes = "{self.layout.fewer}"')
        super().__init__(folder, "slurm", text, **{"steps": 120, "hybrid": self.layout.hybrid, **values})
        self.waits: subprocess.Popen[bytes] | None = None
        run = self.submit_and_wait(*options) if until_done else self.submit(*options)
        assert run.script.read_text().count("#SBATCH hetjob") == self.layout.components - 1
        self.reach(6)

    def submit_and_wait(self, *options: str) -> RunDir:
        """Somebody on the login node waits until the run is done."""
        command = [
            str(Path(sys.executable).with_name("libra-hpc")),
            "submit",
            str(self.run_file),
            "--until-done",
            "--wait",
            *options,
        ]
        with (self.folder / "wait.log").open("wb") as log:
            self.waits = subprocess.Popen(command, cwd=self.folder, stdout=log, stderr=subprocess.STDOUT)
        self.run = run = RunDir(self.folder / "runs" / "t-001")
        self.wait(run.job.exists, "the job")
        return run

    @property
    def info(self) -> query.JobInfo:
        assert self.run is not None
        return query.job(self.env, str(self.run.read_json(self.run.job)["job_id"]))

    def set_down(self, node: str) -> None:
        call(["scontrol", "update", f"NodeName={node}", "State=DOWN", f"Reason={REASON}"], self.env)
        self.fault_at = time.time()

    def victims(self, node: str) -> list[int]:
        """Process ids of all that Slurm started on the node, its daemons first."""
        home = f"{self.env['SLURM_CONF']}\0".encode()
        victims = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                words = (folder / "environ").read_bytes()
                parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
                stepd = b"slurmstepd" in Path(f"/proc/{parent}/cmdline").read_bytes()
            except OSError:
                continue
            if f"SLURMD_NODENAME={node}\0".encode() in words and home in words:
                victims += [int(parent)] * stepd + [int(folder.name)]
        # The daemons first: none of them reports the end of another.
        victims.sort(key=lambda pid: "slurmstepd" not in Path(f"/proc/{pid}/cmdline").read_text())
        return list(dict.fromkeys(victims))

    def signal_all(self, victims: Sequence[int], number: signal.Signals) -> None:
        for victim in victims:
            with contextlib.suppress(ProcessLookupError):
                os.kill(victim, number)

    def crash(self, node: str) -> None:
        """Everything on the node is killed, as by a loss of power; and Slurm sees it."""
        self.signal_all([daemons()[f"slurmd {node}"], *self.victims(node)], signal.SIGKILL)
        assert self.run is not None
        shutil.rmtree(kept_folder(self.run.path, node), ignore_errors=True)
        self.set_down(node)

    def bring_up(self, node: str) -> None:
        """Somebody repairs the node."""
        call(["scontrol", "update", f"NodeName={node}", "State=RESUME"], self.env)

    def goes_on(self, steps: int = 3) -> None:
        before = len(self.steps())
        self.wait(lambda: len(self.steps()) >= before + steps, "steps after the fault")

    def starts_again(self) -> None:
        """The job, or its successor, starts; time counts from there."""
        self.wait(lambda: len(self.events("job_started")) > 1, "the next start of the job, after this one has ended")

    def counts_from_the_script(self) -> None:
        started = self.info.start_time
        assert started is not None
        assert self.fault_at is not None
        assert started >= int(self.fault_at)
        self.fault_at = started


def daemons() -> dict[str, int]:
    """Process ids by name; those of the session's beginning may have been restarted."""
    found = Cluster().info()
    assert found is not None
    return found.pids


@pytest.fixture(autouse=True)
def nodes_up(cluster: ClusterInfo, slurm_env: dict[str, str]) -> Iterator[None]:
    yield
    listing = call(["squeue", "--me", "--noheader", "--format=%i"], slurm_env).split()
    if listing:
        call(["scancel", *sorted({name.partition("+")[0] for name in listing})], slurm_env)
    Cluster(cluster.home).up()
    for node in NODES:
        subprocess.run(
            ["scontrol", "update", f"NodeName={node}", "State=RESUME"], env=slurm_env, capture_output=True, check=False
        )


def named(case: OnNodes, node: str) -> None:
    """The loss is named with node and reason where a user looks."""
    assert case.run is not None
    sentence = f"Slurm set node {node} down: {REASON}, since {datetime.now().year}"
    assert any(sentence in str(event.get("reason", "")) for event in case.events("node_lost")), case.events("node_lost")
    case.cli("report", str(case.run.path))
    for shown in (case.cli("status", str(case.run.path)).stdout, case.run.report.read_text()):
        assert node in shown


def follows(layout: str, role: str) -> str:
    """What the loss of a node leads to."""
    if layout == "cpu planner":
        return "requeue"
    if role == "first train":
        return "killed"
    if layout.startswith("spare") and role not in ENV:
        return "restart"
    if role in ("hybrid", "second rollout", *ENV):
        return "on"
    return "fewer" if LAYOUTS[layout].fewer == "auto" else "requeue"


CASES = [(layout, role) for layout in ("plain", "spare", "pairs") for role in ROLES if role != "planner"]
"""There the planner is on the first train node, and so is the script."""
CASES += [("cpu planner", role) for role in ("planner", "second train", "second rollout")]
CASES += [("spare env", role) for role in ("hybrid", "second env")]
QUICK = [("pairs", "second rollout")]
"""In the usual suite: the layout of the A800 example, which no other test starts."""


def marked(case: tuple[str, str]) -> Any:
    marks = () if case in QUICK else (pytest.mark.chaos,)
    return pytest.param(*case, marks=marks, id=" ".join(case).replace(" ", "_"))


@pytest.mark.parametrize(("layout", "role"), map(marked, CASES))
def test_slurm_sets_down(slurm_env: dict[str, str], tmp_path: Path, layout: str, role: str) -> None:
    way = follows(layout, role)
    case = OnNodes(
        tmp_path,
        slurm_env,
        layout,
        until_done=way == "killed",
        options=("-o", "checkpoint.every=1000") if way == "fewer" else (),
        steps=300 if way == "fewer" else 120,
    )
    node = case.node((ROLES | ENV)[role])
    case.set_down(node)
    if way == "on":
        case.goes_on()
        named(case, node)
        assert not case.events("restart")
    elif way == "restart":
        case.wait(lambda: case.events("recovered"), "the restart")
        assert node in case.events("recovered")[0]["reason"]
        assert not case.events("job_requeued")
        case.goes_on()
        assert node not in {case.node(rank) for rank in range(6)}
    elif way == "fewer":
        case.wait(lambda: any(event["step"] >= SNAPSHOT_EVERY for event in case.events("recovered")), "the restart")
        case.goes_on()
        named(case, node)
        assert "going on with 5 of 6 nodes: 2 train with TP2 PP1, 2 hybrid, 1 roll out" in case.status()["notices"][0]
        case.bring_up(node)
        case.wait(lambda: case.guest_tokens() > 0, "trained tokens of the node that is back")
    else:
        if way == "requeue":
            case.wait(lambda: case.events("job_requeued"), "the requeue, after this start has ended")
            assert f"Slurm set node {node} down: {REASON}" in case.events("job_requeued")[0]["reason"]
            words = f"node {node} down: {REASON}"
            case.wait(
                lambda: words in case.cli("list", "--json").stdout, "the reason in the list, after this has ended"
            )
        if layout in ("pairs", "spare"):
            # The cluster has no seventh node.
            case.bring_up(node)
        case.starts_again()
        if way == "killed":
            case.counts_from_the_script()
        case.goes_on()
    sound(case)
    if case.waits is not None:
        assert case.waits.wait(60) == 0
        assert f"Node failure on {node}" in (tmp_path / "wait.log").read_text()


@pytest.mark.chaos
@pytest.mark.parametrize("layout", ["plain", "cpu planner"], ids=["plain", "cpu_planner"])
def test_the_node_of_the_script_loses_power(slurm_env: dict[str, str], tmp_path: Path, layout: str) -> None:
    case = OnNodes(tmp_path, slurm_env, layout, until_done=True, options=("-o", "checkpoint.every=1000"), steps=900)
    case.crash(case.node(0))
    reached = case.steps()[-1]
    case.starts_again()
    # Its own part is lost with it; the others' memory has the rest and a copy.
    assert case.events("job_started")[-1]["step"] >= reached - 2 * SNAPSHOT_EVERY
    case.counts_from_the_script()
    case.goes_on()
    sound(case)


@pytest.mark.chaos
def test_the_run_goes_on_without_a_core_node_that_hangs_though_slurm_has_it_up(
    slurm_env: dict[str, str], tmp_path: Path
) -> None:
    case = OnNodes(tmp_path, slurm_env, "pairs", options=("-o", "planner.fewer_after_s=10"), steps=300)
    node = case.node(ROLES["second train"])
    hung = case.victims(node)
    case.signal_all(hung, signal.SIGSTOP)
    case.fault_at = time.time()
    case.wait(lambda: case.events("fewer_nodes"), "the restart")
    case.goes_on()
    (notice,) = [event["reason"] for event in case.events("fewer_nodes")]
    left = "going on with 5 of 6 nodes: 2 train with TP2 PP1, 2 hybrid, 1 roll out"
    assert notice == f"node {node} is silent, and its processes outlive SIGKILL: {left}"
    assert case.events("recovered")[-1]["step"] >= SNAPSHOT_EVERY
    assert node not in {case.node(rank) for rank in range(5)}
    case.signal_all(hung, signal.SIGKILL)
    sound(case)


@pytest.mark.chaos
def test_slurmd_of_a_node_is_killed(slurm_env: dict[str, str], tmp_path: Path) -> None:
    """Its agent lives; Slurm sets the node down after ``SlurmdTimeout``."""
    case = OnNodes(tmp_path, slurm_env, "plain", steps=1600)
    node = case.node(ROLES["second rollout"])
    os.kill(daemons()[f"slurmd {node}"], signal.SIGKILL)
    case.wait(lambda: case.events("node_lost"), "the lost node")
    case.fault_at = time.time()
    assert f"Slurm set node {node} down: Not responding" in case.events("node_lost")[0]["reason"]
    case.goes_on()
    sound(case)


@pytest.mark.chaos
def test_a_run_that_is_cancelled_while_it_was_queued_again_leaves_nothing_in_memory(
    slurm_env: dict[str, str], tmp_path: Path
) -> None:
    case = OnNodes(tmp_path, slurm_env, "pairs", options=("-o", "planner.fewer_nodes=never"))
    core = [case.node(ROLES[role]) for role in ("first train", "second train")]
    case.set_down(case.node(ROLES["second train"]))
    assert case.run is not None
    kept = [kept_folder(case.run.path, node) for node in core]
    case.wait(lambda: case.info.state is query.JobState.PENDING, "the queue, after this start has ended")
    assert all(folder.exists() for folder in kept)
    said = case.cli("cancel", str(case.run.path)).stdout
    assert f"frees the memory that its snapshots have on {', '.join(sorted(core))}" in said
    # All nodes of the cluster are this machine, so the job of one node frees all.
    case.wait(lambda: not any(folder.exists() for folder in kept), "the small job, after the run has ended")
    waiting = call(["squeue", "--me", "--noheader", "--states=PENDING", "--format=%j %r"], slurm_env)
    assert waiting.startswith("t-clean-up "), "the one of the node that is down"
