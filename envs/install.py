"""Make the virtual environment of one requirement set: ``python3 envs/install.py cpu --venv .venv --extra dev``.

- ``login``, ``cpu``: complete and pinned -> ``pip --no-deps``, so no dependency brings CUDA builds to a CPU machine.
- ``cuda``: dependencies differ with the driver -> pip resolves them.
- ``login``, or ``--extra compile`` -> scheduler and simulator are compiled too (`compile.py`): `check` simulates.
- The stamp in the environment matches the hash of pins, Python and checkout -> nothing is installed.
- ``--to-node`` -> one file with the environment, and a program that unpacks it once a node.

Standard library only, and any Python 3 can read it: this file runs before anything is installed.
"""

import argparse
import hashlib
import json
import platform
import shlex
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

# Here, as annotations below end an older one with a traceback: RHEL 8 has 3.6.
if sys.version_info < (3, 11):  # noqa: UP036
    sys.exit("error: Python 3.11 or newer is needed, and %s is %d.%d." % (sys.executable, *sys.version_info[:2]))  # noqa: UP031

PIPS = 2
"""Beside the one that installs torch: each unpacks on one core."""
HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
SETS: dict[str, tuple[str, ...]] = {"login": ("login", "compile"), "cpu": ("login", "cpu"), "cuda": ("login", "cuda")}
EXTRAS: dict[str, tuple[str, ...]] = {"compile": ("compile",), "dev": ("compile", "dev")}
STAMP = "libra-hpc.json"
CPU_TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
"""PyTorch's index of CPU builds, for when pip's configured sources lack the ``+cpu`` build; PyPI never has it."""
PINNED_PYTHON = (3, 11)
"""The wheels in ``cpu.txt`` need this Python version."""
RARE = r"/site-packages/((.*/)?tests?|anthropic|transformers/models)/"
"""What is seldom or never imported, and is a quarter of all sources: a model is one of four hundred families."""
ON_NODE = """\
#!/bin/bash
# The Python of {folder}; in a step of Slurm that of its copy on the node's own disk, which the first process makes.
shared={folder} cache="${{TMPDIR:-/tmp}}/cache-$UID"
own="$cache/environment-{number}"
if [ -n "$SLURM_STEP_ID" ] && mkdir -pm 700 "$cache" && [ -O "$cache" ] && [ ! -L "$cache" ]; then
  exec 9>>"$own.lock" && flock 9
  if [ ! -d "$own" ]; then
    rm -rf "$own.part" && mkdir "$own.part" && tar -xf "$shared/environment-{number}.tar" -C "$own.part" &&
      mv "$own.part" "$own"
  fi
  exec 9>&-
  [ ! -d "$own" ] || exec "$own/bin/python" "$@"
  rm -rf "$own.part"
  echo "no copy of the environment on the disk of $(hostname): $shared is used" >&2
fi
exec "$shared/bin/python" "$@"
"""
"""``bin/python-on-node``. The folder is that of compiled code (`libra_hpc.slurm.writer.CACHE_FOLDER`): others could
put code into another one."""
_NETWORK_SIGNS = (
    "NewConnectionError",
    "Max retries exceeded",
    "name resolution",
    "Network is unreachable",
    "ConnectTimeout",
    "ProxyError",
)


class InstallError(Exception):
    """A failure whose message is one sentence with what to change."""


def requirements(names: tuple[str, ...]) -> list[str]:
    """Pins of the named sets, without comments."""
    lines = [line.strip() for name in names for line in (HERE / f"{name}.txt").read_text().splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


def fingerprint(names: tuple[str, ...]) -> str:
    """Hash of the pins, pyproject.toml, this interpreter's version and the checkout's path."""
    facts = [platform.python_version(), str(ROOT), (ROOT / "pyproject.toml").read_text(), *requirements(names), *names]
    return hashlib.sha256("\0".join(facts).encode()).hexdigest()


def check_python(target: str) -> None:
    """Raise `InstallError` when the set does not support this interpreter."""
    here = sys.version_info[:2]
    if here < PINNED_PYTHON or (target == "cpu" and here != PINNED_PYTHON):
        wanted = ".".join(map(str, PINNED_PYTHON)) + ("" if target == "cpu" else " or newer")
        raise InstallError(
            f"the {target!r} set needs Python {wanted}, and {sys.executable} is {platform.python_version()}; run this"
            " file with that one."
        )


def make_venv(folder: Path) -> Path:
    """Return the environment's python; makes the environment unless its interpreter is present and current."""
    python = folder / "bin" / "python"
    if python.exists():
        probe = subprocess.run(
            [str(python), "-c", "import pip, platform; print(platform.python_version())"],
            capture_output=True,
            text=True,
        )
        if probe.returncode == 0 and probe.stdout.strip() == platform.python_version():
            return python
    if folder.exists() and any(folder.iterdir()) and not (folder / "pyvenv.cfg").exists():
        raise InstallError(f"{folder} exists and is no virtual environment; name another folder with --venv.")
    done = subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], capture_output=True, text=True)
    if done.returncode:
        if "ensurepip" in done.stdout + done.stderr:
            raise InstallError(
                f"{sys.executable} lacks ensurepip and cannot make a virtual environment; on Debian: apt-get install"
                " python3-venv."
            )
        raise InstallError(
            f"no virtual environment could be made at {folder}: {(done.stderr or done.stdout).strip().splitlines()[-1]}"
        )
    return python


def pip(python: Path, *arguments: str) -> None:
    """Run ``pip install``; raises `InstallError` with the reason."""
    options = ["--no-input", "--disable-pip-version-check", "--no-warn-script-location", "--progress-bar=off"]
    command = [str(python), "-m", "pip", "install", "--quiet", *options, *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode == 0:
        return
    # pip reports an unreachable index as "no matching distribution", below the connection errors.
    if any(sign in done.stdout for sign in _NETWORK_SIGNS):
        raise InstallError(
            "no package index could be reached: check the network, or point pip at a mirror (pip config set"
            " global.index-url URL)."
        )
    lines = done.stdout.strip().splitlines() or ["pip failed without a message"]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR")] or lines
    raise InstallError(f"pip could not install the packages: {errors[-1]}")


def install_cpu_torch(python: Path, pin: str) -> None:
    """Install the ``+cpu`` build from pip's configured sources, else from PyTorch's CPU index."""
    try:
        pip(python, "--no-compile", "--no-deps", pin)
    except InstallError as configured:
        try:
            pip(python, "--no-compile", "--no-deps", "--index-url", CPU_TORCH_INDEX, pin)
        except InstallError as upstream:
            raise InstallError(
                f"{pin} is neither in pip's configured sources ({configured}) nor at {CPU_TORCH_INDEX} ({upstream})"
            ) from upstream


def compile_bytes(python: Path) -> subprocess.Popen[bytes]:
    """Start to write the ``.pyc`` files of what is installed, and of this checkout: processes that may write none
    (``PYTHONDONTWRITEBYTECODE``, a folder of another user) would compile every module at each start."""
    packages = python.parents[1] / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
    folders = [packages, *(ROOT / name for name in ("libra_hpc", "cli", "envs", "sbatch"))]
    command = [str(python), "-m", "compileall", "-q", "-j", "4", "-x", RARE, *map(str, folders)]
    # A few packages have files for other versions of Python.
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def compile_scheduler(folder: Path, names: tuple[str, ...]) -> None:
    """Compile the scheduler if the extra is installed; without a C compiler it runs interpreted."""
    if "compile" in names:
        subprocess.run([str(folder / "bin" / "python"), "-m", "libra_hpc_envs.compile", "--quiet"], check=False)


def install(target: str, folder: Path, extras: tuple[str, ...]) -> str:
    """Install what the environment lacks; returns one line with what was done."""
    check_python(target)
    names = tuple(dict.fromkeys((*SETS[target], *(name for extra in extras for name in EXTRAS[extra]))))
    wanted, stamp = fingerprint(names), folder / STAMP
    try:
        present = json.loads(stamp.read_text())
    except (OSError, ValueError):
        present = {}
    # A set that was installed with more extras also serves a request for fewer.
    if wanted in present.get("satisfies", []) and (folder / "bin" / "libra-hpc").exists():
        compile_scheduler(folder, names)
        return f"{folder} is up to date ({target})"
    started = time.monotonic()
    python = make_venv(folder)
    stamp.unlink(missing_ok=True)
    pins = requirements(names)
    print(f"installing {len(pins)} packages ({', '.join(names)}) into {folder} ...", flush=True)
    # `compile_bytes` does it on several cores.
    if target == "cuda":
        pip(python, "--no-compile", *pins)
    else:
        torch, others = ([pin for pin in pins if pin.endswith("+cpu") == ours] for ours in (True, False))
        with ThreadPoolExecutor() as pool:
            begun = [pool.submit(install_cpu_torch, python, pin) for pin in torch]
            begun += [pool.submit(pip, python, "--no-compile", "--no-deps", *others[n::PIPS]) for n in range(PIPS)]
        for one in begun:
            one.result()
    pip(python, "--no-deps", "--no-build-isolation", "--editable", str(ROOT))
    with compile_bytes(python):
        compile_scheduler(folder, names)
    smaller = [fingerprint(names[:count]) for count in range(len(SETS[target]), len(names) + 1)]
    stamp.write_text(json.dumps({"set": target, "extras": extras, "satisfies": smaller}, indent=1) + "\n")
    return f"{folder} is ready ({', '.join(names)}) after {time.monotonic() - started:.0f} s"


def to_node(folder: Path) -> str:
    """Write the environment into one file, and the program `ON_NODE`; returns one line with what was done."""
    number = time.time_ns()
    image, program = folder / f"environment-{number}.tar", folder / "bin" / "python-on-node"
    command = ["tar", "-cf", str(image), "-C", str(folder), "--exclude=./environment-*", "."]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        image.unlink(missing_ok=True)
        raise InstallError(f"{image} could not be written: {done.stderr.strip() or 'tar failed'}")
    made = program.with_suffix(".new")
    made.write_text(ON_NODE.format(folder=shlex.quote(str(folder)), number=number))
    made.chmod(0o755)
    made.replace(program)
    for old in folder.glob("environment-*.tar"):
        if old != image:
            old.unlink()
    return f"{image.stat().st_size / 1e9:.1f} GB for each node; compute.python = '{program}' uses them"


def main(arguments: list[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description="Make the virtual environment of one requirement set.")
    parser.add_argument(
        "target", choices=sorted(SETS), metavar="SET", help="login (light), cpu or cuda (with the engines)"
    )
    parser.add_argument(
        "--venv", type=Path, default=ROOT / ".venv", help="folder of the environment (default: .venv in the checkout)"
    )
    parser.add_argument(
        "--extra",
        choices=EXTRAS,
        action="append",
        default=[],
        help="compile: the scheduler as machine code; dev: that, tests and linters",
    )
    parser.add_argument(
        "--to-node", action="store_true", help="also bin/python-on-node, which runs from a copy on the node's disk"
    )
    given = parser.parse_args(arguments)
    try:
        print(install(given.target, given.venv.absolute(), tuple(dict.fromkeys(given.extra))))
        if given.to_node:
            print(to_node(given.venv.absolute()))
    except InstallError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
