"""Steps and tools that take too long: what is ended, what is not, and what the leader receives."""

from __future__ import annotations

import math
import signal
from pathlib import Path

import pytest

from libra_hpc.config.run import RunConfig
from libra_hpc.host.host import OPENINGS
from libra_hpc.protocol.codec import pack_i32, unpack_i32
from libra_hpc.protocol.engine_state import FIRST_STEPS, Doing
from libra_hpc.protocol.env import CloseEpisode, EpisodeFailed, EpisodeOpened, EpisodeStepped, OpenEpisode, StepEpisode
from tests.host.leader import ROOM, Leader, host_settings

PATIENT = f"{Path(__file__).with_name('user_tasks.py')}:Patient"


def host(folder: Path, **fields: float) -> RunConfig:
    limits = {"step_limit_s": 1.0, "tool_timeout_s": 0.5, **fields}
    return host_settings(task=PATIENT, model=str(folder), **limits)


@pytest.mark.parametrize("how", [10, 11], ids=["obeys its cancellation", "goes on"])
def test_a_step_that_never_answers_fails_its_episode_alone(keychain_folder: Path, how: int) -> None:
    with Leader(host(keychain_folder)) as leader:
        leader.open("a")
        leader.open("b")
        failed = leader.step("a", [how])
        assert isinstance(failed, EpisodeFailed)
        assert (failed.episode, failed.kind) == ("a", "timeout")
        assert failed.error.startswith("StepTimeout: no answer within 1 s outside tool calls; it waits at ")
        assert "user_tasks.py" in failed.error
        assert isinstance(leader.step("b", [9]), EpisodeStepped)
        leader.open("a")
        assert isinstance(leader.step("a", [9]), EpisodeStepped)
    assert leader.process.returncode == 0


def test_a_tool_with_a_limit_of_its_own_outlasts_others_and_the_step(keychain_folder: Path) -> None:
    with Leader(host(keychain_folder, step_limit_s=0.9)) as leader:
        leader.open("a")
        leader.open("b")
        # Both wait for the one tool process, together longer than a step may take itself.
        leader.send(StepEpisode("a", pack_i32([12]), ROOM), StepEpisode("b", pack_i32([3]), ROOM))
        found = {message.episode: message for message in (leader.expect(EpisodeStepped) for _ in range(2))}
        assert unpack_i32(found["a"].tokens) == [len("ok")] * 2
        assert unpack_i32(found["b"].tokens) == [len("timeout")]


def test_a_thread_that_a_step_leaves_behind_keeps_no_host_and_a_process_answers_nothing(keychain_folder: Path) -> None:
    with Leader(host(keychain_folder)) as leader:
        leader.open("a")
        for token in (18, 30, 30, 18, 30, 17):
            assert isinstance(leader.step("a", [token]), EpisodeStepped)
    assert leader.process.returncode == 0


def test_a_host_shows_that_its_loop_runs_and_its_stacks_when_asked(keychain_folder: Path) -> None:
    with Leader(host(keychain_folder)) as leader:
        assert leader.ready.step_limit_s == math.inf, "it ends overdue steps itself, and a queue for tools is no hang"
        for _ in range(2):
            assert leader.receive() == Doing({FIRST_STEPS: 0.0}, silence_s=60.0), "the task's longest tool"
        leader.process.send_signal(signal.SIGUSR2)
        assert leader.process.stderr is not None
        assert any("Current thread" in line for line in leader.process.stderr)
        assert leader.process.poll() is None


def test_a_host_that_opens_many_episodes_slowly_reports_progress(keychain_folder: Path) -> None:
    with Leader(host_settings(task=PATIENT.replace("Patient", "Heavy"), model=str(keychain_folder))) as leader:
        leader.send(*(OpenEpisode(f"{number}", number, 0, 0.0) for number in range(4)))
        kinds: list[type] = []
        while kinds.count(EpisodeOpened) < 4:
            kinds.append(type(leader.receive()))
    assert Doing in kinds[kinds.index(EpisodeOpened) :]


def test_of_many_episodes_a_few_start_at_once_and_the_wait_of_the_others_does_not_count(keychain_folder: Path) -> None:
    config = host_settings(
        task=PATIENT.replace("Patient", "Crowded"), model=str(keychain_folder), step_limit_s=0.8, tool_processes=1
    )
    with Leader(config) as leader:
        names = [f"{number}" for number in range(32)]
        leader.send(*(OpenEpisode(name, 0, 0, 0.0) for name in names), CloseEpisode("6"), CloseEpisode("31"))
        opened = [leader.expect(EpisodeOpened) for _ in range(30)]
    assert [message.episode for message in opened] == [name for name in names if name not in ("6", "31")]
    assert max(unpack_i32(message.tokens)[0] for message in opened) == OPENINGS
