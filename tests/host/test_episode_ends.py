"""What an episode learns of its beginning and its end: `start` is awaited, `close` comes once at every end."""

from __future__ import annotations

import random
import time
from collections import Counter
from pathlib import Path

import pytest

from libra_hpc.protocol.codec import pack_i32
from libra_hpc.protocol.env import (
    CloseEpisode,
    EpisodeFailed,
    EpisodeStepped,
    OpenEpisode,
    StepEpisode,
    TruncateEpisode,
    TurnUnwanted,
)
from tests.host.leader import ROOM, Leader, host_settings
from tests.stage.waiting import wait_until

pytestmark = pytest.mark.slow

KEPT = f"{Path(__file__).with_name('user_tasks.py')}:Kept"

LOGGED = KEPT.replace("Kept", "Logged")


@pytest.fixture
def diary(tmp_path: Path) -> Path:
    return tmp_path / "diary"


def kept(folder: Path, diary: Path) -> Leader:
    return Leader(host_settings(task=KEPT, model=str(folder), options={"path": str(diary)}))


def wait_for(diary: Path, lines: list[str]) -> None:
    wait_until(lambda: diary.exists() and diary.read_text().split("\n")[:-1] == lines)


def test_an_episode_that_starts_slowly_blocks_no_other_and_start_may_make_the_prompt(
    keychain_folder: Path, diary: Path
) -> None:
    with kept(keychain_folder, diary) as leader:
        leader.send(OpenEpisode("slow", 1, 0, 0.0))
        assert leader.open("a", 10).tokens == pack_i32([len("rested")]), "the tool took its argument by name"
        failed = leader.step("slow", [9])
        assert isinstance(failed, EpisodeFailed)
        assert failed.error == "no such episode is open"
        leader.send(TruncateEpisode("never opened"))
        assert leader.expect(EpisodeFailed).error == "no such episode is open"


def test_every_end_closes_the_episode_once(keychain_folder: Path, diary: Path) -> None:
    with kept(keychain_folder, diary) as leader:
        leader.open("done", 10)
        done = leader.step("done", [4])
        assert isinstance(done, EpisodeStepped)
        assert done.info == {"room": ROOM, "stop": 0.0}
        wait_for(diary, ["10 done"])
        leader.open("stopped", 15)
        stopped = leader.step("stopped", [4, 9])
        assert isinstance(stopped, EpisodeStepped)
        assert stopped.info["stop"] == 1.0, "its last token is a stop id"
        wait_for(diary, ["10 done", "15 done"])
        leader.send(CloseEpisode("done"))

        leader.open("failed", 11)
        assert isinstance(leader.step("failed", [0]), EpisodeFailed)
        wait_for(diary, ["10 done", "15 done", "11 failed"])
        leader.send(OpenEpisode("no start", 2, 0, 0.0))
        assert leader.expect(EpisodeFailed).error == "OSError: no container"
        wait_for(diary, ["10 done", "15 done", "11 failed", "2 failed"])

        leader.open("dropped", 12)
        leader.send(StepEpisode("dropped", pack_i32([1]), ROOM))
        leader.open("meanwhile", 14)
        leader.send(CloseEpisode("dropped"))
        wait_for(diary, ["10 done", "15 done", "11 failed", "2 failed", "12 cleaned up", "12 dropped"])

        leader.open("truncated", 13)
        leader.send(TruncateEpisode("truncated"))
        end = leader.expect(EpisodeStepped)
        assert (end.done, end.reward) == (True, 0.5)
        leader.open("no close", 3)
        leader.step("no close", [4])
        leader.send(OpenEpisode("slow", 1, 0, 0.0))
        for index in range(20, 30):
            leader.open(f"{index}", index)
    assert leader.process.returncode == 0
    lines = Counter(diary.read_text().split("\n")[:-1])
    assert set(lines.values()) == {1}
    assert {"13 done", "3 done", *(f"{index} shutdown" for index in (1, 14, *range(20, 30)))} < set(lines)
    assert len(lines) == 6 + 14


@pytest.mark.parametrize("seed", range(4))
def test_a_leader_that_is_gone_at_any_point_leaves_no_episode_open(
    keychain_folder: Path, diary: Path, seed: int
) -> None:
    """It does not wait for answers, so episodes are closed while they start, step, or are closed."""
    pick = random.Random(seed)
    with Leader(host_settings(task=LOGGED, model=str(keychain_folder), options={"path": str(diary)})) as leader:
        for number in range(pick.randrange(5, 60)):
            name, turn = str(pick.randrange(number + 1)), pack_i32([pick.choice((0, 1, 4, 7))])
            new = OpenEpisode(str(number), pick.choice((1, 2, 3, 10)) + 100 * number, 0, 0.0)
            others = (StepEpisode(name, turn, ROOM), TruncateEpisode(name), CloseEpisode(name))
            leader.send(new if pick.random() < 0.6 else pick.choice(others))
            if pick.random() < 0.2:
                time.sleep(0.01 * pick.random())
    assert leader.process.returncode == 0
    lines = Counter(line for line in diary.read_text().splitlines() if not line.endswith("cleaned up"))
    began = {line.split()[0] for line in lines if line.endswith("open")}
    ended = Counter(line.split()[0] for line in lines.elements() if not line.endswith("open"))
    assert ended == Counter(dict.fromkeys(began, 1))


def test_a_turn_that_nobody_waits_for_is_reported(keychain_folder: Path) -> None:
    with Leader(host_settings(task=KEPT.replace("Kept", "Fragile"), model=str(keychain_folder))) as leader:
        leader.open("e")
        assert isinstance(leader.step("e", [19]), EpisodeStepped)
        assert leader.expect(TurnUnwanted).episode == "e"
