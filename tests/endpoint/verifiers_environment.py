"""The real verifiers, for nightly tests: an environment that is made once, in the folder of caches."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from libra_hpc.files import cache_folder

GREETINGS = Path(__file__).with_name("greetings.py")


def verifiers_python() -> Path:
    """Its interpreter; made by the verb, from the index of this machine."""
    folder = cache_folder() / "verifiers"
    program = Path(sys.executable).with_name("libra-hpc")
    done = subprocess.run([program, "env", "install", "verifiers", folder], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder / "bin/python"
