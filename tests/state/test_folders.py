"""State folders: manifests, `verify`, fall-back to an older whole state, room, and calls that are tried again."""

from __future__ import annotations

import shutil
from collections import namedtuple
from pathlib import Path

import msgspec
import pytest

from libra_hpc.state import state_folders as folders
from libra_hpc.state.retry import Exports, Retry


def state(parent: Path, step: int) -> Path:
    partial = parent / f"step-{step:08d}{folders.TEMPORARY}"
    (partial / folders.POLICY_DIR).mkdir(parents=True)
    (partial / folders.POLICY_DIR / "model.safetensors").write_bytes(bytes([step]) * 4096)
    (partial / "optimizer.safetensors").write_bytes(b"moments")
    (partial / folders.STATE_FILE).write_bytes(msgspec.json.encode(folders.TrainerState(step, step)))
    final = parent / f"step-{step:08d}"
    folders.publish(partial, final)
    return final


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


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


def test_a_torn_manifest_is_damage_and_none_at_all_is_an_older_version(tmp_path: Path) -> None:
    folder = state(tmp_path, 7)
    (folder / folders.POSITION_FILE).write_text("added after the manifest")
    assert folders.verify(folder) == ""
    manifest = folder / folders.MANIFEST_FILE
    manifest.write_bytes(manifest.read_bytes()[:-5])
    assert folders.verify(folder) == "manifest.json is torn."
    manifest.unlink()
    assert folders.verify(folder) == ""


def test_the_newest_whole_state_is_chosen(tmp_path: Path) -> None:
    assert folders.latest_whole(tmp_path / "nowhere") is None
    older, newer = state(tmp_path, 9), state(tmp_path, 10)
    assert folders.latest_whole(tmp_path) == newer
    flip(newer / "optimizer.safetensors")
    assert folders.latest_whole(tmp_path) == older
    flip(older / "optimizer.safetensors")
    assert folders.latest_whole(tmp_path) is None


def test_a_state_that_cannot_be_read_counts_as_the_oldest(tmp_path: Path) -> None:
    torn, older, newer = state(tmp_path, 11), state(tmp_path, 9), state(tmp_path, 10)
    (torn / folders.STATE_FILE).write_text("{")
    assert folders.latest(tmp_path) == newer
    (torn / folders.STATE_FILE).unlink()
    assert folders.latest(older.parent) == newer


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
    manifest.write_bytes(b'{"trainer.json/below": [1, 2]}')
    assert folders.verify(folder) == "trainer.json/below is missing."


def test_a_checkpoint_that_was_removed_after_it_was_chosen_gives_way_to_the_newest(tmp_path: Path) -> None:
    chosen, newer = state(tmp_path, 10), state(tmp_path, 20)
    assert folders.resolve(chosen) == chosen
    shutil.rmtree(chosen)
    assert folders.resolve(chosen) == newer
    shutil.rmtree(newer)
    with pytest.raises(FileNotFoundError):
        folders.resolve(chosen)


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


def test_a_version_is_asked_for_once_and_again_after_a_failure_or_a_change() -> None:
    exports = Exports(-1)
    assert exports.ask(0, 0.0)
    assert not exports.ask(0, 0.0)
    assert not exports.failed(0.0)
    assert not exports.ask(0, 1.0)
    assert exports.ask(1, 2.0), "the newest one, once the pause is over"
    exports.ask_again()
    assert exports.ask(1, 2.0)
    exports.written(1, 0.5)
    exports.ask_again()
    assert not exports.ask(1, 2.0)
    assert [exports.failed(3.0) for _ in range(5)] == [False] * 4 + [True]
