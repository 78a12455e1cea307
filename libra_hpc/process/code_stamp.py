"""Which code a process runs: the version, and a hash of the library's sources.

The job names the stamp of the code that submitted it, and agents inside an image compare theirs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import cache
from pathlib import Path

STAMP = "LIBRA_HPC_CODE"
"""Environment variable with the stamp of the code that submitted the job."""
ROOT = Path(__file__).parents[1]


@cache
def code_stamp(root: Path = ROOT) -> str:
    """The version and a hash of the sources, as ``0.1.0+4f0c9a1be2d8``."""
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes() + b"\0")
    from importlib.metadata import version

    return f"{version('libra-hpc')}+{digest.hexdigest()[:12]}"


def other_code(environ: Mapping[str, str]) -> str:
    """What is wrong where this is not the code that submitted the job, in a sentence; empty: nothing."""
    wanted = environ.get(STAMP, "")
    if not wanted or wanted == code_stamp():
        return ""
    versions = f"compute.image has libra-hpc {code_stamp()}, and the run was submitted with {wanted}"
    return f"{versions}: build the image from that checkout (docs/site.md), or submit with the image's version"
