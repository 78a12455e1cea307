"""Download and unpack Debian 12's Slurm without root and without installing it.

`apt-get download` works for every user with its own state and cache folders; `dpkg-deb -x` unpacks the archives.  The
result is one folder per Slurm series and machine type.  It gets its final name only when complete.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from libra_hpc.errors import OperationError
from libra_hpc.files import cache_folder

SERIES = "22.05"
"""Slurm release of Debian 12, the one this cluster's configuration was written for."""
CODENAME = "bookworm"
PACKAGES = ("munge", "libmunge2", "slurmctld", "slurmd", "slurm-client", "slurm-wlm-basic-plugins")
LIBRARIES = (
    "libhwloc15",
    "libnuma1",
    "libjson-c5",
    "libhttp-parser2.9",
    "libyaml-0-2",
    "libjansson4",
    "libjwt0",
    "libreadline8",
)
"""Shared libraries that a minimal system may lack; the C library and those of `apt` are always there."""
ROLES = ("slurmctld", "slurmd", "slurmstepd")
"""Slurm derives its role from the program's name, and Debian installs these as ``NAME-wlm``."""
DOWNLOAD_TIMEOUT_S = 600.0
"""Seconds for about 4 MB of packages and 50 MB of package lists, on a slow line."""
WAY_OUT = "use --executor local to run without Slurm"

Progress = Callable[[str], None]


@dataclass(frozen=True)
class SlurmTools:
    """One unpacked Slurm."""

    root: Path

    @property
    def bin(self) -> Path:
        """Client commands (``sbatch``, ``srun``, ...)."""
        return self.root / "usr" / "bin"

    @property
    def sbin(self) -> Path:
        """The folder of Slurm's daemons."""
        return self.root / "usr" / "sbin"

    @property
    def libraries(self) -> Path:
        """Shared libraries of the machine's architecture."""
        return self.root / "usr" / "lib" / f"{platform.machine()}-linux-gnu"

    @property
    def plugins(self) -> Path:
        """Slurm's plugin folder."""
        return self.libraries / "slurm-wlm"

    @property
    def search_paths(self) -> dict[str, str]:
        """Search paths of these programs alone, by variable."""
        return {
            "PATH": _prefixed([self.bin, self.sbin], ""),
            "LD_LIBRARY_PATH": _prefixed([self.libraries, self.plugins], ""),
        }

    def environment(self, conf: Path) -> dict[str, str]:
        """Variables for these programs with ``conf``; present search paths come after ours."""
        return {
            "SLURM_CONF": str(conf),
            "PATH": _prefixed([self.bin, self.sbin], os.environ.get("PATH", os.defpath)),
            "LD_LIBRARY_PATH": _prefixed([self.libraries, self.plugins], os.environ.get("LD_LIBRARY_PATH", "")),
        }


def ensure_packages(progress: Progress) -> SlurmTools:
    """Return the unpacked Slurm, after a download when the cache has none.

    Raises `OperationError` on another distribution, without ``apt-get``, or without a network.
    """
    cache = cache_folder()
    target = cache / f"slurm-{SERIES}-{platform.machine()}"
    if not target.exists():
        _require_debian()
        cache.mkdir(parents=True, exist_ok=True)
        with locked(cache / "slurm.lock"):
            # A second starter that waited for the lock finds the work done.
            if not target.exists():
                _download(target, progress)
    return SlurmTools(target)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on ``path``, at most as long as this process lives."""
    with path.open("a") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def runs_from(folder: Path) -> bool:
    """Whether a process of this user, on this machine, runs a program below ``folder``."""
    folder = folder.resolve()
    for link in Path("/proc").glob("[0-9]*/exe"):
        with contextlib.suppress(OSError):
            if link.readlink().is_relative_to(folder):
                return True
    return False


def apt_environment(work: Path, status: Path = Path("/var/lib/dpkg/status")) -> dict[str, str]:
    """Variables with which `apt-get` needs no root: lists and archives are below ``work / "apt"``.

    ``status``: the packages that it takes for installed.
    """
    lists, archives = work / "apt" / "lists", work / "apt" / "cache"
    for folder in (lists / "partial", archives / "archives" / "partial"):
        folder.mkdir(parents=True)
    conf = work / "apt.conf"
    conf.write_text(
        f'Dir::State "{work}/apt"; Dir::State::lists "{lists}"; Dir::State::status "{status}";'
        f' Dir::Cache "{archives}";\nDebug::NoLocking "1"; APT::Sandbox::User ""; Acquire::Retries "2";'
        ' Acquire::http::Timeout "30";\n'
    )
    return {**os.environ, "APT_CONFIG": str(conf), "LC_ALL": "C"}


def _prefixed(folders: list[Path], present: str) -> str:
    ours = [str(folder) for folder in folders]
    return ":".join(ours + [part for part in present.split(":") if part and part not in ours])


def _require_debian() -> None:
    try:
        codename = platform.freedesktop_os_release().get("VERSION_CODENAME", "")
    except OSError:
        codename = ""
    missing = [name for name in ("apt-get", "dpkg-deb") if shutil.which(name) is None]
    if codename == CODENAME and not missing:
        return
    why = (
        f"this machine lacks {' and '.join(missing)}"
        if codename == CODENAME
        else f"this machine is not Debian 12 ({codename or 'unknown release'})"
    )
    raise OperationError(f"The embedded Slurm needs Debian 12's packages and {why}; {WAY_OUT}.")


def _download(target: Path, progress: Progress) -> None:
    work = Path(tempfile.mkdtemp(prefix="slurm-download-", dir=target.parent))
    try:
        debs, root = work / "debs", work / "root"
        for folder in (debs, root):
            folder.mkdir()
        env = apt_environment(work)
        _apt(["update", "-qq"], "reading the package lists", growing=work / "apt", env=env, cwd=debs, progress=progress)
        download = ["download", "-qq", *PACKAGES, *LIBRARIES]
        _apt(download, f"downloading Slurm {SERIES}", growing=debs, env=env, cwd=debs, progress=progress)
        progress("unpacking")
        for deb in sorted(debs.glob("*.deb")):
            subprocess.run(["dpkg-deb", "-x", str(deb), str(root)], check=True, capture_output=True)
        for role in ROLES:
            (root / "usr" / "sbin" / role).symlink_to(f"{role}-wlm")
        root.rename(target)
    except (OSError, subprocess.CalledProcessError) as error:
        raise OperationError(
            f"The packages of the embedded Slurm could not be unpacked into {target}: {error}; {WAY_OUT}."
        ) from error
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _apt(arguments: list[str], what: str, *, growing: Path, env: dict[str, str], cwd: Path, progress: Progress) -> None:
    """Run one apt-get command and report the size of the folder ``growing`` about once a second."""
    progress(what)
    log = cwd.parent / "apt.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            ["apt-get", *arguments], cwd=cwd, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
        )
    deadline = time.monotonic() + DOWNLOAD_TIMEOUT_S
    try:
        while True:
            try:
                code = process.wait(timeout=1.0)
                break
            except subprocess.TimeoutExpired:
                megabytes = sum(file.stat().st_size for file in growing.rglob("*") if file.is_file()) / 1e6
                progress(f"{what}: {megabytes:.1f} MB")
                if time.monotonic() > deadline:
                    raise OperationError(
                        f"Downloading the embedded Slurm took longer than {DOWNLOAD_TIMEOUT_S:.0f} s; {WAY_OUT}."
                    ) from None
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    if code:
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.startswith("E:")]
        reason = lines[-1].removeprefix("E:").strip() if lines else f"apt-get {arguments[0]} ended with {code}"
        raise OperationError(
            f"The packages of the embedded Slurm cannot be downloaded ({reason.rstrip('.')}); {WAY_OUT}."
        )
