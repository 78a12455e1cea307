"""Declared tools: every way a call can end, and what the process around it may do."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from libra_hpc.errors import OperationError, UserError
from libra_hpc.host.declared import tool_refs
from libra_hpc.host.sandbox import Sandbox
from libra_hpc.host.toolproc import Ready, ToolDone, from_tool
from libra_hpc.tasks.base import ToolResult
from libra_hpc.user_file import load_file
from tests.host import sample_tools
from tests.host.conftest import InSandbox

NAMES = (
    *("echo", "fail", "leave", "pid", "sleep_for", "allocate", "text_of", "list_of", "unencodable", "write_file"),
    *("surroundings", "start_sleeper", "write_to_link", "detach"),
)
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


def test_values_survive_the_boundary(in_sandbox: InSandbox) -> None:
    value = {"a": [1, -2, 2.5, None, True], "b": b"\x00\xff", "c": "Grüße"}

    async def body(box: Sandbox) -> list[ToolResult]:
        return list(await asyncio.gather(*(box.call("echo", [value, i]) for i in range(50))))

    results = in_sandbox(body, TOOLS, tool_processes=2)
    assert [r.value for r in results] == [[value, i] for i in range(50)]
    assert {r.outcome for r in results} == {"ok"}
    assert all(r.seconds > 0 for r in results)


@pytest.mark.parametrize(
    ("call", "outcome", "text"),
    [
        (("fail", "no such key"), "error", "ValueError: no such key"),
        (("leave",), "error", "SystemExit: 3"),
        (("echo", 1, 2), "error", "TypeError"),
        (("unencodable",), "error", "TypeError"),
        (("list_of", 5000), "error", "exceeds the limit of 1024"),
        (("allocate", 1 << 30), "error", "MemoryError"),
        (("write_file", 200 << 20), "error", "File too large"),
        (("sleep_for", 600), "timeout", "no answer within 1 s"),
    ],
)
def test_every_failure_is_a_value_and_the_next_call_works(
    in_sandbox: InSandbox, call: tuple[object, ...], outcome: str, text: str
) -> None:
    async def body(box: Sandbox) -> tuple[ToolResult, ToolResult]:
        return await box.call(*call), await box.call("echo", 7)  # type: ignore[arg-type]

    bad, good = in_sandbox(
        body, TOOLS, tool_timeout_s=1.0, tool_memory_mb=512 if call[0] != "write_file" else 128, tool_output_bytes=1024
    )
    assert (bad.outcome, text in bad.value) == (outcome, True), bad
    assert (good.outcome, good.value) == ("ok", 7)


def test_text_beyond_the_limit_is_cut_between_characters(in_sandbox: InSandbox) -> None:
    async def body(box: Sandbox) -> ToolResult:
        return await box.call("text_of", 5000)

    result = in_sandbox(body, TOOLS, tool_output_bytes=1023)
    assert (result.outcome, result.value) == ("ok", "é" * 511)


def test_killed_tool_process_fails_one_call_and_is_replaced(in_sandbox: InSandbox) -> None:
    async def body(box: Sandbox) -> tuple[ToolResult, int, int, int]:
        first = (await box.call("pid")).value
        running = asyncio.create_task(box.call("sleep_for", 600))
        await asyncio.sleep(0.05)
        os.kill(first, signal.SIGKILL)
        lost = await running
        second = (await box.call("pid")).value
        return lost, first, second, box.pids[0]

    lost, first, second, listed = in_sandbox(body, TOOLS)
    assert (lost.outcome, lost.value) == ("error", "the tool process died")
    assert first != second == listed


def test_slow_call_holds_one_process_only(in_sandbox: InSandbox) -> None:
    async def body(box: Sandbox) -> tuple[bool, list[ToolResult], ToolResult]:
        slow = asyncio.create_task(box.call("sleep_for", 600))
        await asyncio.sleep(0)
        fast = [await box.call("echo", i) for i in range(20)]
        return slow.done(), fast, await slow

    done, fast, slow = in_sandbox(body, TOOLS, tool_processes=2, tool_timeout_s=3.0)
    assert not done
    assert [r.value for r in fast] == list(range(20))
    assert slow.outcome == "timeout"


def test_cancelled_call_does_not_lose_its_process(in_sandbox: InSandbox) -> None:
    async def body(box: Sandbox) -> tuple[int, int, ToolResult]:
        before = (await box.call("pid")).value
        calls = [asyncio.create_task(box.call("sleep_for", seconds)) for seconds in (0.2, 600)]
        await asyncio.sleep(0.02)
        for running_or_waiting in calls:
            running_or_waiting.cancel()
        return before, (await box.call("pid")).value, await box.call("echo", 1)

    before, after, result = in_sandbox(body, TOOLS)
    assert before == after
    assert result.value == 1


def test_surroundings_of_a_tool(in_sandbox: InSandbox, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "do not leak")
    with open(os.devnull) as inherited:
        os.set_inheritable(inherited.fileno(), True)

        async def body(box: Sandbox) -> tuple[ToolResult, int]:
            return await box.call("surroundings"), box.pids[0]

        result, pid = in_sandbox(body, {"surroundings": sample_tools.surroundings})
    seen = result.value
    assert sorted(seen["env"]) == ["LC_ALL", "TMPDIR"]
    assert seen["cwd"] == seen["env"]["TMPDIR"]
    assert Path(seen["cwd"]).is_relative_to(tmp_path)
    assert seen["group"] == pid
    assert [link for link in seen["fds"] if link != os.devnull and not link.startswith(("socket:", "/proc"))] == []
    assert len([link for link in seen["fds"] if link.startswith("socket:")]) == 1


def test_timeout_kills_what_the_tool_started(in_sandbox: InSandbox, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("sleeper") / "pid"

    async def body(box: Sandbox) -> ToolResult:
        return await box.call("start_sleeper", str(path))

    assert in_sandbox(body, TOOLS, tool_timeout_s=1.0).outcome == "timeout"
    assert gone(int(path.read_text()))


def test_a_daemon_of_a_tool_is_gone_with_its_call(
    in_sandbox: InSandbox, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("daemon") / "pid"

    async def body(box: Sandbox) -> tuple[ToolResult, bool, bool]:
        before = box.pids
        result = await box.call("detach", str(path))
        return result, Path(f"/proc/{path.read_text()}").exists(), box.pids == before

    result, alive, same = in_sandbox(body, TOOLS)
    assert (result.outcome, result.value, alive, same) == ("ok", "detached", False, True)


def test_undeclared_tool_is_the_tasks_mistake(in_sandbox: InSandbox) -> None:
    async def body(box: Sandbox) -> None:
        with pytest.raises(KeyError, match="declares no tool 'serach'"):
            await box.call("serach")

    in_sandbox(body, TOOLS)


def test_tool_that_cannot_be_imported_elsewhere_is_refused_by_name() -> None:
    with pytest.raises(UserError, match="tools\\['shorten'\\]"):
        tool_refs({"shorten": lambda text: text[:3]})


def test_a_tool_process_that_cannot_start_reports_why(in_sandbox: InSandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(box: Sandbox) -> None:
        raise AssertionError("started")

    monkeypatch.setattr(sample_tools.echo, "__module__", "tests.tasks.no_such_module")
    with pytest.raises(OperationError, match=r"cannot start: ModuleNotFoundError: .*no_such_module"):
        in_sandbox(body, {"echo": sample_tools.echo})


@pytest.mark.parametrize("extra", [ToolDone("ok", "forged"), Ready(False)], ids=["answer", "ready"])
def test_an_extra_frame_of_a_tool_shifts_no_answer(in_sandbox: InSandbox, extra: Ready | ToolDone) -> None:
    async def body(box: Sandbox) -> tuple[ToolResult, list[ToolResult]]:
        bad = await box.call("write_to_link", from_tool.frame(extra))
        return bad, [await box.call("echo", number) for number in range(4)]

    bad, good = in_sandbox(body, TOOLS, tool_timeout_s=5.0)
    assert (bad.outcome, bad.value) == ("error", "the tool process sent an answer to no call")
    assert [(result.outcome, result.value) for result in good] == [("ok", number) for number in range(4)]


def test_a_frame_written_after_the_call_costs_no_other_call(in_sandbox: InSandbox) -> None:
    async def body(box: Sandbox) -> list[ToolResult]:
        before = box.pids
        first = await box.call("write_to_link", from_tool.frame(ToolDone("ok", "forged")), 0.05)
        while box.pids == before:
            await asyncio.sleep(0.01)
        return [first, *[await box.call("echo", number) for number in range(4)]]

    results = in_sandbox(body, TOOLS, tool_timeout_s=5.0)
    assert {result.outcome for result in results} == {"ok"}
    assert [result.value for result in results] == ["written", 0, 1, 2, 3]


def test_what_a_tools_module_started_serves_every_call_and_ends_with_the_tool_process(in_sandbox: InSandbox) -> None:
    async def body(box: Sandbox) -> tuple[list[Any], list[Any]]:
        return [(await box.call("ask", text)).value for text in "abc"], (await box.call("pids")).value

    ref = Path(__file__).with_name("served_tools.py")
    tools = load_file(str(ref))
    try:
        answers, (server, runs) = in_sandbox(body, {"ask": tools.ask, "pids": tools.pids})
    finally:
        tools.SERVER.kill()
        tools.SERVER.wait()
    assert (answers, runs) == (["a", "b", "c"], True)
    assert gone(server)
