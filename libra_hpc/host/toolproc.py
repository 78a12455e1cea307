"""A tool process: runs declared tools, or model-written code in a forked child, for the host that started it.

- First frame: `Setup`, answered by `Ready`, or by `ToolDone` with the reason of a failure.
- Then one call at a time, `Call` (declared tool) or `RunCode`. Frames are msgpack against closed unions.
- What a call starts ends before its answer. What the tool's module started at import serves all calls.
- Model-written code runs in a fork whose only output is a pipe of bytes. It can forge no answer, and its memory has
  neither task nor episode nor reward.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any, Union

import msgspec

from libra_hpc.errors import EnvironmentFailed
from libra_hpc.process import reaper
from libra_hpc.protocol.codec import Codec, EngineSocket
from libra_hpc.user_file import load_file

from . import contain

PRELOADED = (
    "bisect",
    "cmath",
    "collections",
    "copy",
    "dataclasses",
    "datetime",
    "decimal",
    "enum",
    "fractions",
    "functools",
    "heapq",
    "itertools",
    "json",
    "math",
    "numbers",
    "operator",
    "random",
    "re",
    "statistics",
    "string",
    "textwrap",
    "typing",
)
"""Modules for model-written code: it may open no file, so only loaded ones can be imported."""

ENVIRONMENT = "environment"
"""Outcome of a call whose tool raised `EnvironmentFailed`."""

FAULTS = (signal.SIGABRT, signal.SIGBUS, signal.SIGSEGV)
"""Signals that end a tool process whose memory or mapped file fails. Others cannot send them: they are ignored here,
and what the process itself does wrong ends it all the same.
"""

CHILDREN_S = 2.0
"""Most seconds to end what a call has started; then this process exits, and the host kills the rest."""

FRAME_BYTES = 96
"""Most bytes of a `ToolDone` frame besides its value."""


class ToolRef(msgspec.Struct, frozen=True):
    """Place of a declared tool: an importable module, or a user's file."""

    name: str
    module: str
    file: str
    qualname: str


class Setup(msgspec.Struct, tag=True, frozen=True):
    """Limits and purpose of a process; no ``tools``: model-written code."""

    tools: tuple[ToolRef, ...]
    parent: int
    folder: str
    timeout_s: float
    memory_bytes: int
    output_bytes: int


class Call(msgspec.Struct, tag=True, frozen=True):
    call: int
    """Random, so that other writers to the link cannot forge an answer."""
    name: str
    args: tuple[Any, ...]
    named: dict[str, Any]


class RunCode(msgspec.Struct, tag=True, frozen=True):
    call: int
    code: str


class Ready(msgspec.Struct, tag=True, frozen=True):
    """The process is set up."""


class ToolDone(msgspec.Struct, tag=True, frozen=True):
    outcome: str
    """Outcome of a `libra_hpc.tasks.base.ToolResult`, or `ENVIRONMENT`: the host raises `EnvironmentFailed`."""
    value: Any
    exit_code: int | None = None
    call: int = 0
    """Id of the call; 0: none, the process cannot start."""


to_tool: Codec[Setup | Call | RunCode] = Codec(Union[Setup, Call, RunCode])
from_tool: Codec[Ready | ToolDone] = Codec(Union[Ready, ToolDone])


def cut(text: str, most: int) -> str:
    """``text``, cut to ``most`` bytes of UTF-8."""
    if len(text) <= most and len(text.encode()) <= most:
        return text
    return text.encode()[:most].decode(errors="ignore")


def find(tool: ToolRef) -> Callable[..., Any]:
    found: Any = load_file(tool.file) if tool.file else importlib.import_module(tool.module)
    for part in tool.qualname.split("."):
        found = getattr(found, part)
    function: Callable[..., Any] = found
    return function


def run_tool(function: Callable[..., Any], request: Call, most: int) -> ToolDone:
    try:
        value = function(*request.args, **request.named)
        done = ToolDone("ok", cut(value, most) if isinstance(value, str) else value)
        if (size := len(from_tool.frame(done))) > most + FRAME_BYTES:
            return ToolDone("error", f"the answer of {size} bytes exceeds the limit of {most}")
        return done
    except EnvironmentFailed as error:
        return ToolDone(ENVIRONMENT, cut(str(error), most))
    except (Exception, SystemExit) as error:
        return ToolDone("error", cut(f"{type(error).__name__}: {error}", most))


def run_code(code: str, setup: Setup) -> ToolDone:
    """Run model-written code in a contained fork and collect its output."""
    reader, writer = os.pipe()
    parent = os.getpid()  # before the fork: the child may start after this process was killed
    child = os.fork()
    if child == 0:
        _contained(code, setup, writer, parent)
    os.close(writer)
    deadline = time.monotonic() + setup.timeout_s
    data, ended = bytearray(), False
    poller = select.poll()
    poller.register(reader, select.POLLIN)
    try:
        while len(data) <= setup.output_bytes and not ended:
            left = deadline - time.monotonic()
            if left <= 0 or not poller.poll(left * 1000):
                break
            chunk = os.read(reader, 1 << 16)
            data += chunk
            ended = not chunk
        overdue = not ended and len(data) <= setup.output_bytes
        # A child that closed its output may still be computing.
        while ended and not overdue and os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            time.sleep(0.001)
            overdue = time.monotonic() > deadline
    finally:
        os.close(reader)
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)  # not reaped yet, so the id is still the child's
        status = os.waitpid(child, 0)[1]
    text = cut(data.decode(errors="replace"), setup.output_bytes)
    if overdue:
        return ToolDone("timeout", text)
    if not ended:
        return ToolDone("error", text)
    exit_code = os.waitstatus_to_exitcode(status)
    if exit_code < 0:
        text = cut(f"{text}killed by {signal.Signals(-exit_code).name}", setup.output_bytes)
    return ToolDone("error" if exit_code else "ok", text, exit_code)


def _contained(code: str, setup: Setup, writer: int, parent: int) -> None:
    status = 1
    try:
        os.setsid()
        reaper.die_with(parent)
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.dup2(writer, 1)
        os.dup2(writer, 2)
        os.closerange(3, 1 << 16)
        sys.stdout = open(1, "w", encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", encoding="utf-8", errors="replace", closefd=False, buffering=1)  # noqa: SIM115
        program = compile(code, "<code>", "exec")
        contain.limit(setup.memory_bytes, 0)
        contain.compute_only(int(setup.timeout_s) + 1)
        exec(program, {"__name__": "__main__"})  # the only execution of a model's text, under the filter
        status = 0
    except SystemExit as end:
        status = end.code & 0xFF if isinstance(end.code, int) else 0 if end.code is None else 1
    except BaseException as error:
        # The traceback without this module's own frame: the model reads it.
        trace = error.__traceback__.tb_next if error.__traceback__ else None
        print("".join(traceback.format_exception(type(error), error, trace)), end="", file=sys.stderr)
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
        os._exit(status)


def serve(link: EngineSocket[Ready | ToolDone]) -> None:
    """Answer calls; raises `EOFError` when the host has closed its end."""
    setup = link.receive()
    if not isinstance(setup, Setup):
        return
    os.chdir(setup.folder)
    functions: dict[str, Callable[..., Any]] = {}
    try:
        if setup.tools:
            functions = {tool.name: find(tool) for tool in setup.tools}
        else:
            for name in PRELOADED:
                importlib.import_module(name)
            contain.drop_root()
        for fault in FAULTS:
            signal.signal(fault, signal.SIG_IGN)
        contain.no_new_privileges()
        contain.limit(setup.memory_bytes, setup.memory_bytes)
        reaper.die_with(setup.parent)
        reaper.become_subreaper()
    except Exception as error:
        link.send(ToolDone("error", f"{type(error).__name__}: {error}"))
        return
    link.send(Ready())
    while not isinstance(request := link.receive(), Setup):
        # Processes of a call end with it, so these belong to the tool's module.
        spared = reaper.descendants()
        if isinstance(request, Call):
            answer = run_tool(functions[request.name], request, setup.output_bytes)
        else:
            answer = run_code(request.code, setup)
        if not reaper.end_children(CHILDREN_S, spared):
            return
        link.send(msgspec.structs.replace(answer, call=request.call))


def main() -> None:
    """Serve on the inherited descriptor, which no program of a tool inherits; standard streams are /dev/null."""
    link = int(sys.argv[-1])
    os.set_inheritable(link, False)
    try:
        serve(EngineSocket(link, to_tool, from_tool))
    except EOFError:
        return
    except MemoryError:
        os.abort()  # as a library in C does
