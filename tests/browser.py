"""A headless browser for tests of pages: Debian 12's `chromium-headless-shell`, unpacked without root and without a
network of its own.

- That program on ``PATH`` -> it.
- Else the packages of the browser, and those it needs and this machine lacks, into the cache folder of the embedded
  Slurm: about 100 MB to download, 340 MB unpacked.
- No packages -> `OperationError`: a page that no browser has shown is not tested.
"""

from __future__ import annotations

import html
import json
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from libra_hpc.annexes.devcluster.packages import apt_environment, locked
from libra_hpc.errors import OperationError
from libra_hpc.files import cache_folder

PACKAGE = "chromium-headless-shell"
WHOLE = (PACKAGE, "chromium-common", "fonts-dejavu-core")
"""Fetched even where the machine has them: the browser looks for its files beside itself."""
FONTS = "usr/share/fonts"
SERIES = "bookworm"
"""Its security updates replace each other on the mirrors, so that no version of the browser can be pinned."""
NOT_CALLED = ("x11-utils", "xdg-utils")
"""Dependencies for desktops; the headless shell calls neither, and they bring 50 MB."""
DOWNLOAD_S = 240.0
"""Longest call of the package manager; usually 5 s.  A test has 300 s."""
PAGE_S = 60.0
"""Longest look at one page; usually 1 s."""
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--hide-scrollbars", "--disable-dev-shm-usage"),
    # Every name resolves to nothing: a page that asks for something outside itself does not get it.
    "--host-resolver-rules=MAP * ~NOTFOUND",
)
SCHEMES = {"light": 1, "dark": 0}
"""Blink's numbers of ``prefers-color-scheme``."""


class Browser:
    """One program; every page gets a new profile."""

    def __init__(self, program: Path, root: Path = Path("/")) -> None:
        """``root``: where its packages were unpacked."""
        folders = ("usr/lib/{}", "lib/{}", "usr/lib/{}/pulseaudio")
        self._libraries = [root / folder.format(f"{platform.machine()}-linux-gnu") for folder in folders]
        self._program, self._fonts = program, root / FONTS

    def dom(self, page: Path, scheme: str = "light") -> str:
        """The document as HTML, after its scripts ran."""
        return self._run("--dump-dom", page=page, scheme=scheme).decode()

    def measure(self, page: Path, script: str, folder: Path, widths: Sequence[int], scheme: str = "light") -> list[Any]:
        """What the JavaScript expression ``script`` gives for the page, as ``shown``, in a frame of each width in
        pixels.

        The frames are in a page of its own, so that the page itself needs no script.
        """
        text = html.escape(page.read_text())
        frames = "".join(f'<iframe width={width} height=900 srcdoc="{text}"></iframe>' for width in widths)
        wrapper = folder / "wrapper.html"
        wrapper.write_text(
            f"<!doctype html>{frames}<pre></pre><script>onload = () => {{ document.querySelector('pre').textContent ="
            " JSON.stringify([...document.querySelectorAll('iframe')].map(e => e.contentDocument).map(shown =>"
            f" ({script}))) }}</script>"
        )
        found = self.dom(wrapper, scheme).rpartition("<pre>")[2].partition("</pre>")[0]
        measured: list[Any] = json.loads(html.unescape(found))
        return measured

    def _run(self, *arguments: str, page: Path, scheme: str) -> bytes:
        with tempfile.TemporaryDirectory(prefix="browser-") as folder:
            flags = [*FLAGS, f"--user-data-dir={folder}", f"--blink-settings=preferredColorScheme={SCHEMES[scheme]}"]
            done = subprocess.run(
                [str(self._program), *flags, *arguments, page.absolute().as_uri()],
                env=self._environment(Path(folder)),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=PAGE_S,
            )
        if done.returncode:
            raise OperationError(f"{self._program} ended with {done.returncode}: {done.stderr.decode()[-500:]}")
        return done.stdout

    def _environment(self, folder: Path) -> dict[str, str]:
        """A home of its own, and the machine's fonts and those that came with the browser: a bare machine has none."""
        fonts = folder / "fonts.conf"
        fonts.write_text(
            f"<fontconfig><dir>/{FONTS}</dir><dir>{self._fonts}</dir><cachedir>{folder}/fonts</cachedir></fontconfig>"
        )
        return {
            "HOME": str(folder),
            "FONTCONFIG_FILE": str(fonts),
            "PATH": os.environ.get("PATH", os.defpath),
            "LD_LIBRARY_PATH": ":".join(map(str, self._libraries)),
        }


def ensure_browser() -> Browser:
    """The browser, after a download when this machine has none."""
    if found := shutil.which(PACKAGE):
        return Browser(Path(found))
    cache = cache_folder()
    root = cache / f"chromium-with-fonts-{SERIES}-{platform.machine()}"
    cache.mkdir(parents=True, exist_ok=True)
    with locked(cache / "chromium.lock"):
        if not root.exists():
            _unpack(root)
    return Browser(root / "usr/lib/chromium/chromium-headless-shell", root)


def _unpack(root: Path) -> None:
    work = Path(tempfile.mkdtemp(prefix="chromium-download-", dir=root.parent))
    try:
        status = work / "status"
        installed = "".join(
            f"Package: {name}\nStatus: install ok installed\nArchitecture: all\nMulti-Arch: foreign\nVersion: 99\n"
            "Maintainer: -\nDescription: -\n\n"
            for name in NOT_CALLED
        )
        status.write_text(installed + Path("/var/lib/dpkg/status").read_text())
        environment = apt_environment(work, status)
        _call(["apt-get", "update", "-qq"], environment)
        _call(
            ["apt-get", "install", "-qq", "-y", "--download-only", "--no-install-recommends", "--reinstall", *WHOLE],
            environment,
        )
        unpacked = work / "root"
        for deb in sorted((work / "apt/cache/archives").glob("*.deb")):
            _call(["dpkg-deb", "-x", str(deb), str(unpacked)], environment)
        unpacked.rename(root)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise OperationError(f"The test browser cannot be unpacked: {error}.") from error
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _call(command: list[str], environment: Mapping[str, str]) -> None:
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=DOWNLOAD_S)
    if done.returncode:
        raise OperationError(f"The test browser cannot be fetched: {' '.join(command[:2])}: {done.stderr[-500:]}")
