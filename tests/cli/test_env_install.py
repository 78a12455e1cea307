"""`libra-hpc env install`: from a folder of wheels, without an index."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from libra_hpc_envs import install

from .conftest import Cli
from .test_install import wheel


@pytest.fixture
def pinned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder of wheels, with a small package in place of verifiers."""
    monkeypatch.setattr(install, "requirements", lambda names: [f"zz_{names[0]}==0.4.0"])
    monkeypatch.setattr("libra_hpc_cli.env_verbs.LIBRARIES", {"verifiers": "zz_verifiers"})
    folder = tmp_path / "wheels"
    folder.mkdir()
    for name, version in (("zz_verifiers", "0.4.0"), ("zz_taskset", "1.0")):
        wheel(folder, name, version)
    return folder


def test_an_environment_is_made_from_a_folder_of_wheels(cli: Cli, pinned: Path, tmp_path: Path) -> None:
    made = tmp_path / "vf"
    outcome = cli("env", "install", "verifiers", str(made), "--wheels", str(pinned), "--with", "zz-taskset")
    assert outcome.code == 0, outcome.err
    assert outcome.out.splitlines()[0] == f"installing 2 packages into {made}"
    assert f"{made}/bin/python has verifiers after " in outcome.out
    subprocess.run([made / "bin/python", "-I", "-c", "import zz_verifiers, zz_taskset"], check=True)
