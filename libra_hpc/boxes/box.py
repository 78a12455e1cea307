"""One episode's box: a folder, commands that run in it, and their end."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import secrets
import signal
import stat
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, NamedTuple

from libra_hpc.config.job import EnvSection
from libra_hpc.errors import OperationError
from libra_hpc.process.child_environment import direct
from libra_hpc.process.reaper import become_subreaper, children_of, descendants_of, end_marked

from .folder import opened, place, remove, used
from .providers import JUDGE_HOME, WORK, BoxedCommand, Provider, size

OUTPUT_BYTES = 1 << 20
"""Most bytes of a command's output; of a longer one the end is kept."""
READ_BYTES = 1 << 26
"""Most bytes of a file that is read: one with holes may be larger than the disk, and is read into the host's memory."""
DRAIN_S, END_S, POLL_S = 1.0, 10.0, 0.002
"""Most seconds for output that a process beyond the box holds open, and for the end of all that is killed; seconds
between two looks at that."""
NODE_ERRORS = {errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.ESTALE, errno.EMFILE, errno.ENFILE}
"""Errors of a folder that are its node's, whatever an agent leaves there."""
OF_AGENT = ContextVar("OF_AGENT", default=False)
"""Whether this code is the agent's: a task or thread of a coroutine may outlive it."""
WATCH_S = 1.0
"""Seconds between two looks at what all processes of a box use."""


CANNOT_START = 126
"""Exit code of a command that is there and cannot be started, as shells have it."""


class Ran(NamedTuple):
    """How a command ended."""

    exit_code: int
    """-n after signal n."""
    output: str
    """Standard output and error, as they came."""
    limit: str = ""
    """The limit that ended it: ``time``, ``memory``, ``processes``, ``disk``; empty: none."""


class Box:
    """``folder``: below which its own is made; ``env.sandbox`` has become ``provider``."""

    marks: ClassVar[set[int]] = set()
    """Marks of the commands in flight, of all boxes."""

    def __init__(self, folder: str | Path, provider: Provider, env: EnvSection) -> None:
        become_subreaper()
        self._provider, self._env = provider, env
        self.root = Path(tempfile.mkdtemp(prefix="box-", dir=folder))
        self._folder = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY)
        """The same for everything that is done in it: its name may be another folder's later."""
        self.moved_aside = 0
        """How often something of the agent's stood where a mount belongs."""
        self.unread: OSError | None = None
        """The last error of a file that the agent left so, or did not leave."""
        self.home = provider.home or str(self.root)
        """The folder as its commands see it."""
        self._judge: Path | None = None
        """A judge's home, once one is asked."""
        self._own = {"HOME": self.home}
        self._running = set[_Running]()
        self._watch: asyncio.Task[None] | None = None

    async def run(
        self,
        command: str | Sequence[str],
        *,
        timeout_s: float = 600.0,
        env: Mapping[str, str] | None = None,
        mount: Mapping[str, str] | None = None,
        socket: Path | None = None,
    ) -> Ran:
        """Run a command (text: by the shell) until it ends, and end what it leaves.

        ``mount``: files and folders that it can read, by their place in the box. Raises `OperationError` when the box
        cannot run anything.
        """
        self._stand()
        if mount and not self._provider.mounts:
            why = "env.sandbox = 'none' and an env.box without {mounts} cannot"
            raise OperationError(f"The box cannot show {', '.join(mount)}: {why}.")
        line = ["/bin/sh", "-c", command] if isinstance(command, str) else list(command)
        with contextlib.closing(_Output()) as output:
            try:
                running = await self._started(line, output, env or {}, mount or {}, socket)
            except OSError as error:  # a command too long, or the folder as the agent left it
                return Ran(CANNOT_START, f"{error}\n")
            try:
                async with asyncio.timeout(timeout_s or None):
                    await output.stood
                    running.below = children_of(running.process.pid) if self._provider.home else ()
                    await running.process.wait()
            except TimeoutError:
                running.end("time")
            finally:
                await self._ended(running)
            await asyncio.wait({output.ended}, timeout=DRAIN_S)
            ran = Ran(await running.process.wait(), output.text, running.limit)
        if not (output.stands or ran.limit):
            raise OperationError(f"The box did not start: {ran.output.strip()[-300:]}")
        return ran

    def judge(self) -> None:
        """From now on commands are a judge's: they have an empty home, so that no settings or modules that the agent
        left there are theirs. The working folder, where its solution lies, is the same."""
        self._judge = Path(tempfile.mkdtemp(prefix="box-home-", dir=self.root.parent))
        self._own = {"HOME": JUDGE_HOME if self._provider.home else str(self._judge), "PYTHONNOUSERSITE": "1"}

    async def _started(
        self,
        line: Sequence[str],
        output: _Output,
        env: Mapping[str, str],
        mount: Mapping[str, str],
        socket: Path | None,
    ) -> _Running:
        env = {**env, **direct({**os.environ, **env})}
        given = {"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C.UTF-8", **self._own, **env}
        exports = {name: given[name] for name in self._own}
        limits, network = self._env.limits, self._env.network == "host"
        Box.marks.add(output.mark)
        try:
            mounts = self._mounted(mount)
            command = BoxedCommand(self.root, network, mounts, limits, output.mark, socket, self._judge, exports)
            process = await asyncio.create_subprocess_exec(
                *self._provider.wrap(command, line),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output.theirs,
                stderr=output.theirs,
                cwd=str(self.root),
                env=given,
                process_group=0,
            )
        except OSError as error:
            Box.marks.discard(output.mark)
            # Without isolation an agent can remove its own folder.
            removed = not self._provider.home and error.filename == str(self.root)
            if removed or error is self.unread or error.errno == errno.E2BIG:
                raise
            raise OperationError(f"The box cannot start {line[0]!r}: {error}.") from error
        finally:
            os.close(output.theirs)
        running = _Running(process, output.mark)
        self._running.add(running)
        if self._watch is None:
            self._watch = asyncio.create_task(self._watched())
        return running

    def _mounted(self, mount: Mapping[str, str]) -> dict[str, str]:
        """All mounts; places in the folder are made before, because what mounts would follow links there."""
        mounts = {path: path for path in (*self._provider.shown(), *self._env.mounts)} | dict(mount)
        mounts = {os.path.normpath(inside): outside for inside, outside in mounts.items()}
        for inside, outside in mounts.items():
            if inside.startswith(f"{WORK}/"):
                with self._noted():
                    self.moved_aside += place(self._folder, inside.removeprefix(WORK), os.path.isdir(outside))
        return mounts

    async def read(self, path: str) -> bytes:
        """Content of a file; the path is relative to the folder, and no link is followed.

        Raises `OSError` whatever else the agent has put there: a folder, a link, more than `READ_BYTES`.
        """
        with self._noted(), open(self._opened(path, os.O_RDONLY), "rb") as file:
            content = file.read(READ_BYTES + 1)
            if len(content) > READ_BYTES:
                raise OSError(errno.EFBIG, f"more than {READ_BYTES:,} bytes", path)
        return content

    async def write(self, path: str, content: bytes | str) -> None:
        """Write a file, and make the folders that it needs; raises as `read`."""
        with self._noted(), open(self._opened(path, os.O_WRONLY | os.O_CREAT), "wb") as file:
            file.truncate(0)
            file.write(content.encode() if isinstance(content, str) else content)

    def _opened(self, path: str, flags: int) -> int:
        self._stand()
        return opened(self._folder, path.removeprefix(f"{self.home}/"), flags)

    def _stand(self) -> None:
        """Give the folder the rights that its agent has taken away, without which nothing could judge it."""
        if self._folder < 0 or (self._judge and OF_AGENT.get()):
            raise OperationError("The box is closed.")
        os.fchmod(self._folder, stat.S_IRWXU)

    @contextlib.contextmanager
    def _noted(self) -> Iterator[None]:
        """Note an error that is not the node's."""
        try:
            yield
        except OSError as error:
            self.unread = self.unread if error.errno in NODE_ERRORS else error
            raise

    async def end_processes(self) -> None:
        """Kill whatever runs in the box, and wait for its end."""
        for running in list(self._running):
            await self._ended(running)

    async def _ended(self, running: _Running) -> None:
        """End a command and what it has left; raises `OperationError` where that does not end."""
        running.end()
        await running.process.wait()
        Box.marks.discard(running.mark)
        until = time.monotonic() + END_S
        # This process gets what the killed leave: a namespace, which dies a moment later, or what goes on without one.
        while end_marked(Box.marks):
            if time.monotonic() > until:
                raise OperationError(f"Processes of a box have not ended {END_S:g} s after they were killed.")
            await asyncio.sleep(POLL_S)
        self._running.discard(running)

    async def close(self) -> None:
        await self.end_processes()
        if self._watch is not None:
            self._watch.cancel()
        if self._folder >= 0:
            os.close(self._folder)
            self._folder = -1
        for folder in self._folders:
            try:
                folder.rmdir()
            except OSError:  # it has files, whose removal takes its time
                await asyncio.to_thread(remove, folder)

    @property
    def _folders(self) -> list[Path]:
        return [self.root, self._judge] if self._judge else [self.root]

    async def _watched(self) -> None:
        """End what uses more than the limits of all processes together."""
        limits = self._env.limits
        most_memory, most_disk = size(limits.memory), size(limits.disk)
        while True:
            await asyncio.sleep(WATCH_S)
            for running in self._running:
                pids = descendants_of(running.process.pid)
                memory = sum(_resident(pid) for pid in pids)
                if limits.processes and len(pids) > limits.processes:
                    running.end("processes")
                elif most_memory and memory > most_memory:
                    running.end("memory")
            if self._running and most_disk:
                pids = {pid for running in self._running for pid in running.below}
                if await asyncio.to_thread(used, self._folders, pids) > most_disk:
                    for running in self._running:
                        running.end("disk")


@dataclass(eq=False)
class _Running:
    """A command in flight."""

    process: asyncio.subprocess.Process
    mark: int
    """What its processes carry, and those that they leave to others (`libra_hpc.process.reaper.LOCKS`)."""
    limit: str = ""
    """The limit that ended it."""
    below: Collection[int] = ()
    """First processes of its namespace, whose ``/tmp`` and ``/dev/shm`` count."""

    def end(self, limit: str = "") -> None:
        self.limit = self.limit or limit
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)


class _Output:
    """A pipe of our own: of its, `asyncio` waits for the last writer before it reports that a process has ended."""

    def __init__(self) -> None:
        self.mark, self.stands = secrets.randbits(60), False
        """What the box prints before the command runs, and whether it has come."""
        self._ours, self.theirs = os.pipe()
        self._loop = asyncio.get_running_loop()
        self._read = bytearray()
        self.stood: asyncio.Future[None] = self._loop.create_future()
        """Done when it has come, or nothing comes any more."""
        self.ended: asyncio.Future[None] = self._loop.create_future()
        os.set_blocking(self._ours, False)
        self._loop.add_reader(self._ours, self._readable)

    @property
    def text(self) -> str:
        return self._read.decode(errors="replace")

    def _readable(self) -> None:
        chunk = os.read(self._ours, 1 << 16)
        self._read += chunk
        mark = f"{self.mark}\n".encode()
        if not self.stands and (at := self._read.find(mark)) >= 0:
            self.stands = True
            del self._read[at : at + len(mark)]
        if (self.stands or not chunk) and not self.stood.done():
            self.stood.set_result(None)
        del self._read[: max(0, len(self._read) - OUTPUT_BYTES)]
        if not chunk and not self.ended.done():
            self._loop.remove_reader(self._ours)
            self.ended.set_result(None)

    def close(self) -> None:
        self._loop.remove_reader(self._ours)
        os.close(self._ours)


def _resident(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return 0
