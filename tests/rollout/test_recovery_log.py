"""Trajectories outlive their start: what is read back, what damage costs, what counts, and what is removed when."""

from __future__ import annotations

import asyncio
import os
import struct
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra_hpc.agent.hosting.origin import digest
from libra_hpc.config.load import validate
from libra_hpc.config.run import RunConfig
from libra_hpc.policies.learning.advantages import advantage_named
from libra_hpc.protocol.agents import Committed
from libra_hpc.protocol.codec import pack_f32, pack_i32
from libra_hpc.protocol.env import Signal
from libra_hpc.protocol.layout import ResumePoint
from libra_hpc.protocol.trace import TurnRecord
from libra_hpc.rollout.group_state import GroupState, batch_stats
from libra_hpc.rollout.recovery import recovery_log
from libra_hpc.rollout.recovery.recovery_log import (
    RETRY_S,
    STARTS,
    TRIM_S,
    RecordedStart,
    Recovered,
    RecoveryLog,
    drop_reason,
    read_segment,
)
from libra_hpc.rollout.trajectory import Place, Trajectory
from tests.rollout.plant import generated

ETA = 2


def trajectory_of(index: int, sample: int = 0, versions: Sequence[int] = (0,), fresh: bool = False) -> Trajectory:
    """A turn of two tokens under each version, three of a tool between turns; ``fresh``: the last begins a sample."""
    trajectory = Trajectory(index=index, sample=sample)
    trajectory.prompt_id = f"p{index}"
    trajectory.add_environment(pack_i32([1, 2, index]))
    for turn, version in enumerate(versions):
        if turn:
            trajectory.add_environment(pack_i32([9] * 3), fresh and turn == len(versions) - 1)
        trajectory.add_generated(
            generated("r", [7, turn], finish="stop", logprobs=[-1.5, -2.0], versions=((version, 2),)), "e0"
        )
    trajectory.reward, trajectory.info, trajectory.place = float(sample), {"solved": float(sample)}, "done"
    return trajectory


def at(step: int, low: int = 0, *extra: int) -> ResumePoint:
    return ResumePoint(step, "", low, extra)


class Run:
    """The recovery log of a run through several starts; every write removes what it can."""

    def __init__(self, folder: Path, segment_bytes: int = 1) -> None:
        self.folder, self.saved, self.now, self.segment_bytes = folder, at(0), 0.0, segment_bytes
        self.log: RecoveryLog

    def start(self, position: ResumePoint | None = None, digest: str = "same", eta: int = ETA) -> Recovered:
        self.saved = position or self.saved
        self.log = RecoveryLog(self.folder, lambda: self.saved, lambda: self.now, self.segment_bytes)
        return self.log.recover(digest, self.saved, eta)

    def add(self, *records: Trajectory | Committed) -> None:
        self.now += TRIM_S
        asyncio.run(self.log.write(records))

    @property
    def segments(self) -> list[Path]:
        return sorted(self.folder.glob("*.frames"))

    def held(self) -> list[int]:
        """Prompts in the files."""
        return [record.index for path in self.segments for record in read_segment(path)[0]]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path / "experience")


def samples_of(recovered: Recovered) -> list[tuple[int, int]]:
    groups = recovered.groups.values()
    return sorted((trajectory.index, trajectory.sample) for group in groups for trajectory in group)


def test_a_recovered_trajectory_trains_and_counts_as_the_original(run: Run) -> None:
    originals = [trajectory_of(4, 0, (1, 2)), trajectory_of(4, 1, (2, 2, 3), fresh=True)]
    run.start()
    run.add(*originals)
    recovered = run.start(at(3, 2))
    before, after = GroupState(4, 2, originals), GroupState(4, 2, recovered.groups[4])
    assert after.to_group(advantage_named("group_std")) == before.to_group(advantage_named("group_std"))
    assert batch_stats([after], 3) == batch_stats([before], 3)
    assert after.missing == ()
    assert recovered.event(2) == {
        "trajectories": 2,
        "groups": 1,
        "whole_groups": 1,
        "tokens": 25,
        "generated_tokens": 10,
        "unfinished": 0,
        "unfinished_tokens": 0,
        "dropped": {},
    }


def test_a_trajectory_whose_context_was_full_is_still_truncated(run: Run) -> None:
    original = trajectory_of(4, 1, (1, 2))
    original.add_environment(pack_i32([9] * 3))
    original.place = "tool"
    run.start()
    run.add(original)
    assert GroupState(4, 2, run.start(at(2)).groups[4]).begun[1].truncated


@pytest.mark.parametrize("fresh", [False, True])
@pytest.mark.parametrize("place", ["waiting", "engine", "tool"])
def test_an_unfinished_trajectory_comes_back_as_it_was(place: Place, fresh: bool, run: Run) -> None:
    original = trajectory_of(4, 1, (1, 2), fresh=True)
    original.add_signals([Signal("get", "miss", 3, 0.5, exit_code=1, failed=2)])
    if place != "tool":
        original.add_environment(pack_i32([9] * 3), fresh)
    original.place = place
    run.start()
    run.add(original, trajectory_of(4, 0))
    recovered = run.start(at(2))
    assert recovered.event(2)["unfinished"] == 1
    assert recovered.event(2)["unfinished_tokens"] == 4
    group = GroupState(4, 2, recovered.groups[4])
    assert (group.missing, group.open, len(group.done)) == ((1,), 1, 1)
    back = group.begun[1]
    assert back.place == ("tool" if place == "tool" else "before")
    assert back.turn == (pack_i32([7, 1]) if place == "tool" else b"")
    for name in (
        "tokens",
        "begin",
        "mask",
        "logprobs",
        "turns",
        "versions",
        "generated",
        "prompt_tokens",
        "prompt_id",
        "episode",
    ):
        assert getattr(back, name) == getattr(original, name), name
    assert not back.truncated
    if place != "tool" and not fresh:
        assert back.signals == original.signals


@pytest.mark.parametrize(
    ("record", "number", "reason"),
    [
        (trajectory_of(1, versions=(3, 5)), 1, ""),
        (trajectory_of(0, versions=(3, 5)), 1, "trained"),
        (trajectory_of(7, versions=(3, 5)), 1, "trained"),
        (trajectory_of(1, versions=(3, 6)), 1, "weights"),
        (trajectory_of(1, versions=(2, 5)), 1, "staleness"),
        (trajectory_of(1, versions=(3, 3)), 0, ""),
        (trajectory_of(1, versions=(3, 4)), 0, "weights"),
        (trajectory_of(1, versions=(3, 5)), 2, "configuration"),
    ],
)
def test_what_counts(record: Trajectory, number: int, reason: str) -> None:
    starts = [RecordedStart(0, "same"), RecordedStart(3, "same"), RecordedStart(4, "other"), RecordedStart(5, "same")]
    if number == 1:
        starts[2] = RecordedStart(5, "other")
    assert drop_reason(record, number, starts, position=at(5, 1, 7), eta=ETA) == reason


def test_weights_of_a_step_that_was_gone_back_on_never_count_again(run: Run) -> None:
    """Version 2 of the first start is not version 2 of the second, also once the run has been at step 2 again."""
    run.start()
    run.add(trajectory_of(5, versions=(1,)), trajectory_of(6, versions=(1, 2)))
    assert samples_of(run.start(at(1))) == [(5, 0)]
    run.add(trajectory_of(7, versions=(1, 2)))
    recovered = run.start(at(2))
    assert samples_of(recovered) == [(5, 0), (7, 0)]
    assert recovered.dropped == {}, "records that did not count are no longer in the folder"
    assert samples_of(run.start(at(2), digest="changed")) == []


@pytest.mark.parametrize("segment_bytes", [1, recovery_log.SEGMENT_BYTES])
def test_dropped_records_are_counted_and_their_files_removed(run: Run, segment_bytes: int) -> None:
    run.segment_bytes = segment_bytes
    run.start()
    run.add(
        trajectory_of(0, versions=(2,)),
        trajectory_of(1, versions=(2, 4)),
        trajectory_of(2, versions=(0, 1)),
        trajectory_of(3, 0, (2,)),
        trajectory_of(3, 1, (1,)),
    )
    recovered = run.start(at(3, 1))
    assert (samples_of(recovered), recovered.dropped) == ([(3, 0), (3, 1)], {"weights": 1, "staleness": 1})
    assert len(run.segments) == (2 if segment_bytes == 1 else 1)
    recovered = run.start(at(3, 1), digest="other")
    assert (samples_of(recovered), recovered.dropped, run.segments) == (
        [],
        {"configuration": 2 if segment_bytes == 1 else 4},
        [],
    )


def test_a_torn_frame_costs_itself_and_a_damaged_one_what_follows_it(run: Run) -> None:
    run.segment_bytes = recovery_log.SEGMENT_BYTES
    run.start()
    run.add(*(trajectory_of(index) for index in range(1, 5)))
    (path,) = run.segments
    whole = path.read_bytes()
    for cut in range(len(whole)):
        path.write_bytes(whole[:cut])
        found, good = read_segment(path)
        assert ([record.index for record in found], good) == (
            list(range(1, 1 + 4 * cut // len(whole))),
            cut % (len(whole) // 4) == 0,
        )
    damaged = bytearray(whole)
    damaged[len(whole) // 2 + 30] ^= 1
    path.write_bytes(damaged)
    recovered = run.start()
    assert (samples_of(recovered), recovered.dropped) == ([(1, 0), (2, 0)], {"damaged": 1})


@given(st.binary(max_size=200), st.booleans())
def test_garbage_is_never_raised_or_taken(
    tmp_path_factory: pytest.TempPathFactory, garbage: bytes, framed: bool
) -> None:
    run = Run(tmp_path_factory.mktemp("garbage") / "experience")
    run.start()
    body = struct.pack("<II", len(garbage), zlib.crc32(garbage)) + garbage if framed else garbage
    (run.folder / "00000-000001.frames").write_bytes(body)
    (run.folder / "00009-000001.frames").write_bytes(body)
    (run.folder / STARTS).write_bytes(b'[{"step":0,"digest":"same"}]')
    recovered = run.start()
    assert (recovered.groups, recovered.dropped.get("damaged"), run.segments) == ({}, 2 if body else 1, [])
    (run.folder / STARTS).write_bytes(garbage)
    assert run.start().groups == {}


def test_a_list_of_starts_nested_without_end_is_none(run: Run) -> None:
    run.start()
    run.add(trajectory_of(0))
    (run.folder / STARTS).write_bytes(b'[{"step":0,"digest":"same","more":' + b"[" * 100_000)
    assert run.start().dropped == {"damaged": 1}


def test_a_record_that_contradicts_itself_is_damaged(run: Run) -> None:
    run.start()
    record = trajectory_of(0)
    turns = [
        tuple(TurnRecord(new, count, versions=((0, told),)) for new, count, told in counts)
        for counts in (((0, 1, 1),), ((3, 2, 2),), ((0, 4, 4), (0, -2, -2)), ((0, 2, 1),), ())
    ]
    not_finite = (
        {"reward": float("nan")},
        {"info": {"a": float("inf")}},
        {"logprobs": pack_f32([0.0, 0.0, 0.0, -1.0, float("nan")])},
    )
    wrongs = (*not_finite, {"logprobs": b""}, {"prompt_tokens": 2}, *({"turns": wrong} for wrong in turns))
    for wrong in wrongs:
        (run.folder / "00000-000001.frames").write_bytes(recovery_log.frame(msgspec.structs.replace(record, **wrong)))
        assert read_segment(run.folder / "00000-000001.frames") == ([], False)


def test_a_segment_is_removed_when_a_checkpoint_has_its_groups_or_no_start_can_need_it(run: Run) -> None:
    run.start()
    run.add(
        trajectory_of(0, versions=(0,)),
        trajectory_of(1, versions=(0, 1)),
        trajectory_of(2, versions=(1,)),
        trajectory_of(3, versions=(1,)),
    )
    run.add(Committed(1, (0,)), Committed(2, (1, 2)))
    assert run.held() == [0, 3], (
        "a crash goes back to the beginning, whose weights only 0 was sampled under; 3 is untrained"
    )
    run.saved = at(1, 1)
    run.add(Committed(3, (9,)))
    assert run.held() == [3]
    run.saved = at(3, 3, 3)
    run.add(Committed(4, (8,)))
    assert run.held() == []
    assert samples_of(run.start()) == []


def test_what_a_run_leaves_at_its_end_is_what_a_start_would_need(run: Run) -> None:
    run.segment_bytes = recovery_log.SEGMENT_BYTES
    for position, left in ((at(1, 1), 1), (at(2, 2), 0)):
        recovered = run.start()
        run.add(*(trajectory_of(index) for index in (0, 1) if index not in recovered.groups), Committed(1, (0,)))
        run.saved = position
        asyncio.run(run.log.close())
        assert len(run.segments) == left


@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), ValueError("state.json is torn")])
def test_a_checkpoint_that_cannot_be_read_costs_no_record(run: Run, error: Exception) -> None:
    run.start()
    run.add(trajectory_of(0), trajectory_of(1))

    def unreadable() -> ResumePoint:
        raise error

    run.log._position = unreadable
    run.add(trajectory_of(2))
    assert run.log.failed == ""
    assert sorted(run.start().groups) == [0, 1, 2]


def test_a_full_disk_empties_the_log_until_there_is_room_again(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    run.start()
    run.add(trajectory_of(0))
    real = recovery_log.frame
    full: Callable[..., object] = lambda *_: (_ for _ in ()).throw(OSError(28, os.strerror(28)))  # noqa: E731
    monkeypatch.setattr(recovery_log, "frame", full)
    run.add(trajectory_of(1))
    assert run.log.failed == "No space left on device"
    assert not run.folder.exists()
    monkeypatch.setattr(recovery_log, "frame", real)
    run.add(trajectory_of(2), Committed(1, (0,)))
    assert not run.folder.exists(), "not before a minute has passed"
    run.now += RETRY_S
    run.add(trajectory_of(3))
    assert (run.log.failed, run.held()) == ("", [3])
    assert samples_of(run.start()) == [(3, 0)]


@pytest.mark.parametrize(
    ("change", "same"),
    [
        (
            {
                "rollout": {"tp": 2, "policy": "sticky"},
                "components": {"train": {"nodes": 3}},
                "algorithm": {"eta": 3},
                "optimizer": {"lr": 1e-3},
            },
            True,
        ),
        ({"deadlines": {"first_s": 60.0}}, True),
        ({"run": {"seed": 1}}, False),
        ({"run": {"steps": 7}}, False),
        ({"task": {"options": {"p_more": 0.1}}}, False),
        ({"algorithm": {"group_size": 4}}, False),
        ({"rollout": {"temperature": 0.7}}, False),
        ({"rollout": {"max_model_len": 999}}, False),
        ({"model": {"path": "elsewhere"}}, False),
        ({"run": {"engine": "simulated"}}, False),
    ],
)
def test_the_digest_is_of_what_trajectories_are_made_from(change: dict[str, object], same: bool) -> None:
    assert (digest(validate(change)) == digest(RunConfig())) is same


@pytest.mark.parametrize("edited", ["task.py", "rows.jsonl"])
def test_an_edited_file_of_the_same_size_is_another_workload(tmp_path: Path, edited: str) -> None:
    for name in ("task.py", "rows.jsonl"):
        (tmp_path / name).write_text("one = 1\ntwo = 2\n")
    task = {"name": f"{tmp_path}/task.py:Task", "data": f"{tmp_path}/rows.jsonl"}
    config = validate({"task": task})
    before = digest(config)
    (tmp_path / edited).write_text("two = 2\none = 1\n")
    assert digest(config) != before


def test_a_start_of_another_workload_is_noticed_once(tmp_path: Path) -> None:
    run, found = Run(tmp_path), list[bool]()
    for digest_now in ("same", "same", "other", "other"):
        run.start(digest=digest_now)
        found.append(run.log.changed)
    assert found == [False, False, True, False]
