"""Loads the libmpi of PyPI's ``mpich`` by path, so that mpi4py uses it whatever MPI this machine has.

- mpi4py searches the environment's ``lib``, then the loader's path: in an environment of another form (``pip
  --target``, one beside another) it takes the machine's MPI, and every agent becomes a world of its own.
- libmpi searches ``LD_LIBRARY_PATH`` for UCX and libfabric before its own folder: a container's UCX is another one.
- A library that is loaded already is not searched, so all are loaded here, the needed ones first.
- ``MPI4PY_MPIABI`` or ``MPI4PY_LIBMPI`` is set, or there is no ``mpich`` package -> mpi4py chooses; a site may have its
  own MPI.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

LIBMPI = "libmpi.so.12"
NEEDED = ("libfabric.so.1", "libucm.so.0", "libucs.so.0", "libuct.so.0", "libucp.so.0")
"""Libraries that libmpi needs, from its folder ``mpich``; each needs only earlier ones."""
ABI, LIBRARY = "MPI4PY_MPIABI", "MPI4PY_LIBMPI"
"""mpi4py's variables: which of its builds to import, and for which library."""


@contextmanager
def mpich_chosen() -> Iterator[Path | None]:
    """Load the library; within the context mpi4py imports its build for MPICH.

    The value is the library's path, None when mpi4py chooses. Raises `OSError` when it cannot be loaded.
    """
    path = None if os.environ.get(ABI) or os.environ.get(LIBRARY) else installed_libmpi()
    if path is None:
        yield None
        return
    for library in (*(path.parent / "mpich" / name for name in NEEDED), path):
        if library.exists():
            _load(library)
    os.environ[ABI] = "mpich"
    try:
        yield path
    finally:
        # Children have to load the library themselves.
        del os.environ[ABI]


def installed_libmpi() -> Path | None:
    """The library of the installed package ``mpich``; None without one."""
    try:
        return find_libmpi(distribution("mpich"))
    except PackageNotFoundError:
        return None


def find_libmpi(package: Distribution) -> Path | None:
    """The library of the package, None where it has none."""
    recorded = [Path(str(package.locate_file(file))) for file in package.files or () if file.name == LIBMPI]
    # pip --target moves the folder without changing the paths in its record.
    found = [path.resolve() for path in (*recorded, Path(str(package.locate_file("lib"))) / LIBMPI) if path.is_file()]
    return found[0] if found else None


def _load(library: Path) -> None:
    # ctypes binds all functions at once, and libucm calls some of libucs, which needs it: bound when called.
    libc = ctypes.CDLL(None)
    libc.dlopen.restype, libc.dlopen.argtypes = ctypes.c_void_p, (ctypes.c_char_p, ctypes.c_int)
    if not libc.dlopen(os.fsencode(library), os.RTLD_LAZY | os.RTLD_LOCAL):
        libc.dlerror.restype = ctypes.c_char_p
        raise OSError((libc.dlerror() or b"").decode(errors="replace"))
