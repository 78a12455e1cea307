"""Transcripts: what is written is what a step was trained on, within the room for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from libra_hpc.agent.hosting.transcript_log import TranscriptLog
from libra_hpc.config.load import validate
from libra_hpc.rollout.records import transcripts

from .plant import Plant, sampling


async def _trained(steps: int = 1) -> Plant:
    plant = await sampling(steps=8)
    for _ in range(steps):
        batch = await plant.batch(len(plant.batches) + 1)
        plant.commit(batch)
    return plant


async def test_a_step_has_every_trajectory_with_its_tokens_and_advantage(tmp_path: Path) -> None:
    plant = await _trained()
    (step, trajectories, groups), *_ = plant.composed
    transcripts.TranscriptWriter(tmp_path, "toy", 10**6).write(step, trajectories, groups)
    records = list(transcripts.read(transcripts.steps(tmp_path)[step]))
    assert [record.uid for record in records] == [f"{t.index}.{t.sample}" for t in trajectories]
    samples = {sample.uid: sample for group in groups for sample in group.samples}
    for record, trajectory in zip(records, trajectories, strict=True):
        assert record.advantage == samples[record.uid].advantage
        segments = list(record.segments())
        assert [token for _, ids in segments for token in ids] == list(trajectory.context)
        policy = [token for who, ids in segments if who == "policy" for token in ids]
        assert policy == [token for token, own in zip(trajectory.context, trajectory.mask, strict=True) if own]


async def test_a_file_that_was_cut_off_is_read_to_its_last_whole_record(tmp_path: Path) -> None:
    plant = await _trained()
    step, trajectories, groups = plant.composed[0]
    transcripts.TranscriptWriter(tmp_path, "toy", 10**6).write(step, trajectories, groups)
    path = transcripts.steps(tmp_path)[step]
    whole = path.read_bytes()
    for size in (len(whole) - 1, len(whole) // 2, 3):
        path.write_bytes(whole[:size])
        assert len(list(transcripts.read(path))) < len(trajectories)
    path.write_bytes(whole[:-1])
    assert len(list(transcripts.read(path))) == len(trajectories) - 1


async def test_beyond_the_room_the_oldest_steps_go_and_a_full_disk_costs_no_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant = await _trained(4)
    events: list[tuple[str, Any]] = []
    step, trajectories, groups = plant.composed[0]
    transcripts.TranscriptWriter(tmp_path / "one", "toy", 10**6).write(step, trajectories, groups)
    size = transcripts.steps(tmp_path / "one")[step].stat().st_size
    config = validate({"run": {"transcripts_gb": 2.5 * size / 1e9}})
    kept = TranscriptLog(tmp_path / "kept", config, lambda kind, **fields: events.append((kind, fields.get("part"))))
    for batch in plant.composed[:3]:
        kept.add(*batch)
    await kept.flush()
    assert list(transcripts.steps(tmp_path / "kept")) == [2, 3]

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(transcripts, "write_atomic", full)
        kept.add(*plant.composed[3])
        await kept.flush()
    kept.add(*plant.composed[3])
    await kept.flush()
    assert list(transcripts.steps(tmp_path / "kept"))[-1] == 4
    assert events == [("transcripts_removed", None), ("storage_fault", "transcripts"), ("storage_ok", "transcripts")]
