"""Compile scheduler and simulator with mypyc: ``python -m libra_hpc_envs.compile [--quiet]``, extra ``compile``.

`libra_hpc.compiled` names the modules and finds the build.  The build is made in a temporary folder and renamed into
place, so it is complete or absent; builds of other sources are removed.  Takes half a minute of one core.
"""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
import tempfile
from pathlib import Path

from libra_hpc import compiled

GROUP = "libra_hpc.policies.scheduling.core"
"""The shared library is ``GROUP`` + "__mypyc", inside the package, so that imports find it beside the modules."""


class CompileError(Exception):
    """One sentence that names what is missing."""


def compile_scheduler() -> Path | None:
    """Make the build of these sources; returns its folder, or None if it exists already.

    Raises:
        CompileError: mypyc or a C compiler is missing, or fails, or the environment cannot be written to.
    """
    folder = compiled.build_folder()
    if folder.is_dir():
        return None
    with tempfile.TemporaryDirectory(prefix="libra-hpc-compile-") as scratch:
        made = _build(Path(scratch))
        try:
            compiled.BUILDS.mkdir(parents=True, exist_ok=True)
            staged = Path(tempfile.mkdtemp(prefix=".making-", dir=compiled.BUILDS))
            shutil.copytree(made, staged, dirs_exist_ok=True)
        except OSError as error:
            raise CompileError(
                f"the compiled scheduler cannot be written to {compiled.BUILDS}: {error.strerror}"
            ) from None
    for old in compiled.BUILDS.glob(f"sched-*-{sysconfig.get_config_var('SOABI')}"):
        shutil.rmtree(old, ignore_errors=True)
    staged.chmod(0o755)
    try:
        staged.rename(folder)
    except OSError:
        # Another process was faster; its build is the same.
        shutil.rmtree(staged, ignore_errors=True)
    return folder


def _build(scratch: Path) -> Path:
    """Compile the modules below ``scratch``; returns their folder."""
    try:
        from mypyc.build import mypycify
        from setuptools import Distribution
    except ImportError as error:
        raise CompileError(
            f"the scheduler was not compiled: {error.name} is not installed; make the environment with --extra compile"
        ) from None
    compiler = (os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc").split()[0]
    header = Path(sysconfig.get_path("include")) / "Python.h"
    missing = (
        f"the C compiler {compiler!r}" if shutil.which(compiler) is None else "" if header.exists() else str(header)
    )
    if missing:
        raise CompileError(
            f"the scheduler was not compiled: {missing} is not there; on Debian: apt-get install gcc python3-dev"
        )
    # A copy: mypy takes package names from folders, and rejects sources in site-packages.
    shutil.copytree(compiled.SOURCES, scratch / "libra_hpc", ignore=shutil.ignore_patterns("__pycache__", "tables"))
    print("compiling the scheduler (half a minute) ...", flush=True)
    before = Path.cwd()
    os.chdir(scratch)
    try:
        sources = [f"libra_hpc/{name}.py" for name in compiled.MODULES]
        extensions = mypycify(
            ["--config-file=", "--ignore-missing-imports", f"--cache-dir={scratch}/cache", *sources],
            group_name=GROUP,
            debug_level="0",
        )
        for extension in extensions:
            # Generated code: warnings differ between compilers.
            extension.extra_compile_args = [a for a in extension.extra_compile_args if a != "-Werror"]
        command = Distribution({"name": "libra-hpc-sched", "ext_modules": extensions}).get_command_obj("build_ext")
        command.build_lib, command.build_temp = str(scratch / "lib"), str(scratch / "temp")
        command.ensure_finalized()
        command.run()
    except (Exception, SystemExit) as error:
        raise CompileError(f"the scheduler was not compiled: {type(error).__name__}: {error}") from error
    finally:
        os.chdir(before)
    return scratch / "lib" / "libra_hpc"


def main() -> int:
    """Command line; exit code 1 if nothing was built and the sources stay in use."""
    try:
        folder = compile_scheduler()
    except CompileError as error:
        print(f"{error}.  It runs interpreted, and its decisions take three times as long.", file=sys.stderr)
        return 1
    if folder is not None or "--quiet" not in sys.argv[1:]:
        print(
            "the compiled scheduler is up to date" if folder is None else f"the scheduler is compiled ({folder.name})"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
