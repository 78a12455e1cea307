"""What the tests of faults share: calls that fail, and no run outlives its test."""

from __future__ import annotations

import shutil
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from libra_hpc.errors import UserError
from libra_hpc.facts.rundir import RunDir
from libra_hpc.slurm import local
from libra_hpc.slurm.queue.job_record import read_job

from .harness import ROWS


def pytest_itemcollected(item: pytest.Item) -> None:
    """Each test is a whole run."""
    item.add_marker(pytest.mark.slow)


class FaultyFiles:
    """Makes calls on files of the runs that are started afterwards fail (`faulty_fs.c`)."""

    def __init__(self, folder: Path, library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._left, self._library, self._monkeypatch = folder / "left", library, monkeypatch

    def set(self, prefix: Path, call: str, *, number: int = 0, seconds: int = 0, program: str = "") -> None:
        """``call``, ``seconds`` and ``program`` as in `faulty_fs.c`; ``number``: its errno."""
        self.left(0)
        names = {"PREFIX": str(prefix), "CALL": call, "ERRNO": str(number), "SLEEP_S": str(seconds), "PROGRAM": program}
        for name, value in (*names.items(), ("LEFT", str(self._left))):
            self._monkeypatch.setenv(f"FAULTY_{name}", value)
        self._monkeypatch.setenv("LD_PRELOAD", str(self._library))

    def left(self, calls: int, number: int = 0) -> None:
        """How many calls are still to fail, now, and with which errno; 0: that of `set`."""
        # Processes have the file mapped, so it keeps its place.
        with self._left.open("r+b" if self._left.exists() else "wb", buffering=0) as file:
            file.write(struct.pack("ii", calls, number))

    @property
    def spent(self) -> bool:
        return struct.unpack("ii", self._left.read_bytes())[0] == 0


@pytest.fixture(scope="session")
def faulty_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    library = tmp_path_factory.mktemp("faulty") / "faulty_fs.so"
    source = Path(__file__).with_name("faulty_fs.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(source), "-ldl"], check=True)
    return library


@pytest.fixture
def faulty(tmp_path: Path, faulty_library: Path, monkeypatch: pytest.MonkeyPatch) -> FaultyFiles:
    return FaultyFiles(tmp_path, faulty_library, monkeypatch)


@pytest.fixture(autouse=True)
def ended(tmp_path: Path) -> Iterator[None]:
    """A failed test leaves a run behind, which would disturb those after it."""
    yield
    for folder in (tmp_path / "runs").glob("*-*"):
        try:
            if read_job(RunDir(folder)).executor == "local":
                local.cancel(RunDir(folder))
        except UserError:
            continue


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """The table of `make chaos`; a run that a fault slowed down shows it as its longest time without a step."""
    if ROWS:
        terminalreporter.section("faults: longest time without a step, and how the run ended")
    for name, seconds, state in ROWS:
        terminalreporter.write_line(f"{seconds:6.1f} s  {state:<10}  {name}")
