"""One episode's box: a folder, commands that run in it, and their end."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import math
import os
import secrets
import signal
import stat
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from libra_hpc.config.job import EnvSection
from libra_hpc.errors import OperationError
from libra_hpc.process.child_environment import direct
from libra_hpc.process.reaper import descendants_of

from .beneath import made, opened
from .providers import JUDGE_HOME, WORK, BoxedCommand, Provider, size

OUTPUT_BYTES = 1 << 20
"""Most bytes of a command's output; of a longer one the end is kept."""
READ_BYTES = 1 << 26
"""Most bytes of a file that is read: one with holes may be larger than the disk, and is read into the host's memory."""
DRAIN_S, POLL_S = 1.0, 0.002
"""Most seconds for output that a process beyond the group holds open, and for the end of all that run; a look takes
20 us."""
NODE_ERRORS = {errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.ESTALE, errno.EMFILE, errno.ENFILE}
"""Errors of a folder that are its node's, whatever an agent leaves there."""
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

    def __init__(self, folder: str | Path, provider: Provider, env: EnvSection) -> None:
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
        self._running: dict[asyncio.subprocess.Process, str] = {}
        """Commands in flight, and the limit that ended them."""
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
                process = await self._started(line, output, env or {}, mount or {}, socket)
            except OSError as error:  # a command too long, or the folder as the agent left it
                return Ran(CANNOT_START, f"{error}\n")
            below = set[int]()
            try:
                try:
                    async with asyncio.timeout(timeout_s or None):
                        await output.stood
                        below = descendants_of(process.pid)
                        await process.wait()
                except TimeoutError:
                    self._end(process, "time")
                # What is left of it holds the output open.
                self._end(process)
                code = await process.wait()
                await asyncio.wait({output.ended}, timeout=DRAIN_S)
                ran = Ran(code, output.text, self._running[process])
            finally:
                self._end(process)
                del self._running[process]
                # A namespace dies a moment after the process that made it.
                until = time.monotonic() + DRAIN_S
                while any(_lives(pid) for pid in below) and time.monotonic() < until:
                    await asyncio.sleep(POLL_S)
        if not (output.stands or ran.limit):
            raise OperationError(f"The box did not start: {ran.output.strip()[-300:]}")
        return ran

    def judge(self) -> None:
        """From now on commands are a judge's: they have an empty home, so that no settings or modules that the agent
        left there are theirs. The working folder, where its solution lies, is the same."""
        self._judge = Path(tempfile.mkdtemp(prefix="box-home-", dir=self.root.parent))

    async def _started(
        self,
        line: Sequence[str],
        output: _Output,
        env: Mapping[str, str],
        mount: Mapping[str, str],
        socket: Path | None,
    ) -> asyncio.subprocess.Process:
        env = {**env, **direct({**os.environ, **env})}
        own = {"HOME": self.home}
        if self._judge is not None:
            own = {"HOME": JUDGE_HOME if self._provider.home else str(self._judge), "PYTHONNOUSERSITE": "1"}
        given = {"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C.UTF-8", **own, **env}
        exports = {name: given[name] for name in own} if self._judge else {}
        limits, network = self._env.limits, self._env.network == "host"
        try:
            mounts = self._mounted(mount)
            command = BoxedCommand(self.root, network, mounts, limits, output.mark, socket, self._judge, exports)
            process = await asyncio.create_subprocess_exec(
                *self._provider.wrap(command, line),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output.theirs,
                stderr=output.theirs,
                cwd=self.root,
                env=given,
                process_group=0,
            )
        except OSError as error:
            if error is self.unread or error.errno == errno.E2BIG:
                raise
            raise OperationError(f"The box cannot start {line[0]!r}: {error}.") from error
        finally:
            os.close(output.theirs)
        self._running[process] = ""
        if self._watch is None:
            self._watch = asyncio.create_task(self._watched())
        return process

    def _stand(self) -> None:
        """Let the folder be there with its rights, which its agent can take away."""
        if self._folder < 0:
            raise OperationError("The box is closed.")
        try:
            same = os.path.samestat(os.lstat(self.root), os.fstat(self._folder))
        except FileNotFoundError:
            same = False
        if not same:
            if self._provider.home:  # no agent in there reaches it
                raise OperationError("The folder of the box is gone.")
            _remove(self.root)
            self.root.mkdir(stat.S_IRWXU)
            os.close(self._folder)
            self._folder, self.moved_aside = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY), self.moved_aside + 1
        os.fchmod(self._folder, stat.S_IRWXU)

    def _mounted(self, mount: Mapping[str, str]) -> dict[str, str]:
        """All mounts; places in the folder are made before, because what mounts would follow links there."""
        mounts = {path: path for path in (*self._provider.shown(), *self._env.mounts)} | dict(mount)
        mounts = {os.path.normpath(inside): outside for inside, outside in mounts.items()}
        for inside, outside in mounts.items():
            if inside.startswith(f"{WORK}/"):
                with self._as_it_is():
                    self.moved_aside += made(self._folder, inside.removeprefix(WORK), os.path.isdir(outside))
        return mounts

    async def read(self, path: str) -> bytes:
        """Content of a file; the path is relative to the folder, which it cannot leave.

        Raises `OSError` whatever else the agent has put there: a folder, a link out, more than `READ_BYTES`.
        """
        with self._as_it_is(), open(opened(self._folder, self._inside(path), os.O_RDONLY), "rb") as file:
            content = file.read(READ_BYTES + 1)
            if len(content) > READ_BYTES:
                raise OSError(errno.EFBIG, f"more than {READ_BYTES:,} bytes", path)
        return content

    async def write(self, path: str, content: bytes | str) -> None:
        """Write a file, and make the folders that it needs; raises as `read`."""
        inside, flags = self._inside(path), os.O_WRONLY | os.O_CREAT
        with self._as_it_is():
            try:
                found = opened(self._folder, inside, flags)
            except FileNotFoundError:
                self.moved_aside += made(self._folder, os.path.dirname(inside))
                found = opened(self._folder, inside, flags)
            with open(found, "wb") as file:
                file.truncate(0)
                file.write(content.encode() if isinstance(content, str) else content)

    def _inside(self, path: str) -> str:
        self._stand()
        return path.removeprefix(f"{self.home}/").lstrip("/") or "."

    @contextlib.contextmanager
    def _as_it_is(self) -> Iterator[None]:
        """Note an error that is the agent's; one of the node is none."""
        try:
            yield
        except OSError as error:
            if error.errno in NODE_ERRORS:
                raise OperationError(f"The folder of a box fails: {error}.") from error
            self.unread = error
            raise

    async def end_processes(self) -> None:
        """Kill whatever runs in the box, and wait for its end."""
        for process in list(self._running):
            self._end(process)
        for process in list(self._running):
            await process.wait()

    async def close(self) -> None:
        await self.end_processes()
        if self._watch is not None:
            self._watch.cancel()
        if self._folder >= 0:
            os.close(self._folder)
            self._folder = -1
        for folder in (self.root, *([self._judge] if self._judge else [])):
            try:
                folder.rmdir()
            except OSError:  # it has files, whose removal takes its time
                await asyncio.to_thread(_remove, folder)

    def _end(self, process: asyncio.subprocess.Process, limit: str = "") -> None:
        self._running[process] = self._running.get(process) or limit
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)

    async def _watched(self) -> None:
        """End what uses more than the limits of all processes together."""
        limits = self._env.limits
        most_memory, most_disk = size(limits.memory), size(limits.disk)
        while True:
            await asyncio.sleep(WATCH_S)
            for process in list(self._running):
                pids = descendants_of(process.pid)
                memory = sum(_resident(pid) for pid in pids)
                if limits.processes and len(pids) > limits.processes:
                    self._end(process, "processes")
                elif most_memory and memory > most_memory:
                    self._end(process, "memory")
            if self._running and most_disk:
                used = await asyncio.to_thread(_used, self.root)
                if used > most_disk:
                    for process in list(self._running):
                        self._end(process, "disk")


class _Output:
    """A pipe of our own: of its, `asyncio` waits for the last writer before it reports that a process has ended."""

    def __init__(self) -> None:
        self.mark, self.stands = secrets.token_hex(16), False
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


def _lives(pid: int) -> bool:
    """Whether a process runs; no zombie does."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def _resident(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return 0


def _remove(folder: Path) -> None:
    # Python's own removal holds a descriptor for each level; folders may lack the rights of their owner.
    subprocess.run(
        ["/bin/sh", "-c", 'rm -rf "$1" || { chmod -R u+rwX "$1"; rm -rf "$1"; }', "sh", str(folder)],
        check=False,
        stderr=subprocess.DEVNULL,
    )


def _used(folder: Path) -> float:
    """Bytes on disk; endless where folders are deeper than a path can be."""
    try:
        return sum(_sizes(folder))
    except (OSError, RecursionError):
        return math.inf


def _readable(error: OSError) -> None:
    """Let the owner read a folder at the next look."""
    if error.errno == errno.ENAMETOOLONG:
        raise error
    with contextlib.suppress(OSError):
        found = os.open(error.filename, os.O_PATH | os.O_NOFOLLOW | os.O_DIRECTORY)
        try:
            os.chmod(f"/proc/self/fd/{found}", os.fstat(found).st_mode & 0o7777 | stat.S_IRWXU)
        finally:
            os.close(found)


def _sizes(folder: Path) -> Iterator[int]:
    for base, _, names in os.walk(folder, onerror=_readable):
        for name in names:
            with contextlib.suppress(OSError):
                yield os.lstat(os.path.join(base, name)).st_blocks * 512
