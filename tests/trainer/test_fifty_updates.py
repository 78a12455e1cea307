"""Fifty versions from the trainer's cast to the engines' parameters, for every family and a sample of layouts.

A layout is a leg: trainers of one layout own the weights, then those of the next.  Legs are chosen so that every two
values of family, tied, TP, PP, DP, EP and ETP that occur together in any layout do so in a leg.  Engines with TP 1, 2
and 4 read the image of every leg.  No Megatron: `from_hf` cuts the parameters as its models do.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from libra_hpc.models.architecture import Architecture
from libra_hpc.models.supported import FAMILIES, in_float32
from libra_hpc.models.tensors import hf_shapes
from libra_hpc.trainer.saved.optimizer_state import Shard
from libra_hpc.trainer.saved.weight_changes import ShardWeights, WeightChanges
from libra_hpc.trainer.saved.weight_offers import WeightOffers
from libra_hpc.weights.blocks import engine_slices
from libra_hpc.weights.image import Image, reading
from libra_hpc.weights.names import ReplicaPlace, from_hf, own_entries
from libra_hpc.weights.pieces import WHOLE, offer_path, payload_path
from tests.weights.nodes import node_folders
from tests.weights.test_blocks import KINDS, architecture, engine_parameters, moved, ranks

pytestmark = pytest.mark.slow

OFTEN = ("glm4_moe", "gpt_oss", "qwen3", "qwen3_next")
"""Families of each change: dense, with experts and tensors in float32, with stacked experts, with states."""

UPDATES = 50
WORLDS = [
    ReplicaPlace(tp=tp, tp_rank=0, pp=pp, pp_rank=0, dp=dp, ep=ep, etp=etp)
    for tp, pp, dp, ep, etp in itertools.product((1, 2, 4), (1, 2, 3), (1, 2, 3), (1, 2), (1, 2))
    if tp * dp % (ep * etp) == 0
]
"""Three layers: two stages are uneven."""
Pairs = set[tuple[tuple[str, object], ...]]
Weights = dict[str, torch.Tensor]


def worlds(family: str) -> list[ReplicaPlace]:
    kind = FAMILIES[family]
    found = [world for world in WORLDS if kind.experts or world.ep == world.etp == 1]
    return [world for world in found if world.etp == 1 or not kind.stacked_experts]


def pairs(kind: tuple[str, bool], world: ReplicaPlace) -> Pairs:
    degrees = {name: getattr(world, name) for name in ("tp", "pp", "dp", "ep", "etp")}
    return set(itertools.combinations({"family": kind[0], "tied": kind[1], **degrees}.items(), 2))


def legs() -> dict[tuple[str, bool], list[ReplicaPlace]]:
    """By kind of model: the layouts that bring most pairs that no leg has yet, until there is none to bring."""
    chosen: dict[tuple[str, bool], list[ReplicaPlace]] = {kind: [] for kind in KINDS}
    missing = set().union(*(pairs(kind, world) for kind in KINDS for world in worlds(kind[0])))
    while missing:
        # Kinds with few legs first, so that all have about as many.
        options = [
            (kind, world) for kind in sorted(KINDS, key=lambda kind: len(chosen[kind])) for world in worlds(kind[0])
        ]
        kind, world = max(options, key=lambda option: len(missing & pairs(*option)))
        chosen[kind].append(world)
        missing -= pairs(kind, world)
    return chosen


LEGS = legs()


def kind_of(name: str) -> torch.dtype:
    return torch.float32 if in_float32(name) else torch.bfloat16


def cut(count: int, parts: int, part: int) -> tuple[int, int]:
    """Cuts at any element, as Megatron-Core's optimizer cuts the flat weights of a rank."""
    return count * part // parts, count * (part + 1) // parts


class Process:
    """One rank: its parameters, what its optimizer owns of them, and its offers."""

    def __init__(self, shape: Architecture, place: ReplicaPlace, number: int, masters: Weights) -> None:
        self._shape, self._place = shape, place
        self._entries = own_entries(shape, place)
        parameters = {
            name: torch.nn.Parameter(self._part(name, masters).to(kind_of(entry.hf[0])))
            for name, entry in self._entries.items()
        }
        self._shards = self._owned(parameters)
        self._optimizer = SimpleNamespace()
        changes = WeightChanges()
        cast = {
            name: ShardWeights(parameters[name], shard.begin, shard.end, shard.master)
            for name, shard in self._shards.items()
        }
        changes.record(self._optimizer, cast)
        spans = {name: (shard.begin, shard.end) for name, shard in self._shards.items()}
        spans |= {
            name: cut(parameter.numel(), place.copies, place.copy_rank)
            for name, parameter in parameters.items()
            if parameter.dtype is torch.float32
        }
        state = SimpleNamespace(shards=self._shards, spans=spans, parameters=parameters, changes=changes)
        engine = SimpleNamespace(shape=shape, split=place, state=state, device=torch.device("cpu"))
        self._offers = WeightOffers(engine, number)  # type: ignore[arg-type]
        self.writer = f"t{number}"

    def _part(self, name: str, masters: Weights) -> torch.Tensor:
        return from_hf(self._entries[name], masters.__getitem__, self._shape, self._place)

    def _owned(self, parameters: dict[str, torch.nn.Parameter]) -> dict[str, Shard]:
        """Dense parameters and experts each as one flat buffer, cut over the processes with equal ones."""
        found, place = {}, self._place
        for dense in (True, False):
            names = [
                name
                for name, one in parameters.items()
                if one.dtype is torch.bfloat16 and (self._entries[name].expert is None) == dense
            ]
            copies = (place.copies, place.copy_rank) if dense else (place.expert_copies, place.expert_copy_rank)
            low, high = cut(sum(parameters[name].numel() for name in names), *copies)
            at = 0
            for name in names:
                size = parameters[name].numel()
                begin, end = max(low - at, 0), min(high - at, size)
                if begin < end:
                    master = parameters[name].data.float().view(-1)[begin:end].clone()
                    found[name] = Shard(begin, end, master, master, master)
                at += size
        return found

    def update(self, masters: Weights, tensors: set[str]) -> None:
        """The optimizer's step: masters of these tensors are others, and all are cast."""
        for name, shard in self._shards.items():
            if tensors.intersection(self._entries[name].hf):
                shard.master.copy_(self._part(name, masters).reshape(-1)[shard.begin : shard.end])
        self._optimizer._copy_main_params_to_model_params()

    def offer(self, folder: Path, version: int, base: int) -> tuple[Any, Path]:
        offer = self._offers.write(folder, version, base)
        return offer, payload_path(offer_path(folder, version, self.writer))


class Run:
    """Trainers of one layout after the other, and the image of a node that gets their versions."""

    def __init__(self, folder: Path, shape: Architecture, seed: int) -> None:
        self.folder, self.shape = folder, shape
        self._draw, self._noise = random.Random(seed), torch.Generator().manual_seed(seed)
        self.masters = {
            name: torch.randn(size, generator=self._noise) * 0.02 for name, size in hf_shapes(shape).items()
        }
        self._image = Image(folder, hf_shapes(shape), "BF16")
        self._older: list[Weights] = []
        self.version = self._base = WHOLE
        self.encodings: set[str] = set()

    def move(self, world: ReplicaPlace) -> None:
        """Others own the weights from now on, and another writer has the image."""
        self.processes = [Process(self.shape, place, i, self.masters) for i, place in enumerate(ranks(world))]
        self._image = Image(self.folder, hf_shapes(self.shape), "BF16")
        self._base = WHOLE

    def train(self) -> None:
        """Another version, of one update or several; now and then of an older state."""
        if self._older and self._draw.random() < 0.15:
            self._cast(self._draw.choice(self._older), set(self.masters))
        for _ in range(self._draw.choice((1, 1, 1, 2, 3))):
            self._cast(*self._changed())
        self._older = [*self._older[-3:], self.masters]

    def _changed(self) -> tuple[Weights, set[str]]:
        share, scale = self._draw.choice(((0.002, 1.0), (0.05, 1e-2), (0.4, 1e-4), (1.0, 1e-4), (1.0, 1.0)))
        names = self._draw.sample(
            [name for name in sorted(self.masters) if not in_float32(name)], max(1, len(self.masters) // 3)
        )
        changed = dict(self.masters)
        for name in names:
            mask = torch.rand(changed[name].shape, generator=self._noise) < share
            changed[name] = changed[name] + mask * scale * torch.randn(mask.shape, generator=self._noise)
        return changed, set(names)

    def _cast(self, masters: Weights, tensors: set[str]) -> None:
        self.masters = masters
        for process in self.processes:
            process.update(masters, tensors)

    def publish(self) -> None:
        self.version += 1
        offers = [process.offer(self.folder, self.version, self._base) for process in self.processes]
        self.encodings |= {piece.encoding for offer, _ in offers for piece in offer.pieces}
        assert {offer.base for offer, _ in offers} == {self._base}
        self._image.apply(self.version, [(offer, payload.read_bytes()) for offer, payload in offers])
        self._base = self.version
        for offer, payload in offers:
            payload.unlink()
            offer_path(self.folder, self.version, offer.writer).unlink()

    def held(self) -> Weights:
        with reading(self._image.path) as version:
            assert version == self.version
            return load_file(self._image.path)


def engines(shape: Architecture, image: Weights) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Parameters of every rank of engines: name, as vLLM would load it, and from the image by the map."""
    whole = {
        name: tensor.view(torch.int16 if tensor.itemsize == 2 else torch.int32).long() for name, tensor in image.items()
    }
    for tp in (1, 2, 4):
        for rank in range(tp):
            expected = engine_parameters(shape, whole, tp, rank)
            found = {name: torch.zeros(tensor.numel(), dtype=torch.long) for name, tensor in expected.items()}
            for tensor, slices in engine_slices(shape, tp, rank).items():
                for one in slices:
                    moved(one, whole[tensor], found[one.parameter])
            for name, tensor in expected.items():
                yield f"{name}, TP {tp}, rank {rank}", tensor, found[name].view(tensor.shape)


@pytest.mark.parametrize(
    ("family", "tied"), [one if one[0] in OFTEN else pytest.param(*one, marks=pytest.mark.nightly) for one in KINDS]
)
def test_engines_have_the_trainers_bits_after_fifty_updates_and_moved_writers(family: str, tied: bool) -> None:
    with node_folders() as folder:
        _fifty_updates(Run(folder, architecture(family, tied), seed=KINDS.index((family, tied))), LEGS[family, tied])


def _fifty_updates(run: Run, route: list[ReplicaPlace]) -> None:
    starts = {UPDATES * number // len(route): world for number, world in enumerate(route)}
    for update in range(UPDATES):
        if update in starts:
            run.move(starts[update])
        run.train()
        run.publish()
        held = run.held()
        for name, master in run.masters.items():
            assert torch.equal(held[name].view(torch.uint8), master.to(kind_of(name)).view(torch.uint8)), (update, name)
        if update + 1 in (*starts, UPDATES):
            for what, expected, found in engines(run.shape, held):
                assert torch.equal(found, expected), what
    assert run.encodings >= {"gap8", "bitmap", "dense"}


def test_the_legs_have_every_pair_of_the_whole_product() -> None:
    had = set().union(*(pairs(kind, world) for kind, route in LEGS.items() for world in route))
    assert had == set().union(*(pairs(kind, world) for kind in KINDS for world in worlds(kind[0])))
    assert {world for route in LEGS.values() for world in route} <= set(WORLDS)
