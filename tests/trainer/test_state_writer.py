"""A checkpoint is of the step at which it was asked for, whatever is trained while a thread writes it."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from libra_hpc.protocol.trainer import Saved, SaveFailed
from libra_hpc.state import state_folders as folders
from libra_hpc.trainer.saved import checkpoint
from libra_hpc.trainer.saved.shard_files import holds_snapshot, load_snapshot
from libra_hpc.trainer.saved.state_writer import Answer, StateWriter
from libra_hpc.weights.names import ReplicaPlace

from .batches import train_step
from .support import build, make_model, read_tensors


class Scene:
    """A writer whose thread waits at the end of its files until it is released."""

    def __init__(self, folder: Path, world: ReplicaPlace, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
        make_model("qwen2", folder / "model")
        self.engine, self.trainer = build(folder / "model", world, dtype)
        self.answers: list[Answer] = []
        self.writer = StateWriter(self.engine, folder / "model", self.answers.append)
        self.release = threading.Event()
        seal = folders.seal

        def late(folder: Path, paths: Iterable[Path]) -> folders.Manifest:
            assert self.release.wait(60.0)
            return seal(folder, paths)

        monkeypatch.setattr(folders, "seal", late)

    def state(self) -> dict[str, torch.Tensor]:
        shards = self.engine.state.shards.items()
        return {f"{kind}/{name}": t.clone() for name, shard in shards for kind, t in shard.kinds().items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_training_goes_on_while_the_state_of_the_step_is_written(
    tmp_path: Path, world: ReplicaPlace, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    scene = Scene(tmp_path, world, monkeypatch, dtype)
    scene.trainer.step(train_step(1, 0))
    saved = scene.state()
    folder = tmp_path / "written"
    checkpoint.write_policy(scene.engine, tmp_path / "model", folder / "policy")
    scene.writer.copy(folder)()
    scene.trainer.step(train_step(2, 0))
    assert scene.answers == []
    scene.release.set()
    scene.writer.wait()
    (answer,) = scene.answers
    assert isinstance(answer, Saved)
    folders.publish(folder, tmp_path / "step-000001", answer.files)
    assert folders.verify(tmp_path / "step-000001") == ""
    assert any(not torch.equal(tensor, saved[name]) for name, tensor in scene.state().items())
    checkpoint.load_state(scene.engine, tmp_path / "step-000001")
    assert (scene.engine.state.step, scene.engine.state.updates) == (1, 1)
    assert all(torch.equal(tensor, saved[name]) for name, tensor in scene.state().items())
    assert json.loads((tmp_path / "step-000001/policy/config.json").read_text())["dtype"] == str(dtype)[6:]
    assert {t.dtype for n, t in read_tensors(tmp_path / "step-000001").items() if "/" not in n} == {dtype}


def test_a_second_copy_waits_for_the_end_of_the_first_write(
    tmp_path: Path, world: ReplicaPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = Scene(tmp_path, world, monkeypatch, torch.float32)
    scene.writer.copy(tmp_path / "first")()
    copies: list[Any] = []
    second = threading.Thread(target=lambda: copies.append(scene.writer.copy(tmp_path / "second")))
    second.start()
    second.join(0.2)
    assert copies == []
    scene.release.set()
    second.join(60.0)
    assert [answer.folder for answer in scene.answers if isinstance(answer, Saved)] == [str(tmp_path / "first")]
    assert len(copies) == 1


def test_a_snapshot_is_of_its_step_and_loads_into_the_same_layout(
    tmp_path: Path, world: ReplicaPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = Scene(tmp_path, world, monkeypatch, torch.bfloat16)
    scene.trainer.step(train_step(1, 0))
    saved = scene.state()
    weights = {name: p.clone() for name, p in scene.engine.named_parameters().items()}
    folder = tmp_path / "snapshot"
    scene.writer.copy(folder, "snapshot")()
    scene.writer.wait()
    assert [type(answer) for answer in scene.answers] == [SaveFailed], "there is no such folder"
    folder.mkdir()
    with monkeypatch.context() as full:
        full.setattr(folders.shutil, "disk_usage", lambda path: SimpleNamespace(free=0))
        scene.writer.copy(folder, "snapshot")()
        scene.writer.wait()
    assert "its file system has 0 bytes free" in str(scene.answers[1])
    scene.writer.copy(folder, "snapshot")()
    scene.trainer.step(train_step(2, 0))
    scene.writer.wait()
    assert [(answer.step, answer.tier) for answer in scene.answers[2:]] == [(1, "snapshot")]
    assert holds_snapshot(folder, 0)
    load_snapshot(scene.engine.state, folder, 0)
    assert (scene.engine.state.step, scene.engine.state.updates) == (1, 1)
    assert all(torch.equal(tensor, saved[name]) for name, tensor in scene.state().items())
    assert all(torch.equal(p, weights[name]) for name, p in scene.engine.named_parameters().items())
