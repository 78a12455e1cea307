"""The real verifiers, for nightly tests: an environment that is made once, in the folder of caches."""

from __future__ import annotations

from pathlib import Path

from libra_hpc_envs import install

from libra_hpc.files import cache_folder

GREETINGS = Path(__file__).with_name("greetings.py")


def verifiers_python() -> Path:
    """Its interpreter; made as the page says, from the index of this machine."""
    python = install.make_venv(cache_folder() / "verifiers")
    install.pip(python, "-r", str(install.HERE / "verifiers.txt"))
    return python
