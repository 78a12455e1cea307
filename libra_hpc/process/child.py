"""A child process, the pair of sockets between it and who started it, and its log.

- Start -> it inherits one of the sockets, and has a process group and a log of its own.
- Its other end closes -> the child exits, so no engine outlives its agent.
- The child ends -> the kernel reports it, and its whole process group gets SIGKILL.
- The log is long -> it is emptied in place: children append through descriptors of their own, at its new end.

Frames are those of `libra_hpc.protocol.codec`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, ClassVar

from libra_hpc.protocol.codec import Codec, FrameBuffer, FrameError

from .entry import DUMP_SIGNAL

LEAST_LIMIT = 1 << 30
"""Bytes of a file that a job must be allowed to write: a policy has more, and so may the log of a long run."""
MOST_FILES = 1 << 16
"""Open files.  Half: enough for 8,000 ranks; a million: programs that close all that may be open take seconds."""
RAISED = resource.RLIMIT_FSIZE, resource.RLIMIT_NOFILE
FILES, RANK_FILES = 512, 4
"""That one process may have open: rank 0 has two streams of every rank, the process that starts ranks one."""
MOST_BYTES = 64 << 20
"""Half: verbose engines lose what happened an hour ago; double: 48 nodes may fill a small file system."""
KEPT_BYTES = 4 << 20
"""Bytes that stay of a log that is emptied: some ten thousand lines before a fault."""


def raise_limits(ranks: int) -> str:
    """Raise the limits of files' size and number as far as they go; returns why so many ranks need more, or nothing."""
    # No limit is -1: modulo the largest number, more than any other.
    _, size, soft, hard = (limit % sys.maxsize for what in RAISED for limit in resource.getrlimit(what))
    host, files = socket.gethostname(), max(soft, min(hard, MOST_FILES))
    for what, limit in zip(RAISED, (size, files), strict=True):
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(what, (limit, resource.getrlimit(what)[1]))
    if size < LEAST_LIMIT:
        return f"ulimit -f allows files of {size} bytes on {host}, too few for logs and checkpoints"
    if files < (needed := FILES + RANK_FILES * ranks):
        return f"ulimit -n allows {files} open files on {host}; a run of {ranks} ranks needs {needed}"
    return ""


def cut(path: Path) -> bool:
    """Empty a log that is longer than `MOST_BYTES`, and keep its end beside it as ``NAME.old``.

    False: it is short, or the file system refuses.
    """
    with contextlib.suppress(OSError):
        if path.stat().st_size <= MOST_BYTES:
            return False
        with path.open("rb+") as log:
            log.seek(-KEPT_BYTES, os.SEEK_END)
            path.with_name(f"{path.name}.old").write_bytes(log.read(KEPT_BYTES))
            log.truncate(0)
        return True
    return False


READ_BYTES = 1 << 20
"""Per read of the socket: large enough to hide the call."""
DUMP_S = 0.5
"""From the request for stacks to SIGKILL: writing them takes milliseconds."""
LEAVE_S = 5.0
"""From the closed socket to SIGKILL."""

_tasks: set[asyncio.Task[Any]] = set()
"""Running ones of `spawn`: a loop holds no task."""


def spawn(work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    """Run a task to its end, also where nobody waits for it; the loop's exception handler gets an error at once."""
    task = asyncio.get_running_loop().create_task(work)
    _tasks.add(task)
    task.add_done_callback(_ended)
    return task


def _ended(task: asyncio.Task[None]) -> None:
    _tasks.discard(task)
    if not task.cancelled():
        task.result()


def _ignore_job_signals() -> None:
    """Run in the child before it becomes the engine; ignored signals stay ignored across exec.

    Slurm signals every process of a step, and an engine that dies of the notice to save could not save.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)


def send_all(children: Sequence[Child], message: Any) -> None:
    """Send one message to all of these that live, encoded once: a batch has tens of megabytes."""
    live = [child for child in children if not child.ended]
    frame = live[0]._outbound.frame(message) if live else b""
    for child in live:
        child.send_frame(frame)


class Child:
    """One process.

    ``on_message`` and ``on_exit`` are called in the loop; ``on_exit`` exactly once, after the last message.
    """

    live: ClassVar[set[int]] = set()
    """Process ids of all children of this process that are not reaped."""
    starting: ClassVar[int] = 0
    """Children whose process id is not known yet."""

    def __init__(
        self,
        name: str,
        outbound: Codec[Any],
        inbound: Codec[Any],
        on_message: Callable[[Child, Any], None],
        on_exit: Callable[[Child, int], None],
    ) -> None:
        self.name = name
        self._outbound, self._inbound = outbound, inbound
        self._on_message, self._on_exit = on_message, on_exit
        self._writer: asyncio.StreamWriter | None = None
        self._queue: list[bytes] = []
        self._process: asyncio.subprocess.Process | None = None
        self._read_done = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.fault = ""
        """Why it was killed for what it sent."""
        self.log_start = 0
        """Bytes of its log before its start."""
        self.ended = False
        self.stopping = False
        """True once the agent itself asked the child to leave."""

    @property
    def pid(self) -> int:
        return self._process.pid if self._process else 0

    async def start(self, argv: Sequence[str], environment: dict[str, str], log: Path) -> None:
        """Start ``argv + ["--socket", descriptor]``; messages sent before wait.  Raises `OSError`."""
        for folder in (log.parents[1], log.parent):
            # Not those above them: nobody makes a run directory again that was removed.
            folder.mkdir(exist_ok=True)
        ours, theirs = socket.socketpair()
        reader, self._writer = await asyncio.open_connection(sock=ours)
        self._writer.writelines(self._queue)
        self._queue.clear()
        Child.starting += 1
        try:
            with theirs, log.open("ab", buffering=0) as output:
                self.log_start = output.tell()
                self._process = await asyncio.create_subprocess_exec(
                    *argv,
                    "--socket",
                    str(theirs.fileno()),
                    pass_fds=(theirs.fileno(),),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    env=environment,
                    start_new_session=True,
                    preexec_fn=_ignore_job_signals,
                )
            Child.live.add(self._process.pid)
        except OSError:
            self._writer.close()
            raise
        finally:
            Child.starting -= 1
        spawn(self._read(reader, self._writer))
        self._task = spawn(self._watch())

    def send(self, message: Any) -> None:
        """Send one message, or drop it if the child is gone.

        What a child does not read waits: the owner ends one that gives no sign of life.
        """
        send_all([self], message)

    def send_frame(self, frame: bytes) -> None:
        if self._writer is None:
            self._queue.append(frame)
        elif not self._writer.is_closing():
            self._writer.write(frame)

    def kill(self) -> None:
        if self._process and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    async def end_hung(self) -> None:
        """End a child that makes no progress: stacks into its log (`dump_on_request`), then SIGKILL."""
        if self._process and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, DUMP_SIGNAL)
            await asyncio.sleep(DUMP_S)
            self.kill()

    async def stop(self, leave_s: float = LEAVE_S) -> None:
        """Close the socket, SIGKILL a child that does not leave, and return when it is gone."""
        self.stopping = True
        if self._writer is not None:
            self._writer.close()
        process = self._process
        if process is None:
            return
        try:
            await asyncio.wait_for(process.wait(), leave_s)
        except TimeoutError:
            self.kill()
        if self._task is not None:
            await self._task

    async def _read(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        buffer = FrameBuffer()
        try:
            while chunk := await reader.read(READ_BYTES):
                for body in buffer.feed(chunk):
                    self._on_message(self, self._inbound.decode(body))
        except (ConnectionError, FrameError) as error:
            if isinstance(error, FrameError):
                self.fault = f"it sent what cannot be read ({error})"
                self.kill()
        except Exception as error:
            # A defect of ours in the handler of a message: whoever runs the loop must hear of it, or the run would wait
            # for an answer that was lost.
            asyncio.get_running_loop().call_exception_handler(
                {"message": f"a message of {self.name}", "exception": error}
            )
        finally:
            self._read_done.set()
            writer.close()

    async def _watch(self) -> None:
        assert self._process is not None
        code = await self._process.wait()
        Child.live.discard(self._process.pid)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._read_done.wait(), LEAVE_S)
        # The group may hold the child's own workers; it is ours alone, so nothing else can be hit.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self.ended = True
        self._queue.clear()
        self._on_exit(self, code)
