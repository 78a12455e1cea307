"""The node's image: what it holds after updates, a killed writer, damaged offers; what a reader may rely on."""

from __future__ import annotations

import errno
import fcntl
import functools
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from libra_hpc.weights import image as module
from libra_hpc.weights.delta import marked
from libra_hpc.weights.image import IMAGE_FILE, Image, pin, reading, write_pinned
from libra_hpc.weights.pieces import WHOLE, Encoded, Offer, TensorBlock, offer_path, payload_path, write_offer
from libra_hpc.weights.weightfile import WeightFileError, file_shapes

SHAPES = {"a.weight": (6, 8), "b.weight": (5,), "c.weight": (16, 4)}
Offers = list[tuple[Offer, bytes]]
Values = dict[str, np.ndarray]


def dense(tensor: str, offset: int, values: np.ndarray, stride: int = 0) -> Encoded:
    """All of a block with these values."""
    rows, cols = values.shape if values.ndim == 2 else (1, values.size)
    block = TensorBlock(tensor, offset, rows, cols, stride or cols)
    kind = "F32" if values.dtype == np.int32 else "BF16"
    return Encoded(block, kind, "dense", values.size, (np.ascontiguousarray(values),))


def whole(folder: Path, version: int, values: Values, base: int = WHOLE) -> Offers:
    """A version of two writers: one has the left columns of ``a``, the other all else."""
    a, b, c = values.values()
    left = [dense("a.weight", 0, a[:, :3], 8)]
    right = [dense("a.weight", 3, a[:, 3:], 8), dense("b.weight", 0, b), dense("c.weight", 0, c)]
    return [offer(folder, version, base, "t0.0", left), offer(folder, version, base, "t0.1", right)]


def offer(folder: Path, version: int, base: int, writer: str, encoded: list[Encoded]) -> tuple[Offer, bytes]:
    made = write_offer(folder, version, base, writer, encoded)
    return made, payload_path(offer_path(folder, version, writer)).read_bytes()


def random_values(seed: int) -> Values:
    rng = np.random.default_rng(seed)
    return {name: rng.integers(1, 2**30, shape).astype(np.int32) for name, shape in SHAPES.items()}


def held(path: Path) -> Values:
    return {name: tensor.view(np.int32) for name, tensor in load_file(path).items()}


def assert_holds(path: Path, version: int, values: Values) -> None:
    with reading(path) as found:
        assert found == version
        image = held(path)
    assert image.keys() == values.keys()
    for name, expected in values.items():
        np.testing.assert_array_equal(image[name], expected)


def in_child(work: Callable[[], None]) -> int:
    """Run in a forked process; its wait status."""
    if not (pid := os.fork()):
        try:
            work()
            os._exit(0)
        except BaseException:
            os._exit(9)
    return os.waitpid(pid, 0)[1]


@pytest.fixture
def image(tmp_path: Path) -> Image:
    return Image(tmp_path, SHAPES, "F32")


def test_it_is_a_safetensors_file_of_the_model_and_has_no_version_at_first(image: Image) -> None:
    assert file_shapes(image.path) == SHAPES
    assert image.version == -1
    with pytest.raises(WeightFileError, match="no whole version"), reading(image.path):
        pass


def test_any_piece_overwrites_its_elements_alone_and_a_forged_one_leaves_no_version(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    shapes = {"a.weight": (40, 300)}
    image = Image(tmp_path, shapes, "BF16")
    expected = rng.integers(-99, 99, 40 * 300).astype(np.int16)
    image.apply(0, [offer(tmp_path, 0, WHOLE, "t0.0", [dense("a.weight", 0, expected)])])
    for version in range(1, 13):
        rows, cols = int(rng.integers(1, 30)), int(rng.integers(1, 200))
        block = TensorBlock("a.weight", int(rng.integers(0, 100)), rows, cols, 300)
        changed = rng.random(rows * cols) < rng.choice([0.01, 0.3, 0.95])
        changed[0] = True
        index = np.flatnonzero(changed)
        values = rng.integers(-99, 99, len(index)).astype(np.int16)
        piece = marked(block, "BF16", np.packbits(changed, bitorder="little"), values)
        image.apply(version, [offer(tmp_path, version, version - 1, "t0.0", [piece])])
        expected[block.offset + index // cols * 300 + index % cols] = values
        np.testing.assert_array_equal(np.frombuffer(image.path.read_bytes()[image.offset :], np.int16), expected)
    # Its sizes and its checksum are right, and its second value would lie behind the block.
    beyond = Encoded(TensorBlock("a.weight", 0, 2, 2, 300), "BF16", "gap8", 2, (np.ones(2, np.int16), np.uint8([3, 0])))
    with pytest.raises(WeightFileError, match="outside of its block"):
        image.apply(version + 1, [offer(tmp_path, version + 1, version, "t0.0", [beyond])])
    with pytest.raises(WeightFileError, match="no whole version"), reading(image.path):
        pass
    image.apply(version + 2, [offer(tmp_path, version + 2, WHOLE, "t0.0", [dense("a.weight", 0, expected)])])
    with reading(image.path) as found:
        assert found == version + 2


def test_a_piece_behind_one_of_an_odd_number_of_bytes(tmp_path: Path) -> None:
    image = Image(tmp_path, {"a.weight": (1000,)}, "BF16")
    expected = np.zeros(1000, np.int16)
    image.apply(0, [offer(tmp_path, 0, WHOLE, "t0.0", [dense("a.weight", 0, expected)])])
    expected[[0, 500]] = 7
    blocks = (TensorBlock("a.weight", offset, 1, 500, 1000) for offset in (0, 500))
    made = offer(tmp_path, 1, 0, "t0.0", [marked(one, "BF16", np.uint8([1]), np.int16([7])) for one in blocks])
    assert made[0].pieces[0].size % 2
    image.apply(1, [made])
    np.testing.assert_array_equal(np.frombuffer(image.path.read_bytes()[image.offset :], np.int16), expected)


def test_a_writer_killed_at_any_piece_leaves_no_mixture_and_the_next_one_ends_its_work(tmp_path: Path) -> None:
    image = Image(tmp_path, SHAPES, "F32")
    image.apply(0, whole(tmp_path, 0, random_values(0)))
    pieces = 4
    for point in range(2 * pieces):
        version = point + 1
        values = random_values(version)
        offers = whole(tmp_path, version, values, base=version - 1)
        status = in_child(functools.partial(die_at, tmp_path, offers, point))
        assert os.WTERMSIG(status) == signal.SIGKILL
        with pytest.raises(WeightFileError, match="no whole version"), reading(image.path):
            pass
        rest = Image(tmp_path, SHAPES, "F32")
        with pytest.raises(WeightFileError, match=f"part of {version}"):
            rest.apply(version + 1, [offer(tmp_path, version + 1, version - 1, "t0.0", [])])
        rest.apply(version, offers)
        assert_holds(rest.path, version, values)


def die_at(folder: Path, offers: Offers, point: int) -> None:
    """Apply offers, and end at the beginning (even) or in the middle (odd) of a piece."""
    image = Image(folder, SHAPES, "F32")
    write, count = image._write, iter(range(1000))

    def dying(piece: object, payload: object) -> None:
        if next(count) == point // 2:
            if point % 2:
                block = piece.block  # type: ignore[attr-defined]
                half = image._places[block.tensor] // 4 + block.offset
                np.frombuffer(image._memory, np.int32, offset=image.offset)[half : half + block.cols // 2 + 1] = -1
            os.kill(os.getpid(), signal.SIGKILL)
        write(piece, payload)  # type: ignore[arg-type]

    image._write = dying  # type: ignore[method-assign, assignment]
    image.apply(offers[0][0].version, offers)


def test_blocks_of_several_versions_are_none_until_the_changes_up_to_the_newest_have_come(tmp_path: Path) -> None:
    values = [random_values(version) for version in range(4)]
    flat = [np.concatenate([tensor.reshape(-1) for tensor in one.values()]) for one in values]
    blocks = np.where(np.arange(len(flat[0])) % 3, flat[1], flat[3])
    image = Image(tmp_path, SHAPES, "F32")
    image.apply(0, whole(tmp_path, 0, values[0]))
    image.fill(1, 3, memoryview(blocks).cast("B"))
    for version in (2, 3):
        assert image.version == version - 1
        assert image.block(0, 4) is None
        with pytest.raises(WeightFileError, match="no whole version"), reading(image.path):
            pass
        with pytest.raises(WeightFileError, match=f"it has a part of 3, and version 4 changes {version - 1}"):
            image.apply(4, [offer(tmp_path, 4, version - 1, "t0.0", [])])
        image = Image(tmp_path, SHAPES, "F32")
        image.apply(version, whole(tmp_path, version, values[version], base=version - 1))
    assert_holds(image.path, 3, values[3])
    assert image.block(4, 12) == (3, flat[3][1:3].tobytes())


def test_a_writer_waits_for_readers_and_the_kernel_frees_the_lease_of_a_dead_one(image: Image, tmp_path: Path) -> None:
    image.apply(0, whole(tmp_path, 0, random_values(0)))
    with reading(image.path), image.path.open("rb") as file, pytest.raises(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def hold_and_die() -> None:
        with reading(image.path):
            os.kill(os.getpid(), signal.SIGKILL)

    assert os.WTERMSIG(in_child(hold_and_die)) == signal.SIGKILL
    values = random_values(1)
    image.apply(1, whole(tmp_path, 1, values))
    assert_holds(image.path, 1, values)


def test_who_is_killed_while_it_writes_a_copy_leaves_no_file_of_its_name(
    image: Image, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "COPY_BYTES", 16)
    image.apply(0, whole(tmp_path, 0, random_values(0)))
    target, before = tmp_path / "policy" / "model.safetensors", {path.name for path in tmp_path.iterdir()}

    def die() -> None:
        _, copy = pin(image.path)
        parts = module._parts

        def some(pages: memoryview) -> Iterator[memoryview]:
            for number, part in enumerate(parts(pages)):
                if number == 3:
                    os.kill(os.getpid(), signal.SIGKILL)
                yield part

        monkeypatch.setattr(module, "_parts", some)
        write_pinned(copy, target)

    assert os.WTERMSIG(in_child(die)) == signal.SIGKILL
    assert not target.exists()
    assert {path.name for path in tmp_path.iterdir()} == before | {"policy"}, "its copy is gone, too"
    _, copy = pin(image.path)
    with copy:
        write_pinned(copy, target)
    assert target.read_bytes() == image.path.read_bytes()
    assert [path.name for path in target.parent.iterdir()] == ["model.safetensors"]


def test_offers_of_another_base_model_type_or_number_of_owners_change_nothing(image: Image, tmp_path: Path) -> None:
    old = random_values(0)
    image.apply(0, whole(tmp_path, 0, old))
    one = np.ones(1, np.int32)
    absent, beyond = dense("x.weight", 0, one), dense("b.weight", 5, one)
    half = dense("b.weight", 0, one.view(np.int16))
    for encoded, says in ((absent, "no tensor of the model"), (beyond, "ends at element 6"), (half, "BF16")):
        with pytest.raises(WeightFileError, match=says):
            image.apply(1, [offer(tmp_path, 1, 0, "t0.0", [encoded])])
    with pytest.raises(WeightFileError, match="it has 0, and version 6 changes 5"):
        image.apply(6, [offer(tmp_path, 6, 5, "t0.0", [])])
    with pytest.raises(WeightFileError, match="72 bytes"):
        image.apply(1, whole(tmp_path, 1, random_values(1))[:1])
    assert_holds(image.path, 0, old)


def test_the_image_of_another_model_is_refused_and_kept(image: Image, tmp_path: Path) -> None:
    image.apply(0, whole(tmp_path, 0, random_values(0)))
    with pytest.raises(WeightFileError, match="another model"):
        Image(tmp_path, {**SHAPES, "b.weight": (6,)}, "F32")
    assert_holds(tmp_path / IMAGE_FILE, 0, random_values(0))


def test_no_room_is_one_sentence_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(WeightFileError, match=r"no image of [\d,]+ bytes \(.*No space left on device"):
        Image(tmp_path, SHAPES, "F32")
    assert list(tmp_path.iterdir()) == []
