"""A step whose parts came ahead of it equals the step of the whole batch, with all kinds of members."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from libra_hpc.protocol.trainer import PortionDone, StepDone, StepFailed, TrainStep
from libra_hpc.trainer.grpo_trainer import GrpoTrainer
from libra_hpc.trainer.link import BatchRejected
from libra_hpc.trainer.shards import spread
from libra_hpc.weights.names import ReplicaPlace

from .batches import in_portions, joined, train_step
from .support import ALGORITHM, Layout, assert_same_state, assert_same_step, build, fixed_run, make_model
from .test_core import Run


def trained(
    model_dir: Path,
    world: ReplicaPlace,
    steps: list[TrainStep],
    parts: int,
    micro_tokens: int,
    *,
    whole: bool = False,
    coef: float = 0.0,
) -> tuple[list[StepDone], dict[str, torch.Tensor]]:
    """Answers and weights of one process; ``whole``: a step's parts come in one message; ``coef`` to its start."""
    settings = ALGORITHM.changed(algorithm={"reference": str(model_dir), "reference_kl_coef": coef})
    engine, trainer = build(model_dir, world, settings=settings)
    settings = settings.changed(train={"micro_tokens": micro_tokens})
    trainer = GrpoTrainer(engine, trainer._replicas, settings, reference=trainer._reference)
    done = []
    for step in steps:
        ahead, last = in_portions(step, parts)
        if whole:
            last = joined(ahead, last)
        else:
            assert [trainer.portion(portion).portion for portion in ahead] == list(range(parts - 1))
        done.append(trainer.step(last))
    return done, {name: tensor.detach().clone() for name, tensor in engine.named_parameters().items()}


def longest_first(step: TrainStep) -> TrainStep:
    """In the order in which a rank packs its samples."""
    return msgspec.structs.replace(step, minibatches=tuple(spread(batch, 1)[0] for batch in step.minibatches))


def comparable(done: StepDone) -> dict[str, Any]:
    numbers = {name: value for name, value in done.numbers.items() if not name.endswith("_s")}
    return {**msgspec.structs.asdict(done), "numbers": numbers}


@pytest.mark.parametrize("kind", ["qwen3", pytest.param("qwen3_moe", marks=pytest.mark.nightly)])
def test_parts_ahead_of_a_step_give_the_same_step(tmp_path: Path, world: ReplicaPlace, kind: str) -> None:
    make_model(kind, tmp_path / "model")
    steps = [longest_first(train_step(step, 0)) for step in (1, 2, 3)]

    def run(parts: int, micro_tokens: int, whole: bool = False) -> tuple[list[StepDone], dict[str, torch.Tensor]]:
        return trained(tmp_path / "model", world, steps, parts, micro_tokens, whole=whole, coef=0.3)

    # With every sample alone in its pack, packs do not depend on the parts.
    alone, streamed = run(1, 1), run(4, 1)
    assert list(map(comparable, streamed[0])) == list(map(comparable, alone[0]))
    assert all(torch.equal(streamed[1][name], weights) for name, weights in alone[1].items())
    # With other packs, sums differ by rounding. A step that is done again is equal to the last bit.
    whole, streamed, again = run(1, 96), run(3, 96), run(3, 96, whole=True)
    for got, want in zip(streamed[0], whole[0], strict=True):
        assert_same_step(got, want, 1e-6)
        assert (got.numbers["trained_tokens"], got.numbers["loss_tokens"]) == (
            want.numbers["trained_tokens"],
            want.numbers["loss_tokens"],
        )
    assert max((streamed[1][name] - weights).abs().max() for name, weights in whole[1].items()) <= 1e-6
    assert list(map(comparable, again[0])) == list(map(comparable, streamed[0]))
    assert all(torch.equal(again[1][name], weights) for name, weights in streamed[1].items())


def test_a_part_out_of_its_order_is_refused_and_a_first_part_begins_again(tmp_path: Path, world: ReplicaPlace) -> None:
    make_model("qwen2", tmp_path / "model")
    want, _ = trained(tmp_path / "model", world, [train_step(1, 0)], 3, 96)
    _, trainer = build(tmp_path / "model", world)
    (first, second), last = in_portions(train_step(1, 0), 3)
    for message in (first, first, second, first, second):
        trainer.portion(message)
    assert comparable(trainer.step(last)) == comparable(want[0])
    (first, second), last = in_portions(train_step(2, 0), 3)
    trainer.portion(first)
    with pytest.raises(BatchRejected, match="2 portions before of step 2"):
        trainer.step(last)
    with pytest.raises(BatchRejected, match="generation -1"):
        trainer.portion(second)


@pytest.mark.engine
def test_a_new_generation_has_no_parts_of_the_one_before(tmp_path: Path, world: ReplicaPlace) -> None:
    model_dir, layout = tmp_path / "model", Layout(dp=2, ep=2)
    make_model("qwen3_moe", model_dir)
    run = Run(tmp_path, model_dir, layout)
    want, final = fixed_run(model_dir, world, 3)
    run.core.ready()

    def send(step: int, parts: int = 3) -> TrainStep:
        """The parts ahead of a step; returns the message of the step."""
        ahead, last = in_portions(train_step(step, run.generation), parts)
        for portion in ahead:
            assert run.core.ask(portion, PortionDone) == PortionDone(step, run.generation, portion.portion)
        return last

    run.form()
    reports = [run.core.ask(send(1), StepDone)]
    last = send(2)
    run.form()
    refused = run.core.ask(msgspec.structs.replace(last, generation=run.generation), StepFailed)
    assert "2 portions before of step 2" in refused.error
    run.form()
    reports += [run.core.ask(send(2), StepDone), run.core.ask(send(3, 5), StepDone)]
    for got, reference in zip(reports, want, strict=True):
        assert_same_step(got, reference, 5e-6)
    assert_same_state(run.core.tensors(3), final)
    assert run.core.close() == [0] * layout.ranks
