"""The offers of all processes of a trainer, applied to the weights of before, are its weights, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from libra_hpc.config.learn import OptimizerSection
from libra_hpc.models.supported import in_float32
from libra_hpc.protocol.trainer import Offered, OfferFailed, OfferWeights, Saved, SaveStarted, SaveState
from libra_hpc.trainer import device
from libra_hpc.trainer.grpo_trainer import GrpoTrainer
from libra_hpc.trainer.saved import checkpoint, weight_offers
from libra_hpc.trainer.saved.shard_files import snapshot_pieces
from libra_hpc.trainer.saved.weight_offers import WeightOffers
from libra_hpc.trainer.train_engine import TrainEngine
from libra_hpc.weights import pieces
from libra_hpc.weights.delta import piece_values
from libra_hpc.weights.names import ReplicaPlace
from libra_hpc.weights.pieces import WHOLE, Offer, offer_path, payload_path, read_offer

from .batches import train_step
from .settings import optimizer
from .support import ALGORITHM, Layout, Replica, build, join_all, make_model, read_state_tensors, step_all

Bits = dict[str, np.ndarray[Any, Any]]
SMALL_STEPS = optimizer(lr=2e-5, weight_decay=0.0)
"""So that few weights change."""


def weights(path: Path) -> Bits:
    """The bits of a safetensors file."""
    tensors = load_file(path)
    kinds = {torch.bfloat16: torch.int16, torch.float32: torch.int32}
    return {name: tensor.view(kinds[tensor.dtype]).numpy().copy() for name, tensor in tensors.items()}


def apply(offers: list[Path], onto: Bits) -> list[Offer]:
    """Overwrite what the offers hold; no element twice."""
    touched = {name: np.zeros(tensor.size, np.int8) for name, tensor in onto.items()}
    found = [read_offer(path) for path in offers]
    for path, offer in zip(offers, found, strict=True):
        payload = payload_path(path).read_bytes()
        for piece in offer.pieces:
            index, values = piece_values(piece, payload)
            _, offset, rows, cols, stride = piece.block
            own = np.arange(rows * cols) if index is None else index
            places = offset + own // cols * stride + own % cols
            onto[piece.block.tensor].reshape(-1)[places] = values
            touched[piece.block.tensor][places] += 1
    assert all((tensor <= 1).all() for tensor in touched.values())
    return found


def equal(one: Bits, other: Bits) -> bool:
    return one.keys() == other.keys() and all((one[name] == other[name]).all() for name in one)


class Offering:
    """A trainer in this process, and what a node has that got all of its offers."""

    def __init__(
        self,
        base: Path,
        world: ReplicaPlace,
        dtype: torch.dtype = torch.bfloat16,
        settings: OptimizerSection = SMALL_STEPS,
        rank: int = 0,
        kind: str = "qwen3",
    ) -> None:
        """``rank``: of adapters."""
        make_model(kind, base / "model")
        self.base, self.node = base, {}
        self.engine: TrainEngine
        self.trainer: GrpoTrainer
        self.engine, self.trainer = build(
            base / "model", world, dtype, settings, ALGORITHM.changed(lora={"rank": rank})
        )
        self.offers = WeightOffers(self.engine, 0)
        self.published = WHOLE

    def train(self, steps: int = 1, minibatches: int = 2) -> None:
        for _ in range(steps):
            self.trainer.step(train_step(self.engine.state.step + 1, 0, minibatches=minibatches))

    def publish(self, version: int) -> Offer:
        """Offer the present weights; they are applied and compared."""
        self.offers.write(self.base, version, self.published)
        self.published = version
        checkpoint.write_policy(self.engine, self.base / "model", self.base / "whole")
        whole = weights(self.base / "whole" / "model.safetensors")
        self.node = self.node or {name: np.zeros_like(tensor) for name, tensor in whole.items()}
        (offer,) = apply([offer_path(self.base, version, "t0")], self.node)
        assert equal(self.node, whole)
        return offer


@pytest.mark.parametrize(
    ("kind", "rank", "updates"),
    [("qwen3", 4, 4), ("glm4_moe", 0, 4), ("glm4_moe", 4, 4), pytest.param("qwen3", 0, 50, marks=pytest.mark.slow)],
)
def test_each_version_has_what_changed_since_the_one_before(
    tmp_path: Path, world: ReplicaPlace, kind: str, rank: int, updates: int
) -> None:
    run = Offering(tmp_path, world, rank=rank, kind=kind)
    assert run.publish(0).base == WHOLE
    for version in range(1, updates + 1):
        run.train()
        offer = run.publish(version)
        assert offer.base == version - 1
        assert "gap8" in {piece.encoding for piece in offer.pieces}
        assert {piece.dtype for piece in offer.pieces} == {"BF16"}, "what is in float32 never changes"
    assert run.publish(updates + 1).pieces == (), "nothing changed"


@pytest.fixture
def offering(tmp_path: Path, world: ReplicaPlace) -> Offering:
    """One that has published its first weights."""
    made = Offering(tmp_path, world)
    made.publish(0)
    return made


def test_a_version_that_was_not_offered_is_in_the_next(offering: Offering) -> None:
    offering.train(3)
    assert offering.publish(3).base == 0


def test_an_offer_that_could_not_be_written_is_in_the_next(offering: Offering, tmp_path: Path) -> None:
    offering.train()
    with pytest.raises(OSError, match="No such file"):
        offering.offers.write(tmp_path / "absent", 1, 0)
    offering.train()
    assert offering.publish(2).base == 0


def test_a_step_that_is_done_again_after_it_was_offered(offering: Offering) -> None:
    before = offering.engine.state.capture()
    offering.train()
    offering.publish(1)
    offering.engine.state.restore(before)
    assert offering.publish(2).base == 1, "the weights of version 0 again"
    offering.train(2, minibatches=1)
    offering.publish(3)


def test_a_state_that_is_loaded_after_an_offer(offering: Offering, tmp_path: Path) -> None:
    offering.train()
    saved = {name: piece.clone() for name, piece in snapshot_pieces(offering.engine.state).items()}
    offering.train()
    offering.publish(2)
    for name, piece in snapshot_pieces(offering.engine.state).items():
        piece.copy_(saved[name])
    offering.engine.state.refresh()
    assert offering.publish(3).base == 2
    checkpoint.load_policy(offering.engine, tmp_path / "model")
    assert offering.publish(4).base == WHOLE, "these weights were not cast from masters"


def test_another_base_than_the_last_version_gets_whole_tensors(offering: Offering, tmp_path: Path) -> None:
    offering.train()
    offering.published = -1
    assert offering.publish(1).base == WHOLE
    offering.train()
    offering.offers.write(tmp_path, 2, 0)
    assert read_offer(offer_path(tmp_path, 2, "t0")).base == WHOLE


def test_float32_is_whole(tmp_path: Path, world: ReplicaPlace) -> None:
    run = Offering(tmp_path, world, torch.float32)
    for version in range(2):
        assert {piece.encoding for piece in run.publish(version).pieces} == {"dense"}
        run.train()


def test_whole_tensors_come_through_two_buffers_and_are_written_in_parts(
    tmp_path: Path, world: ReplicaPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (device, weight_offers):
        monkeypatch.setattr(module, "STAGE_BYTES", 1000)
    monkeypatch.setattr(pieces, "PART_BYTES", 96)
    run = Offering(tmp_path, world)
    run.offers._to_host = device.HostStage(torch.device("cpu")).through
    assert {piece.encoding for piece in run.publish(0).pieces} == {"dense"}


def test_the_cast_is_that_of_megatron(offering: Offering) -> None:
    """Also where a rounding is a tie, and for values that are no numbers."""
    state = offering.engine.state
    for shard in state.shards.values():
        drawn = torch.randint(-(2**31), 2**31 - 1, shard.master.shape, dtype=torch.int32) & ~0x7FFF
        shard.master.data.copy_(drawn.view(torch.float32))
    state.refresh()
    for name, shard in state.shards.items():
        found = state.parameters[name].data.view(-1)[shard.begin : shard.end]
        assert torch.equal(found.view(torch.int16), shard.master.data.to(torch.bfloat16).view(torch.int16)), name
    offering.publish(1)


@pytest.mark.engine
@pytest.mark.parametrize(
    ("kind", "keys", "layout"),
    [
        pytest.param("phi3", {}, Layout(tp=2), marks=pytest.mark.nightly),
        pytest.param("qwen2", {"tied": True, "layers": 3}, Layout(pp=2, dp=2), marks=pytest.mark.nightly),
        ("glm4_moe", {}, Layout(dp=2, ep=2)),
        pytest.param("qwen3_moe", {}, Layout(dp=2, ep=2), marks=pytest.mark.nightly),
        pytest.param("qwen3", {}, Layout(dp=2), marks=pytest.mark.nightly),
        pytest.param("glm4", {"num_key_value_heads": 1}, Layout(tp=2, dp=2), marks=pytest.mark.nightly),
        pytest.param("qwen3_moe", {}, Layout(tp=2, dp=2, ep=2, etp=2), marks=pytest.mark.nightly),
    ],
    ids=str,
)
def test_a_world_offers_each_element_once(tmp_path: Path, kind: str, keys: dict[str, Any], layout: Layout) -> None:
    make_model(kind, tmp_path / "model", **keys)
    options = {"dtype": "bfloat16", "optimizer": SMALL_STEPS}
    replica = Replica(tmp_path, "core", tmp_path / "model", **layout._asdict(), **options)
    replica.ready()
    join_all([replica], 0, tmp_path / "meet")
    file, node = weights(tmp_path / "model" / "model.safetensors"), Bits()
    for version in range(4):
        if version:
            step_all([replica], version, 0, minibatches=2)
        replica.send(OfferWeights(str(tmp_path), version, version - 1))
        answers = [replica.receive_from(rank) for rank in range(layout.ranks)]
        assert all(isinstance(answer, Offered) and answer.version == version for answer in answers), answers
        folder = tmp_path / f"saved-{version}"
        replica.ask(SaveState(str(folder), version), SaveStarted)
        replica.receive(Saved)
        masters = {
            name.removeprefix("master/"): t for name, t in read_state_tensors(folder).items() if "master/" in name
        }
        held = {name: master.bfloat16().view(torch.int16).numpy() for name, master in masters.items()}
        held |= {name: tensor for name, tensor in file.items() if in_float32(name)}
        node = node or {name: np.zeros_like(tensor) for name, tensor in held.items()}
        offers = apply([offer_path(tmp_path, version, answer.writer) for answer in answers], node)
        assert equal(node, held), version
        assert {offer.base for offer in offers} == {version - 1}
        assert sum(answer.total for answer in answers) == sum(tensor.size for tensor in node.values())
        assert sum(answer.size for answer in answers) == sum(offer.size for offer in offers)
        changed = sum(answer.changed for answer in answers)
        assert changed == sum(tensor.size for tensor in node.values()) if not version else changed > 0
    replica.send(OfferWeights(str(tmp_path / "absent"), 3, 3))
    answers = [replica.receive_from(rank) for rank in range(layout.ranks)]
    assert all(isinstance(answer, OfferFailed) and "absent" in answer.reason for answer in answers)
    replica.send(OfferWeights(str(tmp_path), 9, 3))
    assert "at step 3, it cannot offer step 9" in replica.receive_from(0).reason
    assert replica.close() == [0] * layout.ranks
