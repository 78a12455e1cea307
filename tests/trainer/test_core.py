"""A core with a sharded optimizer and replicas without one that come, go and die: the result is that of one process."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from libra_hpc.config.run import RunConfig
from libra_hpc.models.architecture import hf_shapes, read_shape
from libra_hpc.protocol.trainer import Joined, Offered, OfferWeights, StepDone, StepFailed
from libra_hpc.weights.image import Image
from libra_hpc.weights.names import ReplicaPlace
from libra_hpc.weights.pieces import offer_path, payload_path, read_offer

from .batches import train_step
from .support import (
    ALGORITHM,
    Layout,
    Replica,
    assert_same_state,
    assert_same_step,
    fixed_run,
    join_all,
    make_model,
    step_all,
)

pytestmark = pytest.mark.engine
STEPS = 9


class Run:
    """The core, its replicas, and the steps of the fixed run."""

    def __init__(
        self,
        base: Path,
        model_dir: Path,
        layout: Layout,
        *,
        elastic_dp: int = 1,
        minibatches: int = 1,
        settings: RunConfig = ALGORITHM,
    ) -> None:
        """``layout`` is the core's; its replicas have ``elastic_dp`` data-parallel ranks."""
        self.settings = settings
        self.base, self.model_dir, self.minibatches = base, model_dir, minibatches
        self.layout, self.elastic_dp = layout, elastic_dp
        self.core = self._replica("core", layout)
        self.generation = 0
        self.members: list[Replica] = []

    def replica(self, name: str) -> Replica:
        return self._replica(name, self.layout._replace(dp=self.elastic_dp), elastic=True)

    def _replica(self, name: str, layout: Layout, **options: Any) -> Replica:
        both = {"core_dp": self.layout.dp, "elastic_dp": self.elastic_dp, "run": self.settings}
        return Replica(self.base, name, self.model_dir, **layout._asdict(), **both, **options)

    def form(self, *replicas: Replica, **weights: Any) -> list[Joined]:
        """A new generation of the core and ``replicas``."""
        self.generation += 1
        self.members = [self.core, *replicas]
        return join_all(self.members, self.generation, self.base / f"generation-{self.generation}", **weights)

    def send(self, step: int) -> None:
        for rank, member in enumerate(self.members):
            count = len(self.members)
            member.send(train_step(step, self.generation, replica=rank, replicas=count, minibatches=self.minibatches))

    def send_core(self, step: int) -> None:
        """A step of which only the core hears: the replica is dead."""
        self.core.send(train_step(step, self.generation, replicas=len(self.members), minibatches=self.minibatches))

    def step(self, step: int) -> StepDone:
        """Run a step; the core's answer."""
        done: StepDone = step_all(self.members, step, self.generation, minibatches=self.minibatches)[0]
        return done


@pytest.mark.parametrize(
    ("kind", "tied", "tp", "pp", "dp", "minibatches"),
    [
        ("qwen2", True, 2, 1, 1, 1),
        pytest.param("qwen3", True, 1, 1, 2, 2, marks=pytest.mark.nightly),
        pytest.param("qwen3", False, 1, 2, 1, 1, marks=pytest.mark.nightly),
    ],
)
def test_replicas_without_optimizer_come_go_and_die_and_the_result_is_that_of_one_process(
    tmp_path: Path, world: ReplicaPlace, kind: str, tied: bool, tp: int, pp: int, dp: int, minibatches: int
) -> None:
    model_dir = tmp_path / "model"
    make_model(kind, model_dir, tied=tied, layers=2)
    run = Run(tmp_path, model_dir, Layout(tp, pp, dp=dp), minibatches=minibatches)
    first, second = run.replica("first"), run.replica("second")
    want, final = fixed_run(model_dir, world, STEPS, minibatches)
    for replica in (run.core, first, second):
        replica.ready()
    reports = []
    size = sum(t.nbytes for name, t in final.items() if not name.startswith("exp_avg"))

    run.form()
    reports += [run.step(1)]
    (_, joined) = run.form(first)
    assert joined.step == 1
    assert joined.received_bytes > 0.4 * size / (tp * pp)
    reports += [run.step(2)]
    # A second one joins from the weights that its node has for rollout: nothing crosses the network.
    offered = run.core.ask(OfferWeights(str(tmp_path), 2, -1), Offered)
    dtype = read_offer(offer_path(tmp_path, 2, offered.writer)).pieces[0].dtype
    image = Image(tmp_path, hf_shapes(read_shape(model_dir)), dtype)
    image.apply(
        2, [(read_offer(path), payload_path(path).read_bytes()) for path in sorted(tmp_path.glob("offer-*.manifest"))]
    )
    (_, kept, local) = run.form(first, second, weights=str(image.path), version=2)
    assert (kept.received_bytes, local.received_bytes, local.step) == (0, 0, 2)
    reports += [run.step(3), run.step(4)]
    run.form(second)
    reports += [run.step(5)]
    run.form(second, first)
    reports += [run.step(6)]
    # One dies in a step: nobody has changed anything, and the step is done again without it.
    first.processes[0].send_signal(signal.SIGSTOP)
    run.send(7)
    first.kill()
    assert isinstance(run.core.receive(StepFailed), StepFailed)
    second.receive(StepFailed)
    run.form(second)
    reports += [run.step(7)]
    run.form()
    reports += [run.step(8)]
    run.form(second)
    reports += [run.step(9)]
    for got, reference in zip(reports, want, strict=True):
        assert_same_step(got, reference, 5e-6)
    assert_same_state(run.core.tensors(STEPS), final)
    assert run.core.close() == [0] * (tp * pp * dp)
    assert second.close() == [0] * (tp * pp)


@pytest.mark.parametrize(
    ("kind", "layers", "layout", "elastic_dp"),
    [
        ("qwen3_moe", 2, Layout(dp=2, ep=2), 2),
        pytest.param("llama", 2, Layout(pp=2), 1, marks=pytest.mark.nightly),
        pytest.param("qwen3", 2, Layout(dp=2), 2, marks=pytest.mark.nightly),
        pytest.param("qwen3", 2, Layout(tp=2), 1, marks=pytest.mark.nightly),
        pytest.param("qwen3", 2, Layout(cp=2), 1, marks=pytest.mark.nightly),
        pytest.param("qwen2", 3, Layout(pp=2), 1, marks=pytest.mark.nightly),
        pytest.param("qwen2", 2, Layout(tp=2, dp=2), 1, marks=pytest.mark.nightly),
        pytest.param("mistral", 2, Layout(tp=2), 2, marks=pytest.mark.nightly),
        pytest.param("phi3", 3, Layout(pp=2), 1, marks=pytest.mark.nightly),
        pytest.param("glm4", 2, Layout(cp=2), 2, marks=pytest.mark.nightly),
        pytest.param("glm4_moe", 2, Layout(dp=2, ep=2), 2, marks=pytest.mark.nightly),
    ],
    ids=str,
)
def test_thirty_steps_in_every_layout_equal_one_process(
    tmp_path: Path, world: ReplicaPlace, kind: str, layers: int, layout: Layout, elastic_dp: int
) -> None:
    model_dir = tmp_path / "model"
    make_model(kind, model_dir, layers=layers)
    run = Run(tmp_path, model_dir, layout, elastic_dp=elastic_dp)
    replica = run.replica("elastic")
    want, final = fixed_run(model_dir, world, 30)
    run.core.ready()
    replica.ready()
    run.form()
    reports = []
    for step in range(1, 31):
        if step in (5, 17):
            run.form(replica)
        elif step == 12:
            run.form()
        elif step == 20:
            replica.kill()
            run.send_core(step)
            run.core.receive(StepFailed)
            run.form()
        reports.append(run.step(step))
    for got, reference in zip(reports, want, strict=True):
        assert got.numbers["loss"] == pytest.approx(reference.numbers["loss"], abs=1e-4)
        assert got.numbers["grad_norm"] == pytest.approx(reference.numbers["grad_norm"], rel=1e-4)
    got_state = run.core.tensors(30)
    assert all((got_state[name] - tensor).abs().max() < 1e-4 for name, tensor in final.items())
    assert run.core.close() == [0] * layout.ranks
