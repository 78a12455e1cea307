"""The script of a strict site on the embedded Slurm: nothing exported, `set -u`, a template, an image.

The container's runtime is a stand-in that starts its command as it is, and notes what it was given.
"""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

import pytest

from libra_hpc.annexes.devcluster.cluster import ClusterInfo
from libra_hpc.facts.rundir import read_lines

from .runs import trained_once
from .test_dry_run import DryRun

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
APPTAINER = """#!/bin/bash
[ "$1" = exec ] || exit 9
printf '%s\\n' "$*" "nofile $(ulimit -Sn) $(ulimit -Hn)" "triton $TRITON_CACHE_DIR" >"$NOTES/$SLURM_PROCID"
while [ "$1" != "$IMAGE" ]; do shift; done
shift
exec "$@"
"""
TEMPLATE = Path(__file__).parents[2] / "sbatch" / "run.sbatch.j2"


def test_a_run_starts_where_nothing_is_exported_and_every_variable_must_be_set(
    cluster: ClusterInfo, tmp_path: Path
) -> None:
    programs, notes, image, template = (tmp_path / name for name in ("bin", "notes", "libra.sif", "my.sbatch.j2"))
    for folder in (programs, notes):
        folder.mkdir()
    image.touch()
    (programs / "apptainer").write_text(APPTAINER)
    (programs / "apptainer").chmod(0o755)
    template.write_text(
        TEMPLATE.read_text().replace("unset CUDA", f"touch {tmp_path}/from-the-template\nunset CUDA", 1)
    )
    case = DryRun(tmp_path, "slurm", steps=4)
    # As a site's module for Slurm does: without exports its commands are not on PATH.
    slurm = [f"export {name}={shlex.quote(value)}" for name, value in cluster.environment.items()]
    setup = ["set -u", *slurm, f"export PATH={shlex.quote(str(programs))}:$PATH"]
    changes = {
        "algorithm.eta": 0,
        "planner.enabled": "false",
        "train.micro_tokens": 512,
        "components.hybrid.nodes": 0,
        "rollout.tp": 8,
        "rollout.engines_per_node": 1,
        "slurm.extra": '["--export=NONE"]',
        "slurm.template": template,
        "compute.setup": setup,
        "compute.env.NOTES": notes,
        "compute.env.IMAGE": image,
        "compute.container": "apptainer",
        "compute.image": image,
        "compute.python": sys.executable,
        "compute.local_dir": f"{tmp_path}/scratch/$SLURM_JOB_ID",
    }
    run = case.submit(
        "--engine", "simulated", *(word for key, value in changes.items() for word in ("-o", f"{key}={value}"))
    )
    assert case.ended() == "completed", case.logs()
    trained_once(run, 4)
    assert {event["version"] for event in case.events("weights_applied")} >= {1, 2, 3}
    ahead = [line["train_ahead_s"] for line in read_lines(run.metrics)]
    assert ahead[0] == 0.0 < max(ahead), "after the first step, groups are trained while others are sampled"
    assert (tmp_path / "from-the-template").exists()
    for rank in range(3):
        given, limits, cache = (notes / str(rank)).read_text().splitlines()
        # The folder of the template has all others in it.
        assert f"--bind={tmp_path} {image} {sys.executable} -m libra_hpc.slurm.rank" in given
        _, soft, hard = limits.split()
        assert soft == hard
        assert cache.startswith(f"triton {tmp_path}/scratch/")
        assert cache.endswith(f"/cache-{os.getuid()}/triton")
