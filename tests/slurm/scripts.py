"""Batch scripts executed by bash, with small programs in the place of Slurm's."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from libra_hpc.config.load import validate
from libra_hpc.facts.rundir import RunDir
from libra_hpc.slurm.launch import Launch, job_request
from libra_hpc.slurm.writer import het_script

MEETS = """
import asyncio, os, pathlib, sys
from libra_hpc.mesh.mpi_link import MpiLink
from libra_hpc.process.owner_link import OwnerLink
owner, folder = OwnerLink(), pathlib.Path(sys.argv[1])
link = MpiLink(owner.rank, owner.size, owner.secret)
async def main():
    met = asyncio.Event()
    link.serve(lambda kind, content: met.set(), lambda: os._exit(1), lambda put: link.release(owner.gather(put)))
    await met.wait()
asyncio.run(main())
"""
"""Program of a rank whose MPI process meets the others."""


def program(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)
    return path


def executed(
    folder: Path, config: Mapping[str, Any], programs: Mapping[str, str], **environ: str
) -> tuple[RunDir, subprocess.CompletedProcess[str]]:
    """Execute the script of a run; ``programs``: texts by name, found before all others."""
    run = RunDir(folder / "a run")
    run.logs(1).mkdir(parents=True)
    for name, text in programs.items():
        program(folder / name, text)
    checked = validate(config)
    run.write_config(checked.as_data())
    text = het_script(Launch(job_request(checked), run, 1))
    # torch sets one of the caches in the process of a test.
    outer = {name: value for name, value in os.environ.items() if "_CACHE" not in name}
    environment = {**outer, "PATH": f"{folder}:{os.environ['PATH']}", "RUN": str(run.path), **environ}
    return run, subprocess.run(["bash", "-c", text], env=environment, capture_output=True, text=True, timeout=60)
