"""The MPI of the agents is that of the package ``mpich``, whatever the machine has."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from importlib.metadata import Distribution, PathDistribution
from pathlib import Path

import pytest

if importlib.util.find_spec("mpi4py") is None:
    pytest.skip("mpi4py is not installed", allow_module_level=True)

from libra_hpc.mesh.mpi_library import ABI, LIBMPI, LIBRARY, NEEDED, find_libmpi, installed_libmpi, mpich_chosen

PROGRAM = """
import os
import mpi4py
mpi4py.rc.initialize = False
from libra_hpc.mesh.mpi_library import mpich_chosen
with mpich_chosen():
    from mpi4py import MPI
print(MPI.Get_library_version().split()[0], os.environ.get("MPI4PY_MPIABI"))
print(*{line.split()[-1] for line in open("/proc/self/maps") if "/libmpi.so" in line or "/libuc" in line}, sep="\\n")
"""


def package(site: Path, recorded: str) -> Distribution:
    """An installed ``mpich`` whose record has one library."""
    info = site / "mpich-5.0.2.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mpich\nVersion: 5.0.2\n")
    (info / "RECORD").write_text(f"{recorded},,\n")
    return PathDistribution(info)


def test_libraries_of_the_same_name_on_the_loaders_path_are_not_taken(tmp_path: Path) -> None:
    own = installed_libmpi()
    if own is None:
        pytest.skip("PyPI's mpich is not installed")
    for name in ("libmpi.so", LIBMPI, "libmpi.so.40", *NEEDED):
        (tmp_path / name).write_bytes(b"")
    environment = {name: value for name, value in os.environ.items() if name not in (ABI, LIBRARY)}
    environment["LD_LIBRARY_PATH"] = str(tmp_path)

    def ask(program: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)

    assert "file too short" in ask("from mpi4py import MPI").stderr, "otherwise this test shows nothing"
    done = ask(PROGRAM)
    assert done.returncode == 0, done.stderr
    first, *loaded = done.stdout.splitlines()
    assert first == "MPICH None", "the choice is not left to children"
    assert str(own) in loaded
    assert {Path(path).parent for path in loaded} == {own.parent, own.parent / "mpich"}


def test_the_library_is_found_where_the_record_or_pip_target_put_it(tmp_path: Path) -> None:
    site = tmp_path / "venv/lib/python3.11/site-packages"
    recorded = package(site, f"../../{LIBMPI}")
    assert find_libmpi(recorded) is None
    own = tmp_path / "venv/lib" / LIBMPI
    own.write_bytes(b"")
    assert find_libmpi(recorded) == own
    target = package(tmp_path / "target", f"../{LIBMPI}")
    (tmp_path / "target/lib").mkdir()
    (tmp_path / "target/lib" / LIBMPI).write_bytes(b"")
    assert find_libmpi(target) == tmp_path / "target/lib" / LIBMPI


def test_a_choice_of_the_site_is_left_to_mpi4py(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LIBRARY, "/opt/mpi/lib/libmpi.so")
    with mpich_chosen() as path:
        assert path is None
        assert ABI not in os.environ
