"""The environment host process over a real socket."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from libra_hpc.agent.child_start import child_command
from libra_hpc.config.load import merged
from libra_hpc.protocol.codec import pack_i32
from libra_hpc.protocol.env import CloseEpisode, EpisodeFailed, EpisodeOpened, EpisodeStepped, OpenEpisode, StepEpisode
from libra_hpc.tasks.tokenizer import TaskTokenizer
from tests.example_files import GUESS, KEYCHAIN_TASK, keychain
from tests.host.leader import ROOM, Leader, host_settings, play

from .test_sandbox import gone

pytestmark = pytest.mark.slow

FRAGILE = f"{Path(__file__).with_name('user_tasks.py')}:Fragile"


def test_an_episode_is_the_tasks_own_for_seed_options_index_and_progress(keychain_folder: Path) -> None:
    options = {"drift_at": 0.5, "after": {"p_more": 0.85}}
    twin = keychain.KeyChain(TaskTokenizer(keychain_folder), seed=11, **options)
    with Leader(host_settings(task=KEYCHAIN_TASK, model=str(keychain_folder), options=options, seed=11)) as leader:
        for index in range(16):
            opened, expected = leader.open(f"e{index}", index, 0.7), twin.open(index, 0, 0.7)
            assert (opened.prompt_id, opened.tokens) == (expected.prompt_id, pack_i32(expected.prompt))
    assert leader.process.returncode == 0


SERVES = """
import os, sys
from libra_hpc.host.host import main
async def serve(socket, config):
    return os.environ["no_proxy"] != ".corp,127.0.0.1,localhost,::1"
sys.exit(main("a host", serve))
"""


def test_a_task_asks_its_own_machine_without_the_sites_proxy(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    argv = [sys.executable, "-c", SERVES, "--socket", "0", "--config", str(tmp_path / "config.json")]
    subprocess.run(argv, env={**os.environ, "NO_PROXY": ".corp"}, check=True)


def test_task_of_a_users_own_file(text_folder: Path) -> None:
    tokenizer = TaskTokenizer(text_folder)
    bounds: dict[str, list[int]] = {}

    def policy(name: str, context: list[int]) -> list[int]:
        low_high = bounds.setdefault(name, [1, 1000])
        last = tokenizer.decode(context).strip().split("\n")[-1]
        middle = sum(low_high) // 2
        if last in ("higher", "lower"):
            low_high[last == "lower"] = middle + 1 if last == "higher" else middle - 1
        return tokenizer.encode(f"{sum(low_high) // 2}\n")

    config = host_settings(task=GUESS, model=str(text_folder), options={"largest": 1000, "max_turns": 12})
    with Leader(config) as leader:
        ends = play(leader, policy, {f"e{i}": i for i in range(16)})
    assert all(end.reward == pytest.approx(1 / end.info["turns"]) for end in ends.values())
    assert len({end.info["turns"] for end in ends.values()}) > 2


def test_options_of_a_task_are_in_a_file_of_its_owner_and_not_in_ps(keychain_folder: Path) -> None:
    with Leader(host_settings(task=KEYCHAIN_TASK, model=str(keychain_folder), options={"drift_at": 0.7531})) as leader:
        assert b"0.7531" not in Path(f"/proc/{leader.process.pid}/cmdline").read_bytes()
        assert b"0.7531" in leader.settings.read_bytes()
        assert leader.settings.stat().st_mode & 0o777 == 0o600


def test_exceptions_of_a_task_drop_one_episode_each(keychain_folder: Path) -> None:
    with Leader(host_settings(task=FRAGILE, model=str(keychain_folder))) as leader:
        leader.send(OpenEpisode("x", 13, 0, 0.0))
        assert leader.expect(EpisodeFailed).error == "LookupError: no problem 13"
        for first, kind, error in (
            (0, "raised", "RuntimeError: the task is broken"),
            (2, "raised", "The task declares no tool 'no such tool'"),
            (20, "environment", "EnvironmentFailed: the index is away"),
            (14, "raised", "CancelledError"),
            (15, "raised", "SystemExit: 3"),
            (16, "raised", "BaseException: no"),
        ):
            leader.open("e")
            failed = leader.step("e", [first])
            assert isinstance(failed, EpisodeFailed)
            assert (failed.kind, error in failed.error) == (kind, True)
            again = leader.step("e", [9])
            assert isinstance(again, EpisodeFailed)
            assert again.error == "no such episode is open"
        assert leader.open("e").stop_ids == (9,)
        going = leader.step("e", [9])
        assert isinstance(going, EpisodeStepped)
        assert (going.done, going.tokens, going.new_sample, going.reward) == (False, pack_i32([7, 8]), False, 0.5)
        other = leader.step("e", [6])
        assert isinstance(other, EpisodeStepped)
        assert (other.done, other.tokens, other.new_sample) == (False, pack_i32([1, 3]), True)
        end = leader.step("e", [4])
        assert isinstance(end, EpisodeStepped)
        assert (end.done, end.reward, end.info, end.tokens) == (True, 0.25, {"turns": 2.0}, b"")


def test_protocol_misuse_fails_the_episode_named(keychain_folder: Path) -> None:
    with Leader(host_settings(task=FRAGILE, model=str(keychain_folder), tool_timeout_s=1.0)) as leader:
        leader.open("a")
        leader.send(OpenEpisode("a", 1, 0, 0.0))
        assert leader.expect(EpisodeFailed).error == "this episode is already open"
        leader.open("b")
        leader.send(StepEpisode("b", pack_i32([3]), ROOM), StepEpisode("b", pack_i32([4]), ROOM))
        assert leader.expect(EpisodeFailed).error == "a step of this episode is still running"
        leader.send(CloseEpisode("never opened"))
        leader.open("c")
        leader.send(StepEpisode("c", pack_i32([3]), ROOM), CloseEpisode("c"), OpenEpisode("c", 2, 0, 0.0))
        assert [leader.next().__class__ for _ in range(1)] == [EpisodeOpened]
        assert isinstance(leader.step("c", [4]), EpisodeStepped)


def test_unreadable_frame_ends_the_host(keychain_folder: Path) -> None:
    with Leader(host_settings(task=FRAGILE, model=str(keychain_folder))) as leader:
        leader.link.sendall(b"\x03\x00\x00\x00abc")
        with pytest.raises(EOFError):
            leader.next()
    assert leader.process.returncode == 1


def test_tools_end_with_the_socket(keychain_folder: Path) -> None:
    with Leader(host_settings(task=FRAGILE, model=str(keychain_folder), tool_processes=2)) as leader:
        leader.open("a")
        leader.open("b")
        leader.send(*(StepEpisode(name, pack_i32([3]), ROOM) for name in "ab"))
        while len(pids := psutil.Process(leader.process.pid).children(recursive=True)) < 2:
            assert leader.process.poll() is None
        leader.link.close()
        assert leader.process.wait(30) == 0
        assert all(gone(process.pid) for process in pids)
        assert sorted(path.name for path in leader.folder.iterdir()) == ["host.json"]


def test_killed_host_leaves_no_orphan(keychain_folder: Path) -> None:
    with Leader(host_settings(task=FRAGILE, model=str(keychain_folder), tool_timeout_s=300)) as leader:
        leader.open("a")
        leader.send(StepEpisode("a", pack_i32([8]), ROOM))
        pids: list[psutil.Process] = []
        while len(pids) < 3:  # a tool's process, the process that runs code, and the code itself
            assert leader.process.poll() is None
            pids = psutil.Process(leader.process.pid).children(recursive=True)
        leader.process.send_signal(signal.SIGKILL)
        leader.process.wait(30)
        assert all(gone(process.pid) for process in pids)


def test_host_hides_its_memory(keychain_folder: Path) -> None:
    with Leader(host_settings(task=FRAGILE, model=str(keychain_folder))) as leader:
        become = "os.setresgid(65534, 65534, 65534), os.setresuid(65534, 65534, 65534)" if os.getuid() == 0 else "None"
        script = f"import os\n{become}\nopen('/proc/{leader.process.pid}/mem', 'rb')"
        result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
        assert "PermissionError" in result.stderr
        assert os.stat(f"/proc/{leader.process.pid}/environ").st_uid == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": {"path": "/nowhere"}}, "has no tokenizer.json"),
        ({"tasks": 3}, "unknown field `tasks`"),
        (None, "Input data was truncated"),
        ({"task": {"name": FRAGILE.replace("Fragile", "NoTool")}}, "tools['nested']"),
        ({"task": {"name": FRAGILE.replace("Fragile", "NoSuchTool")}}, "did you mean 'nap'?"),
        ({"task": {"name": FRAGILE.replace("Fragile", "NoTime")}}, "step_limit_s = nan"),
    ],
)
def test_users_mistakes_exit_with_two(
    keychain_folder: Path, changes: dict[str, Any] | None, message: str, tmp_path: Path
) -> None:
    settings = tmp_path / "host.json"
    valid = host_settings(task=KEYCHAIN_TASK, model=str(keychain_folder))
    data = merged(msgspec.to_builtins(valid), changes or {})
    settings.write_text(json.dumps(data)[:30] if changes is None else json.dumps(data))
    command = [*child_command(valid, "host", settings), "--socket", "0"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stderr.count("\n") == 1


def test_an_error_of_the_machine_is_no_mistake_of_the_user(keychain_folder: Path, tmp_path: Path) -> None:
    settings = tmp_path / "host.json"
    config = host_settings(task=KEYCHAIN_TASK, model=str(keychain_folder))
    settings.write_bytes(msgspec.json.encode(config))
    command = [*child_command(config, "host", settings), "--socket", "0"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 1
    assert "OSError" in result.stderr
