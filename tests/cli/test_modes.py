"""Modes of the files of a run: they follow `run.share` whatever the umask is, and nobody but the owner can write."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from libra_hpc_cli import jobs

from libra_hpc.facts.rundir import MODES, PRIVATE, RunDir
from libra_hpc.files import OTHERS_WRITE, OWNER_ONLY
from libra_hpc.slurm import submit

from .conftest import RUN, Cli, Queue

SECRET = ("config", "toml", "script", "spot_script", "sweep")
"""Parts that may have secrets, or that the owner's job executes."""


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


@pytest.fixture(params=["0o077", "0o000", "0o002"])
def umask(request: pytest.FixtureRequest) -> Iterator[None]:
    before = os.umask(int(request.param, 8))
    yield
    os.umask(before)


@pytest.mark.parametrize("share", MODES)
@pytest.mark.parametrize("words", ["submit", "sweep --over run.seed=0,1"])
def test_every_file_of_a_run_has_the_mode_of_its_share_whatever_the_umask(
    words: str, share: str, umask: None, site: Path, queue: Queue, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "queue", submit.submit)
    monkeypatch.setattr(submit, "cluster_name", lambda env: "")
    monkeypatch.setattr(submit, "_answer", lambda *_, **__: "4711")
    (site / "run.toml").write_text(RUN + "[borrow.spot]\nnodes = 1\n")
    verb, *options = words.split()
    outcome = cli(verb, "run.toml", *options, "-o", f"run.share={share}", "-o", "run.dir=new/runs")
    assert outcome.code == 0, outcome.err
    paths = [site / "new", *(site / "new").rglob("*")]
    assert [path for path in paths if mode(path) & OTHERS_WRITE] == []
    runs = [RunDir(path.parent) for path in paths if path.name == "job.json"]
    assert len(runs) == (1 if verb == "submit" else 2)
    secret = {getattr(run, name) for run in runs for name in SECRET} | {site / "new" / "runs" / "sweep-quick.json"}
    assert {mode(path) for path in paths if path in secret} == {OWNER_ONLY}
    assert {mode(run.path) for run in runs} == {MODES[share]}
    assert {"keychain.py", "attempt-1"} <= {path.name for path in paths}, "copied code and logs"
    if MODES[share] == PRIVATE:
        return
    # A folder can be entered by whom it is shared with, a file is not executable.
    closed = {path for path in paths if mode(path) != MODES[share] & (0o777 if path.is_dir() else 0o666)}
    assert closed == {path for path in paths if path in secret}
