"""Declared tools: every way a call can end, and what the process around it may do."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import stat
import time
from pathlib import Path
from shutil import rmtree

import pytest

from libra_hpc.errors import EnvironmentFailed, OperationError, UserError
from libra_hpc.host.answers import tool_refs
from libra_hpc.host.toolproc import Ready, ToolDone, from_tool
from libra_hpc.process.child import Child
from libra_hpc.user_file import load_file
from tests.host import sample_tools
from tests.host.conftest import OpenSandbox

NAMES = (
    *("echo", "obey", "pid", "sleep_for", "text_of", "list_of", "unencodable"),
    *("surroundings", "start_sleeper", "write_to_link", "detach"),
)
WRITE = "file = open('scratch', 'wb'); [file.write(b'x' * (1 << 20)) for _ in range(200)]"
TOOLS = {name: getattr(sample_tools, name) for name in NAMES}


def gone(pid: int) -> bool:
    """Wait until a process has ended (a zombie has); False when it is still there after 10 s."""
    for _ in range(1000):
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except FileNotFoundError:
            return True
        time.sleep(0.01)
    return False


async def test_values_survive_the_boundary(sandbox: OpenSandbox) -> None:
    value = {"a": [1, -2, 2.5, None, True], "b": b"\x00\xff", "c": "Grüße"}

    async with sandbox(TOOLS, tool_processes=2) as box:
        results = await asyncio.gather(*(box.call("echo", [value, i]) for i in range(50)))
    assert [r.value for r in results] == [[value, i] for i in range(50)]
    assert {r.outcome for r in results} == {"ok"}
    assert all(r.seconds > 0 for r in results)


@pytest.mark.parametrize(
    ("call", "outcome", "text"),
    [
        (("obey", "raise ValueError('no such key')"), "error", "ValueError: no such key"),
        (("obey", "sys.exit(3)"), "error", "SystemExit: 3"),
        (("echo", 1, 2), "error", "TypeError"),
        (("unencodable",), "error", "TypeError"),
        (("list_of", 5000), "error", "exceeds the limit of 1024"),
        (("obey", "bytearray(1 << 30)"), "error", "MemoryError"),
        (("obey", WRITE), "error", "File too large"),
        (("sleep_for", 600), "timeout", "no answer within 1 s"),
        (("obey", "raise ConnectionRefusedError('away')"), "error", "ConnectionRefusedError: away"),
        (("obey", "os.kill(os.getpid(), 9)"), "error", "the tool process died"),
        (("obey", "subprocess.run('kill -ABRT $PPID', shell=True)"), "ok", "None"),
        (("obey", "subprocess.run('kill -SEGV $PPID', shell=True)"), "ok", "None"),
        (
            ("obey", "from libra_hpc.errors import EnvironmentFailed as E; raise E('the index is away')"),
            EnvironmentFailed,
            "the index is away",
        ),
        (
            ("obey", "os.abort()"),
            EnvironmentFailed,
            "died of SIGABRT; task.tool_memory_mb = 512 limits memory and mapped files",
        ),
        (("obey", "__import__('ctypes').string_at(0)"), EnvironmentFailed, "died of SIGSEGV; task.tool_memory_mb"),
    ],
)
async def test_every_failure_is_a_value_but_the_environments_and_the_next_call_works(
    sandbox: OpenSandbox, call: tuple[object, ...], outcome: object, text: str
) -> None:
    limits = {
        "tool_timeout_s": 1.0 if outcome == "timeout" else 60.0,
        "tool_memory_mb": 512 if WRITE not in call else 128,
    }
    async with sandbox(TOOLS, **limits, tool_output_bytes=1024) as box:
        (bad,) = await asyncio.gather(box.call(*call), return_exceptions=True)  # type: ignore[arg-type]
        good = await box.call("echo", 7)
    assert (getattr(bad, "outcome", type(bad)), text in str(getattr(bad, "value", bad))) == (outcome, True), bad
    assert (good.outcome, good.value) == ("ok", 7)


async def test_a_process_without_memory_for_its_next_call_is_the_environments_failure(sandbox: OpenSandbox) -> None:
    async with sandbox(TOOLS, tool_processes=1) as box:
        full = box.call("obey", "import resource; resource.setrlimit(resource.RLIMIT_AS, (1, 1))")
        with pytest.raises(EnvironmentFailed, match=r"died of SIGABRT; task.tool_memory_mb = 512"):
            await asyncio.gather(full, box.call("echo", 1))


async def test_text_beyond_the_limit_is_cut_between_characters(sandbox: OpenSandbox) -> None:
    async with sandbox(TOOLS, tool_output_bytes=1023) as box:
        result = await box.call("text_of", 5000)
    assert (result.outcome, result.value) == ("ok", "é" * 511)


async def test_processes_are_started_while_calls_wait_and_no_more_than_allowed(sandbox: OpenSandbox) -> None:
    async with sandbox(TOOLS, tool_processes=3, tool_timeout_s=600.0) as box:
        assert len({(await box.call("pid")).value for _ in range(9)}) == len(box.pids) == 1
        slow = [asyncio.create_task(box.call("sleep_for", 600)) for _ in range(2)]
        assert (await box.call("pid")).outcome == "ok"
        assert len(box.pids) == 3
        slow.append(asyncio.create_task(box.call("sleep_for", 600)))
        waiting = asyncio.create_task(box.call("pid"))
        await asyncio.sleep(0.05)
        assert (len(box.pids), waiting.done()) == (3, False)
        for call in (*slow, waiting):
            call.cancel()


async def test_cancelled_call_does_not_lose_its_process(sandbox: OpenSandbox) -> None:
    async with sandbox(TOOLS, tool_processes=1) as box:
        before = (await box.call("pid")).value
        calls = [asyncio.create_task(box.call("sleep_for", seconds)) for seconds in (0.2, 600)]
        await asyncio.sleep(0.02)
        for running_or_waiting in calls:
            running_or_waiting.cancel()
        assert (await box.call("pid")).value == before
        assert (await box.call("echo", 1)).value == 1


async def test_surroundings_of_a_tool(sandbox: OpenSandbox, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "do not leak")
    with open(os.devnull) as inherited:
        os.set_inheritable(inherited.fileno(), True)
        async with sandbox({"surroundings": sample_tools.surroundings}) as box:
            seen, pid = (await box.call("surroundings")).value, box.pids[0]
    assert sorted(seen["env"]) == ["LC_ALL", "TMPDIR"]
    assert seen["cwd"] == seen["env"]["TMPDIR"]
    assert Path(seen["cwd"]).is_relative_to(tmp_path)
    assert seen["group"] == pid
    assert [link for link in seen["fds"] if link != os.devnull and not link.startswith(("socket:", "/proc"))] == []
    assert len([link for link in seen["fds"] if link.startswith("socket:")]) == 1


async def test_timeout_kills_what_the_tool_started(
    sandbox: OpenSandbox, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("sleeper") / "pid"
    async with sandbox(TOOLS, tool_timeout_s=4.0) as box:
        assert (await box.call("start_sleeper", str(path))).outcome == "timeout"
    assert gone(int(path.read_text()))


async def test_a_daemon_of_a_tool_is_gone_with_its_call(
    sandbox: OpenSandbox, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("daemon") / "pid"
    async with sandbox(TOOLS) as box:
        before = box.pids
        result = await box.call("detach", str(path))
        assert not Path(f"/proc/{path.read_text()}").exists()
        assert (result.outcome, result.value, box.pids) == ("ok", "detached", before)


def test_tool_that_cannot_be_imported_elsewhere_is_refused_by_name() -> None:
    with pytest.raises(UserError, match="tools\\['shorten'\\]"):
        tool_refs({"shorten": lambda text: text[:3]})


async def test_a_tool_process_that_cannot_start_reports_why(
    sandbox: OpenSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sample_tools.echo, "__module__", "tests.tasks.no_such_module")
    with pytest.raises(OperationError, match=r"cannot start: ModuleNotFoundError: .*no_such_module"):
        async with sandbox({"echo": sample_tools.echo}):
            raise AssertionError("started")


@pytest.mark.parametrize("extra", [ToolDone("ok", "forged"), Ready()], ids=["answer", "ready"])
async def test_an_extra_frame_of_a_tool_shifts_no_answer(sandbox: OpenSandbox, extra: Ready | ToolDone) -> None:
    async with sandbox(TOOLS, tool_timeout_s=60.0) as box:
        bad = await box.call("write_to_link", from_tool.frame(extra))
        good = [await box.call("echo", number) for number in range(4)]
    assert (bad.outcome, bad.value) == ("error", "the tool process sent an answer to no call")
    assert [(result.outcome, result.value) for result in good] == [("ok", number) for number in range(4)]


async def test_a_frame_written_after_the_call_costs_no_other_call(sandbox: OpenSandbox) -> None:
    async with sandbox(TOOLS, tool_timeout_s=60.0) as box:
        before = box.pids
        first = await box.call("write_to_link", from_tool.frame(ToolDone("ok", "forged")), 0.5)
        while box.pids == before:
            await asyncio.sleep(0.01)
        results = [first, *[await box.call("echo", number) for number in range(4)]]
    assert {result.outcome for result in results} == {"ok"}
    assert [result.value for result in results] == ["written", 0, 1, 2, 3]


async def test_what_a_tools_module_started_serves_every_call_and_ends_with_the_tool_process(
    sandbox: OpenSandbox,
) -> None:
    ref = Path(__file__).with_name("served_tools.py")
    tools = load_file(str(ref))
    try:
        async with sandbox({"ask": tools.ask, "pids": tools.pids}) as box:
            answers = [(await box.call("ask", text)).value for text in "abc"]
            server, runs = (await box.call("pids")).value
    finally:
        tools.SERVER.kill()
        tools.SERVER.wait()
    assert (answers, runs) == (["a", "b", "c"], True)
    assert gone(server)


async def test_a_removed_folder_of_tools_is_made_again(sandbox: OpenSandbox, tmp_path: Path) -> None:
    async with sandbox(TOOLS) as box:
        before = (await box.call("pid")).value
        (folder,) = tmp_path.iterdir()
        rmtree(folder)
        after = (await box.call("pid")).value
        assert after != before
        (folder,) = tmp_path.iterdir()
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


async def test_five_failed_starts_in_a_row_are_said(sandbox: OpenSandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    async with sandbox(TOOLS) as box:
        pid = (await box.call("pid")).value

        async def refuse(*arguments: object) -> None:
            raise OSError(errno.EAGAIN, "Resource temporarily unavailable")

        monkeypatch.setattr(Child, "start", refuse)
        os.kill(pid, signal.SIGKILL)
        assert (await box.call("pid")).value == "the tool process died"
        for _ in range(5):
            assert not box.broken.done()
            with pytest.raises(OperationError, match="a tool process cannot start: Resource temporarily unavailable"):
                await box.call("pid")
        assert box.broken.done()
        monkeypatch.undo()
        assert (await box.call("pid")).outcome == "ok"
