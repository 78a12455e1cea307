"""Adapters: their gradients are those of the weights, a full rank is full training, and every layout is the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from libra_hpc.config.run import RunConfig
from libra_hpc.models.adapters import SOON, least_rate
from libra_hpc.protocol.trainer import Freed, Standby
from libra_hpc.trainer.saved import checkpoint
from libra_hpc.trainer.saved.shard_files import PREFIX, write_peft
from libra_hpc.trainer.train_engine import TrainEngine
from libra_hpc.weights.names import ReplicaPlace

from .batches import train_step
from .settings import optimizer
from .support import (
    ALGORITHM,
    Layout,
    assert_equals_one_process,
    assert_same_state,
    assert_same_step,
    build,
    fixed_run,
    make_model,
    save,
)
from .test_core import Run

UNCLIPPED = optimizer(lr=1e-3, grad_clip=1e9, eps=1e-5)


def adapted(rank: int = 4, alpha: float = 8.0, targets: tuple[str, ...] = ()) -> RunConfig:
    return ALGORITHM.changed(lora={"rank": rank, "alpha": alpha, "targets": list(targets)})


def pairs(engine: TrainEngine) -> dict[str, tuple[Any, Any]]:
    """A and B by the name of their weight."""
    assert engine.adapters is not None
    own = engine.adapters.parameters
    return {
        name.replace(".lora_a", ".weight"): (a, own[name.replace("lora_a", "lora_b")])
        for name, a in own.items()
        if name.endswith("lora_a")
    }


@pytest.mark.parametrize("kind", ["qwen3", "qwen2_moe", "glm4_moe", "gpt_oss", "qwen3_5_text"])
def test_gradients_are_those_of_the_merged_weights(tmp_path: Path, world: ReplicaPlace, kind: str) -> None:
    make_model(kind, tmp_path / "model")
    engine, trainer = build(tmp_path / "model", world, optimizer=UNCLIPPED, settings=adapted())
    for _, b in pairs(engine).values():
        b.data.normal_(0.0, 0.05)
    engine.state.refresh()
    checkpoint.write_policy(engine, tmp_path / "model", tmp_path / "merged")
    before = {name: (a.detach().clone(), b.detach().clone()) for name, (a, b) in pairs(engine).items()}
    whole, other = build(tmp_path / "merged", world, optimizer=UNCLIPPED)
    mine, theirs = (one.step(train_step(1, 0)) for one in (trainer, other))
    # Exported weights are the same bits; where they lie in memory changes the order of a sum.
    assert mine.numbers["loss"] == pytest.approx(theirs.numbers["loss"], abs=1e-7)
    weights, norm = whole.named_parameters(), 0.0
    for name, (a, b) in pairs(engine).items():
        gradient = weights[name].main_grad  # type: ignore[attr-defined]
        old_a, old_b = before[name]
        assert (b.main_grad - 2.0 * gradient @ old_a.t()).abs().max() < 1e-6, name
        assert (a.main_grad - 2.0 * old_b.t() @ gradient).abs().max() < 1e-6, name
        norm += float(a.main_grad.square().sum() + b.main_grad.square().sum())
    assert mine.numbers["grad_norm"] == pytest.approx(norm**0.5, rel=1e-5)


def test_a_full_rank_is_full_training(tmp_path: Path, world: ReplicaPlace) -> None:
    """In the first update: with B = 0 only B has a gradient, and with A = 1 it is that of the weight."""
    make_model("qwen2", tmp_path / "model")
    run = adapted(32, 32.0, ("attention",))
    engine, trainer = build(tmp_path / "model", world, optimizer=UNCLIPPED, settings=run)
    for a, _ in pairs(engine).values():
        torch.nn.init.eye_(a)
    whole, other = build(tmp_path / "model", world, optimizer=UNCLIPPED)
    start = {name: weight.detach().clone() for name, weight in whole.named_parameters().items()}
    for one in (trainer, other):
        one.step(train_step(1, 0))
    trained = whole.named_parameters()
    for name, weight in engine.named_parameters().items():
        moved = (weight - start[name]).abs().max()
        if name in pairs(engine):
            assert (weight - trained[name]).abs().max() < 1e-4 * moved, name
        else:
            assert moved == 0, name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_run_goes_on_bit_for_bit_from_a_checkpoint_and_a_standby(
    tmp_path: Path, world: ReplicaPlace, dtype: torch.dtype
) -> None:
    make_model("qwen3_moe", tmp_path / "model")
    engine, trainer = build(tmp_path / "model", world, dtype, settings=adapted())
    trainer.step(train_step(1, 0, minibatches=2))
    save(engine, tmp_path / "model", tmp_path / "saved")
    then = {name: weight.detach().clone() for name, weight in engine.named_parameters().items()}
    if engine.frees:
        engine.release()
        assert sum(weight.untyped_storage().nbytes() for weight in engine.named_parameters().values()) < 1000
        engine.reclaim()
    trainer.step(train_step(2, 0))
    other, again = build(tmp_path / "model", world, dtype, settings=adapted())
    start = other.named_parameters()
    checkpoint.load_state(other, tmp_path / "saved")
    assert all(torch.equal(start[name], weight) for name, weight in then.items())
    again.step(train_step(2, 0))
    assert all(torch.equal(start[name], weight) for name, weight in engine.named_parameters().items())


@pytest.mark.parametrize(("rates", "share"), [(0.1, 0.06), (1.0, 0.5), (10.0, 0.94)])
def test_half_of_the_weights_in_bfloat16_move_soon_at_the_least_rate(
    tmp_path: Path, world: ReplicaPlace, rates: float, share: float
) -> None:
    make_model("qwen3", tmp_path / "model")
    engine, _ = build(tmp_path / "model", world, torch.bfloat16, settings=adapted(4, 8.0))
    weights = {name: weight for name, weight in engine.named_parameters().items() if name in pairs(engine)}
    for weight in weights.values():
        torch.nn.init.normal_(weight, 0.0, weight.shape[1] ** -0.5)
    engine.adapters.start(engine.state)
    before = {name: weight.detach().clone() for name, weight in weights.items()}
    for _, b in pairs(engine).values():
        b.data = SOON * rates * least_rate(4, 8.0) * torch.randn_like(b).sign()
    engine.state.refresh()
    moved = torch.cat([(weight != before[name]).flatten() for name, weight in weights.items()])
    assert float(moved.float().mean()) == pytest.approx(share, abs=0.03)


@pytest.mark.parametrize("kind", ["phi3", "qwen2_moe", "qwen3_5"])
def test_a_peft_folder_added_to_the_model_is_the_policy(tmp_path: Path, world: ReplicaPlace, kind: str) -> None:
    make_model(kind, tmp_path / "model")
    engine, trainer = build(tmp_path / "model", world, optimizer=UNCLIPPED, settings=adapted(4, 8.0))
    trainer.step(train_step(1, 0))
    save(engine, tmp_path / "model", tmp_path / "saved")
    write_peft(tmp_path / "saved", engine.shape, "model", tmp_path / "peft")
    folders = (tmp_path / "peft", tmp_path / "model", tmp_path / "saved" / "policy")
    found, base, policy = (load_file(next(folder.glob("*.safetensors"))) for folder in folders)
    for name in (name for name, weight in policy.items() if not torch.equal(weight, base[name])):
        module, routed, which = name.removesuffix(".weight").partition(".experts.")
        number, _, kind = which.partition(".")
        module += routed and (".experts" if kind == "down_proj" else ".experts.base_layer")
        a, b = (found[f"{PREFIX}{module}.lora_{one}.weight"] for one in "AB")
        if routed:
            # PEFT reshapes them so.
            a, b = a.view(8, 4, -1)[int(number)], b.view(len(b), 4, 8)[..., int(number)]
            b = b if kind == "down_proj" else b.chunk(2)[kind == "up_proj"]
        assert torch.allclose(base[name] + 2.0 * b @ a, policy[name], atol=1e-7), name


@pytest.mark.engine
@pytest.mark.parametrize(
    ("kind", "layout", "recompute"),
    [
        pytest.param("qwen3", Layout(tp=2), "selective", marks=pytest.mark.nightly),
        ("qwen3_moe", Layout(tp=2, dp=2, ep=2, etp=2), "none"),
        pytest.param("qwen2", Layout(pp=2, dp=2), "full", marks=pytest.mark.nightly),
        pytest.param("qwen2_moe", Layout(tp=2, cp=2, ep=2, etp=1), "none", marks=pytest.mark.nightly),
        pytest.param("glm4_moe", Layout(pp=2, dp=2, ep=2), "none", marks=pytest.mark.nightly),
    ],
    ids=str,
)
def test_a_world_with_adapters_equals_one_process(
    tmp_path: Path, world: ReplicaPlace, kind: str, layout: Layout, recompute: str
) -> None:
    make_model(kind, tmp_path / "model")
    # The first stage of one kind is dense: it has no adapter.
    assert_equals_one_process(
        tmp_path, world, layout, recompute=recompute, run=adapted(targets=("experts",) if kind == "glm4_moe" else ())
    )


@pytest.mark.engine
@pytest.mark.nightly
def test_replicas_merge_the_adapters_of_the_core(tmp_path: Path, world: ReplicaPlace) -> None:
    make_model("qwen3", tmp_path / "model")
    run = Run(tmp_path, tmp_path / "model", Layout(dp=2), settings=adapted())
    replica = run.replica("elastic")
    want, final = fixed_run(tmp_path / "model", world, 4, settings=adapted())
    for one in (run.core, replica):
        one.ready()
    reports = []
    for step in range(1, 5):
        # It comes, rests, and comes back to other weights.
        run.form(*[replica] if step in (2, 4) else [])
        if step == 3:
            replica.ask(Standby(), Freed)
        reports.append(run.step(step))
    for got, reference in zip(reports, want, strict=True):
        assert_same_step(got, reference, 2e-6)
    assert_same_state(run.core.tensors(4), final)
    assert run.core.close() + replica.close() == [0, 0, 0]
