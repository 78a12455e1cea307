"""ShellCheck finds nothing in the batch scripts, in their variants, and in the repository's own shell files."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from libra_hpc.facts.rundir import RunDir
from libra_hpc.slurm.launch import Launch, job_request
from libra_hpc.slurm.writer import het_script

from .test_examples import FILES, resolved
from .test_writer import FULL, LAYOUTS, SITE, script

ROOT = Path(__file__).parents[2]
SHELLCHECK = Path(sys.executable).with_name("shellcheck")
VARIANTS: dict[str, dict[str, Any]] = {
    "all options": FULL,
    "defaults": {},
    "a site": SITE,
    "apptainer": {**SITE, "slurm": {"device": "cuda"}, "compute": {**SITE["compute"], "container": "apptainer"}},
    "pyxis": {**SITE, "compute": {**SITE["compute"], "container": "pyxis"}},
    "no container": {**SITE, "compute": {**SITE["compute"], "container": "none"}},
    "planner beside the first train node": {**FULL, "components": {**FULL["components"], "planner": {"nodes": 0}}},
    "one node": {"components": {"one_node": True, "train": {"gpus": 4}, "rollout": {"gpus": 4}}},
    **LAYOUTS,
    "an interface, a login shell": {**FULL, "slurm": {"interface": "ib0", "login_shell": True}},
}


def findings(text: str) -> str:
    done = subprocess.run([SHELLCHECK, "-"], input=text, capture_output=True, text=True, timeout=60)
    assert done.returncode in (0, 1), done.stderr
    return done.stdout


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_batch_script_is_clean(variant: str) -> None:
    assert findings(script(VARIANTS[variant])) == ""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.nightly) if "-48-" in name else name for name in FILES]
)
@pytest.mark.usefixtures("few_batches")
def test_the_script_of_an_example_is_clean(name: str, tmp_path: Path) -> None:
    assert findings(het_script(Launch(job_request(resolved(name, tmp_path)), RunDir(tmp_path / "run-001"), 1))) == ""


def test_shell_files_of_the_repository_are_clean() -> None:
    found = [*(ROOT / ".ci").iterdir(), *(path for name in ("envs", "examples") for path in (ROOT / name).glob("*.sh"))]
    assert found
    for path in found:
        assert findings(path.read_text()) == "", path
