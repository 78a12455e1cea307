"""Carriers write the policy of a checkpoint: the weights of its version, while newer ones pass."""

from __future__ import annotations

import zlib
from pathlib import Path

from libra_hpc.protocol.carriers import ImageHere, PolicySaved, Publish, SavePolicy
from libra_hpc.weights.image import IMAGE_FILE
from tests.weights.chain import WRITER, Chain, here, passed


def test_a_checkpoint_gets_the_weights_of_its_version_while_newer_ones_pass(chain: Chain, tmp_path: Path) -> None:
    """The order comes while its version has yet to arrive; several newer ones are already published behind it."""
    node, expected = chain.nodes[1], tmp_path / "expected.safetensors"
    chain.link(1, 0, bytes_per_s=16e6)
    path = tmp_path / "step-000002" / "policy" / "model.safetensors"
    chain.keep_all()
    node.send(SavePolicy(2, str(path)))
    for version in range(6):
        chain.write(version, version - 1)
    saved = node.wait(PolicySaved)
    node.wait(ImageHere, here(5))

    alone = chain.node(9)
    for version in range(3):
        chain.write(version, version - 1, folder=alone.folder)
        alone.send(Publish(version, version - 1, ((WRITER, 9),), (alone.peer,)))
    alone.wait(ImageHere, here(2))
    expected.write_bytes((alone.folder / IMAGE_FILE).read_bytes())

    data = path.read_bytes()
    assert data == expected.read_bytes()
    assert data != (node.folder / IMAGE_FILE).read_bytes()
    assert (saved.path, saved.size, saved.crc32, saved.reason) == (str(path), len(data), zlib.crc32(data), "")
    assert [message.version for message in node.all(ImageHere)] == list(range(6))


def test_the_version_of_a_checkpoint_does_not_give_way_to_newer_ones(chain: Chain, tmp_path: Path) -> None:
    node = chain.nodes[1]
    link = chain.link(1, 0, bytes_per_s=16e6)
    chain.write(0, -1)
    passed(link, 1_000_000)
    chain.keep_all()
    node.send(SavePolicy(2, str(tmp_path / "model.safetensors")))
    for version in range(1, 5):
        chain.write(version, -1)
    node.wait(ImageHere, here(4))
    assert node.wait(PolicySaved).reason == ""
    assert [message.version for message in node.all(ImageHere)] == [0, 2, 4]


def test_a_version_that_has_passed_and_one_that_is_not_needed_any_more_are_answered(
    chain: Chain, tmp_path: Path
) -> None:
    node, path = chain.nodes[0], tmp_path / "model.safetensors"
    node.send(SavePolicy(7, f"{path}.7"))
    node.send(SavePolicy(-1, ""))
    chain.write(0, -1)
    chain.write(1, 0)
    node.wait(ImageHere, here(1))
    node.send(SavePolicy(0, str(path)))
    reasons = {
        answer.path: answer.reason
        for answer in (
            node.wait(PolicySaved, lambda answer: answer.path == f"{path}.7"),
            node.wait(PolicySaved, lambda answer: answer.path == str(path)),
        )
    }
    assert "not needed any more" in reasons[f"{path}.7"]
    assert "has version 1, not 0" in reasons[str(path)]
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_is_named_and_the_image_goes_on(chain: Chain, tmp_path: Path) -> None:
    node = chain.nodes[0]
    (tmp_path / "file").write_text("no folder")
    chain.write(0, -1)
    node.send(SavePolicy(0, str(tmp_path / "file" / "model.safetensors")))
    assert str(tmp_path / "file") in node.wait(PolicySaved).reason
    chain.write(1, 0)
    node.wait(ImageHere, here(1))
