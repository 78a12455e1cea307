"""Transcripts: what is written is what a step was trained on, within the room for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from libra_hpc.agent.hosting.rollout_service import TranscriptLog
from libra_hpc.config.load import validate
from libra_hpc.protocol.codec import unpack_i32
from libra_hpc.rollout.records import transcripts
from libra_hpc.rollout.trajectory import Trajectory

from .plant import Plant, sampling


async def _trained(steps: int = 1, **options: Any) -> Plant:
    plant = await sampling(steps=8, **options)
    for _ in range(steps):
        batch = await plant.batch(len(plant.batches) + 1)
        plant.commit(batch)
    return plant


@pytest.mark.parametrize("fresh", [0, 1])
async def test_a_step_has_every_trajectory_with_its_tokens_and_advantage(tmp_path: Path, fresh: int) -> None:
    plant = await _trained(fresh=fresh)
    (step, trajectories, groups), *_ = plant.composed
    (tmp_path / ".step-000007.jsonl.zst.4711").write_bytes(b"of a writer that was killed")
    transcripts.TranscriptWriter(tmp_path, 10**6).write(step, trajectories, groups)
    assert not list(tmp_path.glob(".step-*"))
    records = list(transcripts.read(transcripts.steps(tmp_path)[step]))
    assert [record.uid for record in records] == [f"{t.index}.{t.sample}" for t in trajectories]
    samples = {sample.trajectory: sample for group in groups for sample in group.samples}
    for record, trajectory in zip(records, trajectories, strict=True):
        assert record.advantage == samples[record.uid].advantage
        segments = list(record.segments())
        assert [token for _, ids in segments for token in ids] == unpack_i32(trajectory.tokens)
        assert [ids for who, ids in segments if who == "new sample"] == [(1, 2, trajectory.index, 6)] * fresh
        policy = [token for who, ids in segments if who == "policy" for token in ids]
        assert policy == [
            token for token, own in zip(unpack_i32(trajectory.tokens), trajectory.mask, strict=True) if own
        ]


async def test_a_damaged_file_is_read_to_its_last_whole_record_and_that_is_told(tmp_path: Path) -> None:
    plant = await _trained()
    step, trajectories, groups = plant.composed[0]
    transcripts.TranscriptWriter(tmp_path, 10**6).write(step, trajectories, groups)
    path = transcripts.steps(tmp_path)[step]
    whole = path.read_bytes()
    records = list(transcripts.read(path))
    ends = [at for at in range(1, len(whole) + 1) if not _told(path, whole[:at])[1]]
    assert len(ends) == len(trajectories), "a cut between two records is none"
    assert ends[-1] == len(whole)
    for size in range(1, len(whole), 5):
        found, told = _told(path, whole[:size])
        assert found == records[: sum(end <= size for end in ends)]
        assert told == ([] if size in ends else [f"{path.name} is damaged behind {len(found)} whole trajectories"])
        flipped = whole[:size] + bytes([whole[size] ^ 64]) + whole[size + 1 :]
        found, told = _told(path, flipped)
        assert found == records[: len(found)]
        assert (len(told), len(found)) == (1, sum(end <= size for end in ends)) or found == records
    assert len(_told(path, whole[: ends[-2]] + b"\0" * 4096)[1]) == 1, "zeros, as after a lost power supply"


def _told(path: Path, data: bytes) -> tuple[list[transcripts.Transcript], list[str]]:
    """What a file with this content holds, and what is told of it, without the cause."""
    path.write_bytes(data)
    told: list[str] = []
    return list(transcripts.read(path, told.append)), [sentence.partition(" (")[0] for sentence in told]


async def test_beyond_the_room_the_oldest_steps_go_and_a_full_disk_costs_no_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant = await _trained(4)
    events: list[tuple[str, Any]] = []
    step, trajectories, groups = plant.composed[0]
    transcripts.TranscriptWriter(tmp_path / "one", 10**6).write(step, trajectories, groups)
    size = transcripts.steps(tmp_path / "one")[step].stat().st_size
    config = validate({"run": {"transcripts_gb": 2.5 * size / 1e9}})
    kept = TranscriptLog(tmp_path / "kept", config, lambda kind, **fields: events.append((kind, fields.get("part"))))
    for batch in plant.composed[:3]:
        kept.add(*batch)
    await kept.flush()
    assert list(transcripts.steps(tmp_path / "kept")) == [2, 3]

    kept.failed(lost := Trajectory(index=9, sample=0))
    lost.error = "ValueError: no"
    kept.end(4)
    kept.add(3, trajectories, (), "held")
    await kept.flush()
    assert list(transcripts.files(tmp_path / "kept")) == [(3, ""), (3, "held"), (4, "")]
    (record,) = transcripts.read(transcripts.steps(tmp_path / "kept")[4])
    assert (record.error, list(record.segments())) == ("ValueError: no", [])

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
