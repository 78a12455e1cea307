"""A weight file that is being received: chunks in the order of their offsets, summed as they come."""

from __future__ import annotations

import errno
import os
import shutil
import zlib
from pathlib import Path

from .flow import WeightFile


class Incoming:
    """Raises `OSError` when the folder has no room for the whole file."""

    def __init__(self, folder: Path, version: int, size: int, crc32: int) -> None:
        free = shutil.disk_usage(folder).free
        if free < size:
            raise OSError(errno.ENOSPC, f"{folder} has {free >> 20} MiB free, the file needs {size >> 20} MiB")
        self.file = WeightFile(version, folder / f".incoming-{version}", size, crc32)
        self._handle = self.file.path.open("wb", buffering=0)
        self._sum = 0
        self.received = 0

    @property
    def complete(self) -> bool:
        return self.received == self.file.size

    @property
    def intact(self) -> bool:
        return self._sum == self.file.crc32

    def write(self, chunk: bytes | bytearray) -> None:
        """Append a chunk; raises `OSError` when there is no room.

        It is summed at once: the agent's loop must not stop for the seconds that the sum of a whole file takes.
        """
        view = memoryview(chunk)
        while view:
            view = view[os.write(self._handle.fileno(), view) :]
        self._sum = zlib.crc32(chunk, self._sum)
        self.received += len(chunk)

    def finish(self, path: Path) -> WeightFile:
        self._handle.close()
        self.file.path.replace(path)
        return self.file._replace(path=path)

    def abandon(self) -> None:
        self._handle.close()
        self.file.path.unlink(missing_ok=True)
