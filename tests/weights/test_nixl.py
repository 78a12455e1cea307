"""Weights by NIXL between carrier processes: with a small fake of it, and with the wheel where it is installed."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from libra_hpc.protocol.carriers import (
    CarrierReady,
    Engines,
    ImageHere,
    PieceRefused,
    Stalled,
    VersionHere,
    WeightsByTcp,
)
from libra_hpc.protocol.joining import FIRST_GUEST, guest_secret
from libra_hpc.weights.image import IMAGE_FILE
from libra_hpc.weights.pieces import offer_path, payload_path
from tests.weights.chain import WRITER, Chain, here, wait_until
from tests.weights.nodes import SECRET, node_folders

pytestmark = pytest.mark.slow

FAKE = Path(__file__).parent / "fake_nixl"
WHEEL = pytest.mark.skipif(importlib.util.find_spec("nixl_cu12") is None, reason="needs the extra nixl")
SIZE = 8 << 20
FEW = 100_000
"""Bytes of manifests, proofs and frames; weights are more."""
Nodes = Callable[[int, dict[str, str]], Chain]


def faking(fault: str = "") -> dict[str, str]:
    return {"PYTHONPATH": f"{FAKE}:{os.environ.get('PYTHONPATH', '')}", "FAKE_NIXL": fault}


@pytest.fixture(params=["fake", pytest.param("wheel", marks=WHEEL)])
def environment(request: pytest.FixtureRequest) -> dict[str, str]:
    return faking() if request.param == "fake" else {}


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    with node_folders() as folder, ExitStack() as stack:
        yield lambda count, environment: Chain(stack, folder, count, transport="nixl", environment=environment)


def images(chain: Chain) -> list[bytes]:
    return [(node.folder / IMAGE_FILE).read_bytes() for node in chain.nodes]


def test_whole_tensors_and_changes_come_bit_for_bit_and_not_by_tcp(nodes: Nodes, environment: dict[str, str]) -> None:
    chain = nodes(3, environment)
    links = [chain.link(1, 0), chain.link(2, 1)]
    assert all(node.wait(CarrierReady).by_tcp == "" for node in chain.nodes)
    for version in range(6):
        chain.write(version, version - 1 if version % 2 else -1)
        for node in chain.nodes:
            node.wait(ImageHere, here(version))
            # Files of removed versions are used again, and addresses of others.
            node.send(Engines(version))
    for node in chain.nodes:
        assert [message.version for message in node.all(VersionHere)] == list(range(6))
        assert not node.all(PieceRefused) + node.all(Stalled)
    assert len(set(images(chain))) == 1
    for version in (4, 5):
        assert chain.payload(0, version) == chain.payload(1, version) == chain.payload(2, version)
    assert all(0 < link.passed < FEW for link in links)


def test_a_source_killed_in_mid_read_is_replaced_by_another_node(nodes: Nodes, environment: dict[str, str]) -> None:
    chain = nodes(2, environment)
    chain.nodes.append(receiver := chain.node(2, pull_mb_s=8))
    chain.write(0, -1)
    target = payload_path(offer_path(receiver.folder, 0, WRITER))
    wait_until(lambda: target.exists() and any(np.fromfile(target, np.uint8)[: 1 << 20]))
    chain.nodes[1].kill()
    receiver.wait(VersionHere)
    assert chain.payload(2, 0) == chain.payload(0, 0)
    assert not receiver.all(PieceRefused)


def test_a_flipped_bit_is_refused(nodes: Nodes, environment: dict[str, str]) -> None:
    chain = nodes(1, environment)
    chain.write(0, -1)
    chain.nodes[0].wait(ImageHere)
    payload = np.memmap(payload_path(offer_path(chain.nodes[0].folder, 0, WRITER)), np.uint8, "r+")
    payload[-1] ^= 4
    chain.nodes.append(receiver := chain.node(1))
    link = chain.link(1, 0)
    chain.publish(0, -1, 1)
    assert receiver.wait(PieceRefused).reason == "lm_head.weight has another checksum"
    payload[-1] ^= 4
    receiver.wait(ImageHere)
    assert len(set(images(chain))) == 1
    assert link.passed < FEW


def test_a_guest_gets_no_place_in_memory(nodes: Nodes, environment: dict[str, str]) -> None:
    chain = nodes(1, environment)
    chain.write(0, -1)
    chain.nodes.append(guest := chain.node(FIRST_GUEST, secret=guest_secret(SECRET)))
    link = chain.link(FIRST_GUEST, 0)
    chain.publish(0, -1, FIRST_GUEST)
    guest.wait(ImageHere)
    assert guest.wait(CarrierReady).by_tcp == ""
    assert len(set(images(chain))) == 1
    assert link.passed > SIZE


@pytest.mark.parametrize("fault", ["break:5000000", "hang:5000000"])
def test_after_a_failed_read_tcp_goes_on_at_the_last_byte(nodes: Nodes, fault: str) -> None:
    chain = nodes(2, faking(fault))
    link = chain.link(1, 0)
    chain.write(0, -1)
    chain.nodes[1].wait(ImageHere)
    assert len(set(images(chain))) == 1
    assert SIZE - 5_000_000 < link.passed < SIZE - (4 << 20) + FEW
    (failed,) = chain.nodes[1].all(WeightsByTcp)
    assert failed.peer == 0
    # Of the first stream, not of those beside it.
    assert failed.reason == f"NIXL: a READ {'did not end' if fault.startswith('hang') else 'failed'}"
    assert not chain.nodes[1].all(PieceRefused) + chain.nodes[1].all(Stalled)


@pytest.mark.parametrize("without", [0, 1])
def test_a_node_without_nixl_sends_and_gets_weights_by_tcp(nodes: Nodes, without: int) -> None:
    options: list[dict[str, Any]] = [{}, {}]
    options[without] = {"environment": faking("start")}
    chain = nodes(0, faking())
    chain.nodes += [chain.node(rank, **options[rank]) for rank in (0, 1)]
    assert [node.wait(CarrierReady).by_tcp for node in chain.nodes][without] == "NIXL: NIXL_ERR_BACKEND"
    link = chain.link(1, 0)
    chain.write(0, -1)
    chain.nodes[1].wait(ImageHere)
    assert len(set(images(chain))) == 1
    assert link.passed > SIZE
