"""One saved state: manifests, `verify`, room; and calls that are tried again."""

from __future__ import annotations

import shutil
from collections import namedtuple
from pathlib import Path

import msgspec
import pytest

from libra_hpc.process.retry import Retry
from libra_hpc.state import state_folders as folders

from .saved import WEIGHTS, flip, state


@pytest.mark.parametrize("name", ["policy/model.safetensors", "optimizer.safetensors", "trainer.json"])
def test_one_flipped_bit_a_torn_file_and_a_lost_file_are_found(tmp_path: Path, name: str) -> None:
    folder = state(tmp_path, 7)
    assert folders.verify(folder) == ""
    whole = (folder / name).read_bytes()
    flip(folder / name)
    assert folders.verify(folder) == f"{name} has not the checksum with which it was written."
    (folder / name).write_bytes(whole[:-1])
    assert folders.verify(folder) == f"{name} has {len(whole) - 1} bytes, {len(whole)} were written."
    (folder / name).unlink()
    assert folders.verify(folder) == f"{name} is missing."


def test_a_manifest_that_is_torn_missing_or_incomplete_is_damage(tmp_path: Path) -> None:
    folder = state(tmp_path, 7, folders.DataPosition(7, 56, ()))
    manifest = folder / folders.MANIFEST_FILE
    whole = manifest.read_bytes()
    manifest.write_bytes(whole[:-5])
    assert folders.verify(folder) == "manifest.json is torn."
    manifest.unlink()
    assert folders.verify(folder) == "manifest.json is missing."
    manifest.write_bytes(b"{}")
    assert folders.verify(folder) == "manifest.json lists no file."
    manifest.write_bytes(whole)
    assert folders.verify(folder) == ""
    (folder / ".nfs0001").touch()
    (folder / "optimizer.safetensors~").touch()
    assert folders.verify(folder) == "", "files of the file system, and of a person"
    shutil.rmtree(folder)
    assert folders.verify(folder) == "manifest.json is missing."


def test_sizes_alone_find_lost_and_torn_files(tmp_path: Path) -> None:
    folder = state(tmp_path, 7)
    flip(folder / WEIGHTS)
    assert folders.verify(folder, sizes_only=True) == ""
    (folder / WEIGHTS).write_bytes(b"torn")
    assert folders.verify(folder, sizes_only=True) == f"{WEIGHTS} has 4 bytes, 4096 were written."


def test_a_data_position_is_read_strictly(tmp_path: Path) -> None:
    position = folders.DataPosition(4, 8, (10,), (folders.StepRecord(4, 12.5, {"loss": 0.5}),))
    data = msgspec.json.encode(position)
    (tmp_path / folders.POSITION_FILE).write_bytes(data)
    assert folders.read_position(tmp_path) == position
    for torn in (data[:-3], b'{"step": 4}', b""):
        (tmp_path / folders.POSITION_FILE).write_bytes(torn)
        with pytest.raises(ValueError, match=r"state\.json is torn"):
            folders.read_position(tmp_path)


def test_room_is_asked_for_with_some_to_spare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(folders.shutil, "disk_usage", lambda path: usage(10_000, 8_950, 1_050))
    folders.check_room(tmp_path / "not" / "yet", 1000)
    with pytest.raises(OSError, match="yet needs 1001 bytes, and its file system has 1050 bytes free"):
        folders.check_room(tmp_path / "not" / "yet", 1001)


def test_a_manifest_of_any_bytes_is_damage_and_never_an_exception(tmp_path: Path) -> None:
    folder = state(tmp_path, 7)
    manifest = folder / folders.MANIFEST_FILE
    for data in (b'{"\xff\xfe": [1, 2]}', b"\x80", b'{"a\\u0000": [1, 2]}', b'{"' + b"a" * 5000 + b'": [1, 2]}'):
        manifest.write_bytes(data)
        assert folders.verify(folder) != ""


def test_pauses_double_up_to_the_longest_and_start_over_after_a_success() -> None:
    retry, now, waits = Retry(10.0, 60.0), 100.0, []
    assert retry.due(now)
    for _ in range(5):
        retry.failed(now)
        waits.append(retry.wait_s(now))
        assert not retry.due(now + waits[-1] - 0.1)
        now += waits[-1]
        assert retry.due(now)
    assert waits == [10.0, 20.0, 40.0, 60.0, 60.0]
    for _ in range(2000):
        retry.failed(now)
    assert retry.wait_s(now) == 60.0
    retry.succeeded()
    assert retry.due(now)
    retry.failed(now)
    assert retry.wait_s(now) == 10.0
