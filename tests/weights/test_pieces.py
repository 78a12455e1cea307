"""Offers survive the way through files, and what is torn, forged or foreign is refused by name."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from libra_hpc.checksum import crc32, crc32_combine
from libra_hpc.weights.delta import piece_values
from libra_hpc.weights.pieces import (
    MOST_GAP,
    WHOLE,
    Encoded,
    Offer,
    TensorBlock,
    WeightPiece,
    decode_offer,
    offer_fault,
    offer_path,
    payload_path,
    read_offer,
    write_offer,
)
from libra_hpc.weights.weightfile import WeightFileError

BLOCK = TensorBlock("a.weight", 20, 50, 30, 40)
SHAPES = {"a.weight": (60, 40)}


def gaps(index: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Ascending positions as gaps."""
    before, out = -1, []
    for at in index.tolist():
        times, rest = divmod(at - before - 1, MOST_GAP)
        out += [MOST_GAP] * times + [rest]
        before = at
    return np.array(out, np.uint8)


def dense(values: np.ndarray[Any, Any]) -> Encoded:
    return Encoded(BLOCK, "BF16", "dense", len(values), (values,))


def sparse(index: np.ndarray[Any, Any], values: np.ndarray[Any, Any]) -> Encoded:
    """Written out plainly, as a second opinion on the format."""
    return Encoded(BLOCK, "BF16", "gap8", len(index), (values, gaps(index)))


def an_offer(folder: Path, base: int = 6) -> Offer:
    index = np.array([0, 3, 700, 1499])
    values = np.array([1, -2, 3, -4], np.int16)
    pieces = [dense(np.arange(1500, dtype=np.int16))] if base == WHOLE else [sparse(index, values)] * 3
    return write_offer(folder, 7, base, "t0.1", pieces)


def test_gaps_of_any_length() -> None:
    most = MOST_GAP
    steps = [0, 1, most - 1, most, most + 1, 2 * most, 2 * most - 1, 3 * most + 2]
    for first in steps:
        index = np.cumsum([first] + [step + 1 for step in steps])
        data, count = bytes(2 * len(index)) + gaps(index).tobytes(), int(index[-1]) + 1
        piece = WeightPiece(TensorBlock("t", 0, 1, count, count), "BF16", "gap8", len(index), 0, len(data), crc32(data))
        found, _ = piece_values(piece, data)
        assert (found == index).all()


def test_every_torn_manifest_is_refused(tmp_path: Path) -> None:
    an_offer(tmp_path)
    data = offer_path(tmp_path, 7, "t0.1").read_bytes()
    for end in range(len(data)):
        with pytest.raises(WeightFileError, match="whole manifest"):
            decode_offer(data[:end], "m")


def test_a_payload_that_is_not_whole(tmp_path: Path) -> None:
    an_offer(tmp_path)
    manifest = offer_path(tmp_path, 7, "t0.1")
    payload = payload_path(manifest)
    payload.write_bytes(payload.read_bytes()[:-1])
    with pytest.raises(WeightFileError, match="its payload has"):
        read_offer(manifest)
    payload.unlink()
    with pytest.raises(WeightFileError, match="No such file"):
        read_offer(manifest)


def test_an_offer_under_another_name(tmp_path: Path) -> None:
    an_offer(tmp_path)
    other = offer_path(tmp_path, 8, "t0.1")
    for of in (lambda path: path, payload_path):
        of(offer_path(tmp_path, 7, "t0.1")).rename(of(other))
    with pytest.raises(WeightFileError, match=r"version 7 of t0\.1"):
        read_offer(other)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"block": BLOCK._replace(offset=-1)}, "no block"),
        ({"block": BLOCK._replace(rows=0)}, "no block"),
        ({"block": BLOCK._replace(stride=29)}, "no block"),
        ({"dtype": "F16"}, "not one of BF16, F32"),
        ({"dtype": "F32"}, "should be dense"),
        ({"encoding": "dense"}, "4 values for 1,500 elements"),
        ({"changed": 1501}, "1,501 values"),
        ({"changed": 0}, "0 values"),
        ({"changed": 400}, "cannot have"),
        ({"at": 8}, "begins at byte 8"),
        ({"size": 1 << 40}, "cannot have"),
    ],
)
def test_a_forged_piece_is_refused_by_name(change: dict[str, Any], why: str, tmp_path: Path) -> None:
    offer = an_offer(tmp_path)
    forged = msgspec.structs.replace(offer.pieces[0], **change)
    data = msgspec.msgpack.encode(msgspec.structs.replace(offer, pieces=(forged, *offer.pieces[1:])))
    with pytest.raises(WeightFileError, match=rf"m: a piece of a\.weight .*{why}"):
        decode_offer(data, "m")


@pytest.mark.parametrize("change", [{"base": 7}, {"base": -2}, {"writer": "../x"}, {"size": 3}, {"base": WHOLE}])
def test_a_forged_offer_is_refused(change: dict[str, Any], tmp_path: Path) -> None:
    data = msgspec.msgpack.encode(msgspec.structs.replace(an_offer(tmp_path), **change))
    with pytest.raises(WeightFileError, match=r"^m: "):
        decode_offer(data, "m")


@pytest.mark.parametrize(
    ("shapes", "dtype", "fault"),
    [
        ({"b": (60, 40)}, "BF16", "a.weight is no tensor of the model"),
        (SHAPES, "F32", "a.weight is BF16, expected F32"),
        ({"a.weight": (50, 40)}, "BF16", "a piece of a.weight ends at element 2,010 of 2,000"),
    ],
)
def test_an_offer_of_another_model(shapes: dict[str, tuple[int, int]], dtype: str, fault: str, tmp_path: Path) -> None:
    assert offer_fault(an_offer(tmp_path), shapes, dtype) == fault


def test_positions_outside_of_a_block_are_refused_with_a_right_checksum(tmp_path: Path) -> None:
    index, values = np.array([0, 1500]), np.array([1, 2], np.int16)
    offer = write_offer(tmp_path, 7, 6, "t0.1", [sparse(index, values)])
    payload = payload_path(offer_path(tmp_path, 7, "t0.1")).read_bytes()
    with pytest.raises(WeightFileError, match="outside of its block"):
        piece_values(offer.pieces[0], payload)


def test_a_reader_of_a_replaced_payload_keeps_it(tmp_path: Path) -> None:
    an_offer(tmp_path, WHOLE)
    with payload_path(offer_path(tmp_path, 7, "t0.1")).open("rb") as open_before:
        offer = an_offer(tmp_path)
        assert len(open_before.read()) == 3000
    assert read_offer(offer_path(tmp_path, 7, "t0.1")) == offer
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_a_full_file_system_leaves_nothing(tmp_path: Path) -> None:
    def fails() -> Any:
        yield dense(np.arange(1500, dtype=np.int16))
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        write_offer(tmp_path, 7, 6, "t0.1", fails())
    assert not list(tmp_path.iterdir())


def test_a_checksum_of_parts_is_that_of_the_whole() -> None:
    data = np.random.default_rng(0).bytes(5000)
    for cut in (0, 1, 8, 4096, 5000):
        first, second = data[:cut], data[cut:]
        assert crc32_combine(zlib.crc32(first), zlib.crc32(second), len(second)) == zlib.crc32(data)
